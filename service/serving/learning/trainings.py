"""Trainings on annotated stacks: queued, run one at a time in a child process, and served as new models."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from service.core.config import Settings
from service.core.errors import BadParameter, NotReady, OutOfStorage, QueueFull, StackSegError, SwitchedOff
from service.core.errors import without_folders as shorten
from service.models.repository import FILE_NAME
from service.models.spec import check_trainable
from service.serving.learning.annotation import Annotation, find_overlaps
from service.serving.learning.trained_models import WORK_PREFIX, TrainedModels, write_owner
from service.serving.learning.training_child import MODULE, UNEXPECTED, TrainingChild
from service.serving.learning.training_queue import TrainingQueue
from service.serving.learning.training_record import INTERRUPTED, TrainingRecord
from service.serving.storage.disk import translate_disk_faults
from service.serving.storage.scratch import make_locked_folder, sweep

if TYPE_CHECKING:
    from service.serving.devices.model_registry import ModelRegistry
    from service.serving.learning.annotations import AnnotationStore

# Of the extra `train`.
NEEDED = ("edt", "scipy", "skimage")
RETRY_SECONDS = 60
JOIN_SECONDS = 10.0
# The process is ended after so many times `trainings.minutes`, whatever it does.
MOST_TIMES = 2
SECTIONS = ("device", "engine", "windows", "limits", "training")

log = logging.getLogger(__name__)


class NewTraining(NamedTuple):
    """What a client asks for.

    model        that the training starts from; None: the default one
    annotations  ids of annotated stacks
    minutes      that the training may take
    name         of the new model
    """

    model: str | None
    annotations: Sequence[str]
    minutes: float
    name: str


class Trainings:
    """The thread that runs trainings one at a time. Safe to use from threads.

    is_stopping  returns whether the service was told to stop
    module       what the child process runs, with the request and the progress of `service.training.process`

    A training that the service does not finish is interrupted: nothing of it is taken up again.
    """

    def __init__(
        self,
        settings: Settings,
        annotations: AnnotationStore,
        models: ModelRegistry,
        is_stopping: Callable[[], bool],
        module: str = MODULE,
    ) -> None:
        self._settings, self._annotations, self._models = settings, annotations, models
        self._is_told_to_stop, self._module = is_stopping, module
        self._stopped = threading.Event()
        self.queue = TrainingQueue(settings.annotations_folder / "trainings")
        self.trained_models = TrainedModels(settings, models, self.queue, self._stopped)
        self._child: TrainingChild | None = None
        self._thread = threading.Thread(target=self._run_all, name="training", daemon=True)

    def start(self) -> None:
        """Read the trainings of earlier processes, delete what is left of their work, and begin to run new ones."""
        sweep(self._settings.trained_folder, WORK_PREFIX)
        self.queue.load()
        self._thread.start()

    def stop(self) -> None:
        """End the training that runs, and all that wait: they are interrupted."""
        with self.queue.changed:
            self._stopped.set()
            waiting = self.queue.waiting
            self._kill()
            self.queue.changed.notify_all()
        self._thread.join(JOIN_SECONDS)
        for record in waiting:
            self.queue.end(record, "interrupted", INTERRUPTED)

    def check_enabled(self) -> None:
        """Raise SwitchedOff where nobody can train, with the reason."""
        if not self._settings.trainings.enabled or not self._settings.annotations.quota_bytes:
            raise SwitchedOff("Models are not trained here; the operator has set trainings.enabled to false.")
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise SwitchedOff(
                f"Models cannot be trained here for lack of {', '.join(missing)}; the operator may run"
                " pip install 'stackseg[train]'."
            )

    def submit(self, request: NewTraining, owner: str | None, *, admin: bool) -> TrainingRecord:
        """Queue a training that makes a new model of another one.

        Raises SwitchedOff, UnknownModel, UnknownAnnotation, BadParameter, QueueFull and NotReady.
        """
        self.check_enabled()
        limits = self._settings.trainings
        spec = self._models.servable_spec(request.model)
        check_trainable(spec)
        if request.minutes > limits.minutes:
            raise BadParameter.about(
                "minutes",
                f"no more than {limits.minutes:g} are allowed here (trainings.minutes).",
                suggested={"minutes": f"{limits.minutes:g}"},
            )
        unique = list(dict.fromkeys(request.annotations))
        _check_apart([self._annotations.find(annotation, owner, everyone=admin) for annotation in unique])
        record = TrainingRecord(
            uuid.uuid4().hex, owner, request.name, spec.identifier, unique, request.minutes, time.time()
        )
        with self.queue.changed:
            # It may have been deleted meanwhile.
            self._models.servable_spec(spec.name)
            self.trained_models.check_name(request.name)
            self._check_room(owner)
            self.queue.add(record)
        self.queue.forget_oldest(owner)
        return record

    def cancel(self, training: str, owner: str | None, *, everyone: bool = False) -> None:
        """Cancel a training that waits or runs; forget one that is over. Raises UnknownTraining."""
        record = self.queue.find(training, owner, everyone=everyone)
        with self.queue.changed:
            if record.over:
                self.queue.forget(record)
                return
            self.queue.cancel(record)
            if record is self.queue.running:
                self._kill()
        self.queue.save(record)

    def _check_room(self, owner: str | None) -> None:
        if self._is_stopping():
            raise NotReady("The service is stopping; start the training again when it is back.")
        waiting, most, models = self.queue.waiting, self._settings.trainings.waiting, self.trained_models
        if models.count() + len(self.queue.unfinished) >= models.most:
            raise OutOfStorage(
                f"There are {models.most} trained models (trainings.models); delete some, as DELETE /models/NAME does"
                " for the key that has trained them, and for admins."
            )
        if len(waiting) >= most:
            raise QueueFull("Too many trainings wait; try again when one is done.", RETRY_SECONDS)
        if sum(record.owner == owner for record in waiting) >= max(1, most // 2):
            raise QueueFull("Too many trainings of yours wait; try again when one is done.", RETRY_SECONDS)

    def _is_stopping(self) -> bool:
        return self._stopped.is_set() or self._is_told_to_stop()

    def _run_all(self) -> None:
        while True:
            with self.queue.changed:
                self.queue.changed.wait_for(lambda: self._stopped.is_set() or self.queue.waiting)
                record = None if self._stopped.is_set() else self.queue.begin_next()
            if record is None:
                return
            try:
                self._run(record)
            except StackSegError as error:
                self.queue.end(record, "failed", shorten(str(error)))
            except Exception:
                log.exception("training %s", record.id)
                self.queue.end(record, "failed", UNEXPECTED)
            finally:
                self.queue.end_running()

    def _run(self, record: TrainingRecord) -> None:
        """Run a training, and serve the model that it has made. Raises StackSegError."""
        failure = self._make_model(record)
        if record.over:
            self.trained_models.withdraw(record.name)
            self.queue.save(record)
        elif failure is not None:
            self.queue.end(record, "failed", failure)
        else:
            self._serve(record)

    def _make_model(self, record: TrainingRecord) -> str | None:
        """Make the model's folder, whole or not at all; return why there is none. Raises StackSegError."""
        trained = self._settings.trained_folder
        # A model file lies deeper there than where models are looked for.
        work = trained / f"{WORK_PREFIX}{record.id}"
        with translate_disk_faults():
            trained.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = make_locked_folder(work)
            try:
                failure = self._train(record, work / record.name)
                if failure is None:
                    write_owner(work / record.name, record.owner)
                with self.queue.changed:
                    if failure is None and not self._settle(record):
                        (work / record.name).rename(trained / record.name)
                return failure
            finally:
                shutil.rmtree(work, ignore_errors=True)
                os.close(lock)

    def _settle(self, record: TrainingRecord) -> bool:
        """Return whether a training is over because it was cancelled or the service stops; called with the lock."""
        if self._is_stopping():
            self.queue.interrupt(record)
        return record.over

    def _train(self, record: TrainingRecord, out: Path) -> str | None:
        """Have a child process make the model; return why it has not. Raises StackSegError."""
        request = self._describe_work(record, out)
        with self.queue.changed:
            if self._settle(record):
                return record.message
            child = self._child = TrainingChild(record.id, self._module)
        with closing(child):
            # Scoring is beside the minutes that are asked for, and takes as long as the annotated stacks are large.
            failure = child.run(request, MOST_TIMES * 60 * self._settings.trainings.minutes, record.update)
            with self.queue.changed:
                self._child = None
                if self._settle(record):
                    return record.message
            if failure is None and (out / FILE_NAME).is_file() and record.after is not None:
                return None
            return child.explain(failure)

    def _describe_work(self, record: TrainingRecord, out: Path) -> dict[str, Any]:
        """Return the request for `service.training.process`. Raises UnknownModel, BrokenModel and UnknownAnnotation."""
        spec = self._models.servable_spec(record.base_model.partition("/")[0])
        stacks = [self._annotations.find(annotation, None, everyone=True) for annotation in record.annotations]
        limits = self._settings.trainings
        return {
            "stacks": [_describe(stack) for stack in stacks],
            "base": str(spec.folder),
            "out": str(out),
            "minutes": record.minutes,
            "memory_bytes": limits.memory_bytes,
            "niceness": limits.niceness,
            "settings": self._settings.model_dump(mode="json", include=set(SECTIONS)),
        }

    def _serve(self, record: TrainingRecord) -> None:
        """Serve a model, which is deleted if that fails, or was cancelled meanwhile. Raises StackSegError."""
        record.stage = "serving"
        try:
            self.trained_models.serve(record.name)
            self.queue.end(record, "done", record.message)
        finally:
            if record.state == "done":
                log.info("training %s has made the model %s: %s", record.id, record.name, record.message)
            else:
                self.trained_models.withdraw(record.name)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()


def _check_apart(stacks: Sequence[Annotation]) -> None:
    """Raise BadParameter where two have labels for one place: one would teach what the other holds out."""
    overlaps = find_overlaps(stacks)
    for stack in stacks:
        for other in overlaps[stack.id]:
            older, newer = sorted((stack, other), key=lambda each: each.created)
            raise BadParameter.about(
                "annotations",
                f"{older.id} ({older.name}) and the newer {newer.id} ({newer.name}) have labels for the"
                " same place of one image; leave one of them out.",
            )


def _describe(stack: Annotation) -> dict[str, Any]:
    return {
        "name": stack.name,
        "image": str(stack.image.resolve()),
        "labels": str(stack.labels.resolve()),
        "region": None if stack.region is None else stack.region.ranges,
        "diameter": stack.origin.diameter,
    }
