"""Training runs on annotated stacks: queue them, run one at a time in a child process, and serve the new models."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from service.core.config import Settings
from service.core.errors import (
    BadParameter,
    FeatureDisabled,
    NotReady,
    OutOfStorage,
    QueueFull,
    StackSegError,
    remove_host_details,
)
from service.models.repository import MODEL_FILE_NAME
from service.models.spec import TargetName, check_trainable
from service.serving.learning.annotation import Annotation, check_no_overlaps
from service.serving.learning.trained_models import WORK_FOLDER_PREFIX, TrainedModels, write_owner
from service.serving.learning.training_child import INTERNAL_ERROR_MESSAGE, TRAINING_MODULE, TrainingChild
from service.serving.learning.training_queue import TrainingQueue
from service.serving.learning.training_record import INTERRUPTED_MESSAGE, TrainingRecord
from service.serving.storage.disk import translate_disk_errors
from service.serving.storage.scratch import delete_abandoned_folders, make_locked_folder

if TYPE_CHECKING:
    from service.serving.devices.model_registry import ModelRegistry
    from service.serving.learning.annotations import AnnotationStore

# Modules that the `train` extra installs.
REQUIRED_MODULES = ("edt", "scipy", "skimage")
RETRY_AFTER_SECONDS = 60
JOIN_TIMEOUT_SECONDS = 10.0
# The training process is killed after `trainings.minutes` times this factor.
TIMEOUT_FACTOR = 2
# Sections of the settings that are passed to the training process.
SETTINGS_SECTIONS = ("device", "engine", "windows", "limits", "training")

DELETED_STACK_MESSAGE = (
    "The annotated stack {} was deleted, so training on it has ended. Start the training again without this stack."
)
DISK_FULL_MESSAGE = (
    "The disk that contains the trained models is full, so the new model could not be stored. Ask the operator to free"
    " some space, then start the training run again."
)

log = logging.getLogger(__name__)


class NewTraining(NamedTuple):
    """A training request from a client.

    model           name of the model from which the training starts; None for the default model
    annotations     IDs of annotated stacks
    minutes         maximum duration of the training run
    name            name of the new model
    partial         whether only some objects of the stacks are annotated
    partial_planes  whether only some planes of the stacks are annotated
    target          what the new model learns; None for the same as the model from which the training starts
    """

    model: str | None
    annotations: Sequence[str]
    minutes: float
    name: str
    partial: bool = False
    partial_planes: bool = False
    target: TargetName | None = None


class TrainingManager:
    """The training runs of the service. A thread processes one run at a time. Thread-safe.

    is_stopping  function that returns whether the service is stopping
    module       module that the child process runs, which implements the protocol of `service.training.process`

    A training run that is unfinished when the service stops is interrupted, and it is not resumed.
    """

    def __init__(
        self,
        settings: Settings,
        annotations: AnnotationStore,
        models: ModelRegistry,
        is_stopping: Callable[[], bool],
        module: str = TRAINING_MODULE,
    ) -> None:
        self._settings, self._annotations, self._models = settings, annotations, models
        self._is_service_stopping, self._module = is_stopping, module
        self._stopped = threading.Event()
        self.queue = TrainingQueue(settings.annotations_folder / "trainings")
        self.trained_models = TrainedModels(settings, models, self.queue, self._stopped)
        self._child: TrainingChild | None = None
        self._thread = threading.Thread(target=self._run_all, name="training", daemon=True)

    def start(self) -> None:
        """Read the records of earlier processes, delete their leftover files, and start to process training runs."""
        delete_abandoned_folders(self._settings.trained_folder, WORK_FOLDER_PREFIX)
        self.queue.load()
        self._thread.start()

    def stop(self) -> None:
        """Interrupt all running and waiting training runs."""
        with self.queue.condition:
            self._stopped.set()
            waiting_records = self.queue.waiting_records
            self._kill_child()
            self.queue.condition.notify_all()
        self._thread.join(JOIN_TIMEOUT_SECONDS)
        for record in waiting_records:
            self.queue.end(record, "interrupted", INTERRUPTED_MESSAGE)

    def check_enabled(self) -> None:
        """Raise FeatureDisabled with the reason if training is disabled or impossible."""
        if not self._settings.trainings.enabled or not self._settings.annotations.quota_bytes:
            raise FeatureDisabled(
                "Training is disabled on this service: trainings.enabled is false, or annotations.quota_bytes is 0."
            )
        if missing_modules := [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]:
            raise FeatureDisabled(
                f"Training is not available, because these packages are missing: {', '.join(missing_modules)}. The"
                " operator can install them with: pip install 'stackseg[train]'."
            )

    def submit(self, request: NewTraining, owner: str | None, *, is_admin: bool) -> TrainingRecord:
        """Queue a training run that creates a new model from an existing model.

        Raises FeatureDisabled, UnknownModel, UnknownAnnotation, BadParameter, QueueFull and NotReady.
        """
        self.check_enabled()
        limits = self._settings.trainings
        spec = self._models.get_servable_spec(request.model)
        check_trainable(spec, request.target)
        if request.minutes > limits.minutes:
            raise BadParameter.for_parameter(
                "minutes",
                f"the maximum is {limits.minutes:g} (trainings.minutes).",
                suggested={"minutes": f"{limits.minutes:g}"},
            )
        annotation_ids = list(dict.fromkeys(request.annotations))
        check_no_overlaps(
            [self._annotations.find(annotation_id, owner, is_admin=is_admin) for annotation_id in annotation_ids]
        )
        record = TrainingRecord(
            uuid.uuid4().hex, owner, request.name, spec.identifier, annotation_ids, request.minutes, time.time()
        )
        record.partial, record.partial_planes = request.partial, request.partial_planes
        record.target = request.target
        with self.queue.condition:
            # The model may have been deleted in the meantime.
            self._models.get_servable_spec(spec.name)
            self.trained_models.check_name(request.name)
            self._check_limits(owner)
            self.queue.add(record)
        self.queue.delete_oldest(owner)
        return record

    def cancel(self, training_id: str, owner: str | None, *, is_admin: bool = False) -> None:
        """Cancel an unfinished training run, or delete the record of a finished one. Raises UnknownTraining."""
        record = self.queue.find(training_id, owner, is_admin=is_admin)
        with self.queue.condition:
            if record.has_ended:
                self.queue.delete(record)
                return
            self.queue.cancel(record)
            if record is self.queue.running_record:
                self._kill_child()
        self.queue.save(record)

    def withdraw_annotation(self, annotation: Annotation) -> None:
        """End all unfinished training runs that use an annotated stack, because the stack was deleted."""
        with self.queue.condition:
            for record in self.queue.unfinished_records:
                if annotation.id in record.annotations:
                    self.queue.end(record, "failed", DELETED_STACK_MESSAGE.format(annotation.name or annotation.id))
                    if record is self.queue.running_record:
                        self._kill_child()

    def _check_limits(self, owner: str | None) -> None:
        if self._is_stopping():
            raise NotReady("The service is stopping. Start the training after it has restarted.")
        waiting_records, max_waiting, models = (
            self.queue.waiting_records,
            self._settings.trainings.waiting,
            self.trained_models,
        )
        counts = models.count_models() + Counter(record.owner for record in self.queue.unfinished_records)
        # As for disk space, an owner of one of several keys may have at most as many models as it leaves free.
        free_count = models.max_models - counts.total()
        if free_count <= 0 or (len(self._settings.access.keys) > 1 and counts[owner] >= free_count):
            raise OutOfStorage(
                f"There are {counts.total()} trained models, {counts[owner]} of which are yours. The maximum for all"
                f" users is {models.max_models} (trainings.models). Delete models with DELETE /models/NAME, which"
                " requires the API key used to train the model, or an admin key."
            )
        if len(waiting_records) >= max_waiting:
            raise QueueFull("Too many training runs are waiting. Try again when one has ended.", RETRY_AFTER_SECONDS)
        if sum(record.owner == owner for record in waiting_records) >= max(1, max_waiting // 2):
            raise QueueFull(
                "Too many of your training runs are waiting. Try again when one has ended.", RETRY_AFTER_SECONDS
            )

    def _is_stopping(self) -> bool:
        return self._stopped.is_set() or self._is_service_stopping()

    def _run_all(self) -> None:
        while True:
            record = self.queue.wait_for_next_run(self._stopped)
            if record is None:
                return
            try:
                self._run(record)
            except OutOfStorage:
                self.queue.end(record, "failed", DISK_FULL_MESSAGE)
            except StackSegError as error:
                self.queue.end(record, "failed", remove_host_details(str(error)))
            except Exception:
                log.exception("unexpected failure of training run %s", record.id)
                self.queue.end(record, "failed", INTERNAL_ERROR_MESSAGE)
            finally:
                self.queue.clear_running_record()

    def _run(self, record: TrainingRecord) -> None:
        """Train and serve the new model. Raises StackSegError."""
        failure = self._make_model(record)
        if record.has_ended:
            self.trained_models.withdraw(record.name)
            self.queue.save(record)
        elif failure is not None:
            self.queue.end(record, "failed", failure)
        elif not (self._settings.trained_folder / record.name / MODEL_FILE_NAME).is_file():
            self.queue.end(record, "unimproved", record.message)
        else:
            self._serve(record)

    def _make_model(self, record: TrainingRecord) -> str | None:
        """Create the model folder atomically. If that fails, return the reason. Raises StackSegError.

        No folder is created if the new model is not better than its base model.
        """
        models_folder = self._settings.trained_folder
        # The registry does not find models in this folder, because it does not search nested folders.
        work_folder = models_folder / f"{WORK_FOLDER_PREFIX}{record.id}"
        with translate_disk_errors():
            models_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = make_locked_folder(work_folder)
            try:
                failure = self._train(record, work_folder / record.name)
                has_model = failure is None and (work_folder / record.name).is_dir()
                if has_model:
                    write_owner(work_folder / record.name, record.owner)
                with self.queue.condition:
                    if has_model and not self._interrupt_if_stopping(record):
                        (work_folder / record.name).rename(models_folder / record.name)
                return failure
            finally:
                shutil.rmtree(work_folder, ignore_errors=True)
                os.close(lock_fd)

    def _interrupt_if_stopping(self, record: TrainingRecord) -> bool:
        """Interrupt a run if the service is stopping. Return whether the run has ended for this or another reason.

        Call this with `queue.condition` held.
        """
        if self._is_stopping():
            self.queue.interrupt(record)
        return record.has_ended

    def _train(self, record: TrainingRecord, model_folder: Path) -> str | None:
        """Train the model in a child process. If that fails, return the reason. Raises StackSegError."""
        request = self._make_request(record, model_folder)
        with self.queue.condition:
            if self._interrupt_if_stopping(record):
                return record.message
            child = self._child = TrainingChild(record.id, self._module)
        with closing(child):
            # Scoring does not count toward the requested minutes. Its duration depends on the size of the annotated
            # stacks.
            failure = child.run(request, TIMEOUT_FACTOR * 60 * self._settings.trainings.minutes, record.update)
            with self.queue.condition:
                self._child = None
                if self._interrupt_if_stopping(record):
                    return record.message
            is_complete = (model_folder / MODEL_FILE_NAME).is_file() or record.better is False
            if failure is None and is_complete and record.after is not None:
                return None
            return child.explain_failure(failure)

    def _make_request(self, record: TrainingRecord, model_folder: Path) -> dict[str, Any]:
        """Return the request for `service.training.process`. Raises UnknownModel, BrokenModel and UnknownAnnotation."""
        spec = self._models.get_servable_spec(record.base_model.partition("/")[0])
        stacks = [self._annotations.find(annotation_id, None, is_admin=True) for annotation_id in record.annotations]
        limits = self._settings.trainings
        return {
            "stacks": [_describe_stack(stack) for stack in stacks],
            "base": str(spec.folder),
            "out": str(model_folder),
            "minutes": record.minutes,
            "memory_bytes": limits.memory_bytes,
            "niceness": limits.niceness,
            "keep_worse": limits.keep_worse,
            "is_partial": record.partial,
            "has_partial_planes": record.partial_planes,
            "target": record.target,
            "settings": self._settings.model_dump(mode="json", include=set(SETTINGS_SECTIONS)),
        }

    def _serve(self, record: TrainingRecord) -> None:
        """Serve the new model. If that fails or the run was canceled, delete the model. Raises StackSegError."""
        record.stage = "serving"
        try:
            self.trained_models.serve(record.name)
            self.queue.end(record, "done", record.message)
        finally:
            if record.state == "done":
                log.info("training run %s created the model %s: %s", record.id, record.name, record.message)
            else:
                self.trained_models.withdraw(record.name)

    def _kill_child(self) -> None:
        if self._child is not None:
            self._child.kill()


def _describe_stack(stack: Annotation) -> dict[str, Any]:
    return {
        "name": stack.name,
        "image": str(stack.image.resolve()),
        "labels": str(stack.labels.resolve()),
        "region": None if stack.region is None else stack.region.ranges,
        "diameter": stack.provenance.diameter,
        "ignored": stack.ignored,
        "is_partial": stack.is_partial,
    }
