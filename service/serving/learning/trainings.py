"""Trainings on annotated stacks: queued, run one at a time in a child process, and served as new models."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from service.core.config import Settings
from service.core.errors import (
    BadParameter,
    ModelKept,
    NotReady,
    OutOfStorage,
    QueueFull,
    StackSegError,
    SwitchedOff,
    Unauthorized,
    UnknownModel,
    UnknownTraining,
)
from service.core.errors import without_folders as shorten
from service.models.repository import DEFAULT_NAME, FILE_NAME
from service.models.trainable import check_trainable
from service.serving.devices.model_registry import ModelRegistry
from service.serving.devices.models.state import ModelState
from service.serving.learning.annotations import Annotation, AnnotationStore, find_overlaps
from service.serving.learning.training_child import MODULE, UNEXPECTED, TrainingChild
from service.serving.learning.training_record import (
    INTERRUPTED,
    TrainingRecord,
    TrainingState,
    delete_partial,
    read_records,
)
from service.serving.storage.scratch import make_locked_folder, sweep, translate_disk_faults

WORK_PREFIX = ".training-"
# Beside the model file: whose key has trained the model, which is nobody else's business.
OWNER = "owner.json"
# Of the extra `train`.
NEEDED = ("edt", "scipy", "skimage")
# What one owner's list keeps.
MOST_RECORDS = 100
RETRY_SECONDS = 60
RELOAD_SECONDS = 120.0
JOIN_SECONDS = 10.0
# The process is ended after so many times `trainings.minutes`, whatever it does.
MOST_TIMES = 2
SECTIONS = ("device", "engine", "windows", "limits", "training")

log = logging.getLogger(__name__)


class Trainings:
    """The queue of trainings, and the thread that runs them one at a time. Safe to use from threads.

    module       what the child process runs, with the request and the progress of `service.training.child`
    most_models  trained models that there may be

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
        self._settings, self._annotations, self._module = settings, annotations, module
        self._models, self._is_stopping = models, is_stopping
        self.most_models = settings.trainings.models
        self._folder = settings.annotations_folder / "trainings"
        self._records: dict[str, TrainingRecord] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._child: TrainingChild | None = None
        self._running: TrainingRecord | None = None
        self._thread = threading.Thread(target=self._run_all, name="training", daemon=True)

    def start(self) -> None:
        """Read the trainings of earlier processes, delete what is left of their work, and begin to run new ones."""
        trained = self._settings.trained_folder
        sweep(trained, WORK_PREFIX)
        delete_partial(self._folder)
        self._records = {record.id: record for record in read_records(self._folder)}
        self._thread.start()

    def stop(self) -> None:
        """End the training that runs, and all that wait: they are interrupted."""
        with self._changed:
            self._stopped = True
            waiting = [record for record in self._records.values() if record.state == "waiting"]
            self._kill()
            self._changed.notify_all()
        self._thread.join(JOIN_SECONDS)
        for record in waiting:
            self._end(record, "interrupted", INTERRUPTED)

    def check_enabled(self) -> None:
        """Raise SwitchedOff where nobody can train, with the reason."""
        if not self._settings.trainings.enabled or not self._settings.annotations.quota_bytes:
            raise SwitchedOff("Models are not trained here; the operator has set trainings.enabled to false.")
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise SwitchedOff(
                f"Models cannot be trained here for lack of {', '.join(missing)}; the operator may run"
                " pip install 'stackseg[train]'."
            )

    def submit(  # noqa: PLR0913
        self,
        *,
        model: str | None,
        annotations: Sequence[str],
        minutes: float,
        name: str,
        owner: str | None,
        admin: bool,
    ) -> TrainingRecord:
        """Queue a training that makes a model called `name` of another one.

        Raises SwitchedOff, UnknownModel, UnknownAnnotation, BadParameter, QueueFull and NotReady.
        """
        self.check_enabled()
        limits = self._settings.trainings
        spec = self._models.servable_spec(model)
        check_trainable(spec)
        if minutes > limits.minutes:
            raise BadParameter(f"minutes: no more than {limits.minutes:g} are allowed here (trainings.minutes).")
        unique = list(dict.fromkeys(annotations))
        _check_apart([self._annotations.find(annotation, owner, everyone=admin) for annotation in unique])
        record = TrainingRecord(uuid.uuid4().hex, owner, name, spec.identifier, unique, minutes, time.time())
        with self._changed:
            # It may have been deleted meanwhile.
            self._models.servable_spec(spec.name)
            self._check_name(name)
            self._check_room(owner)
            with translate_disk_faults():
                record.save(self._folder)
            self._records[record.id] = record
            self._changed.notify_all()
        self._forget_oldest(owner)
        return record

    def find(self, training: str, owner: str | None, *, everyone: bool = False) -> TrainingRecord:
        """Return a training of this owner, or with `everyone` of any. Raises UnknownTraining."""
        record = self._records.get(training)
        if record is None or not (everyone or record.owner == owner):
            raise UnknownTraining("There is no such training: its id is wrong, or it was deleted.")
        return record

    def newest(self, owner: str | None, *, everyone: bool = False) -> list[TrainingRecord]:
        """Return the trainings of this owner, or with `everyone` of all, newest first."""
        with self._changed:
            records = list(self._records.values())
        return [record for record in reversed(records) if everyone or record.owner == owner]

    def position(self, record: TrainingRecord) -> int | None:
        """Return how many trainings come before one that waits, and it itself; None for any other."""
        with self._changed:
            order = self._order()
            return order.index(record) + 1 if record in order else None

    def seconds_left(self, record: TrainingRecord) -> float | None:
        """Return how long a training may still run; None where it does not run, or takes longer than was asked for.

        It may end sooner.
        """
        if record.state != "running" or record.started is None:
            return None
        left = 60 * record.minutes - (time.time() - record.started)
        return left if left > 0 else None

    def count(self) -> dict[str, float]:
        """Return how many trainings run and wait, by these states."""
        running, waiting = self.unfinished()
        return {"running": float(running is not None), "waiting": float(len(waiting))}

    def unfinished(self) -> tuple[TrainingRecord | None, list[TrainingRecord]]:
        """Return the training that runs, and those that wait, in their order."""
        with self._changed:
            return self._running, self._order()

    def count_models(self) -> int:
        """Return how many trained models there are."""
        return len(list(self._settings.trained_folder.glob("[!.]*")))

    def model_of(self, record: TrainingRecord) -> str | None:
        """Return the name of the model that a training has made; None where it has made none, or that was deleted."""
        with self._changed:
            made = [one for one in self._records.values() if one.state == "done" and one.name == record.name]
        # The name of a model that was deleted is free for others.
        newest = max(made, key=lambda one: one.ended or 0.0, default=None)
        return record.name if record is newest and record.name in self._models.specs else None

    def cancel(self, training: str, owner: str | None, *, everyone: bool = False) -> None:
        """Cancel a training that waits or runs; forget one that is over. Raises UnknownTraining."""
        record = self.find(training, owner, everyone=everyone)
        with self._changed:
            if record.over:
                del self._records[record.id]
                with translate_disk_faults():
                    (self._folder / f"{record.id}.json").unlink(missing_ok=True)
                return
            record.state, record.ended = "cancelled", time.time()
            if record is self._running:
                self._kill()
        self._save(record)

    def may_remove(self, model: ModelState, owner: str | None, *, everyone: bool = False) -> bool:
        """Return whether this owner, or with `everyone` an admin, may delete a model; None owns none."""
        folder = self._settings.trained_folder / model.name
        trained = folder.is_dir() if model.spec is None else folder == model.spec.folder
        return trained and (everyone or (owner is not None and _read_owner(folder) == owner))

    def remove_model(
        self, name: str, owner: str | None, *, everyone: bool = False, has_jobs: Callable[[str], bool]
    ) -> None:
        """Delete a model that a training has made, with its files. Requests that compute with it finish.

        Args:
            name: of the model
            owner: who asks; None owns none
            everyone: whether an admin asks
            has_jobs: whether jobs wait or run with a model; asked at once, and again when no new ones are accepted

        Raises UnknownModel, ModelKept, Unauthorized and NotReady.
        """
        model = self._models.state(name)
        if not self.may_remove(model, None, everyone=True):
            raise ModelKept(f"The model {name} was not trained here; its operator may remove its folder.")
        if not self.may_remove(model, owner, everyone=everyone):
            raise Unauthorized("Only the key that has trained a model, and those in access.admins, may delete it.")
        trained = self._settings.trained_folder
        work, default = trained / f"{WORK_PREFIX}{uuid.uuid4().hex}", self._models.default

        def delete() -> None:
            with self._changed, translate_disk_faults():
                self._check_unused(model, default, has_jobs)
                lock = make_locked_folder(work)
                try:
                    (trained / name).rename(work / name)
                except FileNotFoundError:
                    raise UnknownModel(f"The model {name} is being deleted already.") from None
                finally:
                    os.close(lock)

        with self._changed:
            # What is refused anyway stays served: requests would not find it, and waiting jobs fail.
            self._check_unused(model, default, has_jobs)
        try:
            self._change_models(partial(self._models.remove, name, delete))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        log.info("the model %s was deleted", name)

    def _check_unused(self, model: ModelState, default: str, has_jobs: Callable[[str], bool]) -> None:
        """Raise ModelKept for a model that anything but a request needs, or that is being loaded."""
        name, models = model.name, self._settings.models
        if name in {default, *models.serve, *(() if models.load == "all" else models.load)}:
            raise ModelKept(f"The model {name} is the default one, or the configuration names it otherwise.")
        if any(record.base_model.partition("/")[0] == name for record in self._records.values() if not record.over):
            raise ModelKept(f"A training that waits or runs goes on from the model {name}; cancel it, or wait.")
        if has_jobs(name):
            raise ModelKept(f"Jobs wait or run with the model {name}; delete it when they are over, or cancel them.")
        if model.state == "loading":
            raise ModelKept(f"The model {name} is being loaded for a request; try again once that is done.")

    def _check_name(self, name: str) -> None:
        """Raise BadParameter where a model has the name, or is about to have it, and for names of default models."""
        models = self._settings.models
        taken = {DEFAULT_NAME, models.default, *models.serve}
        taken |= {state.name for state in self._models.states()}
        taken |= {record.name for record in self._records.values() if not record.over}
        if name in taken or (self._settings.trained_folder / name).exists():
            raise BadParameter(f"name: {name!r} is the name of a model, or kept for one; choose another name.")

    def _check_room(self, owner: str | None) -> None:
        if self._stopped or self._is_stopping():
            raise NotReady("The service is stopping; start the training again when it is back.")
        order, most, models = self._order(), self._settings.trainings.waiting, self.most_models
        unfinished = sum(not record.over for record in self._records.values())
        if self.count_models() + unfinished >= models:
            raise OutOfStorage(
                f"There are {models} trained models (trainings.models); delete some, as DELETE /models/NAME does"
                " for the key that has trained them, and for admins."
            )
        if len(order) >= most:
            raise QueueFull("Too many trainings wait; try again when one is done.", RETRY_SECONDS)
        if sum(record.owner == owner for record in order) >= max(1, most // 2):
            raise QueueFull("Too many trainings of yours wait; try again when one is done.", RETRY_SECONDS)

    def _order(self) -> list[TrainingRecord]:
        """Return what waits in its order: owners take turns, whoever has not been served for longest comes first."""
        records = list(self._records.values())
        served = {record.owner: record.started for record in records if record.started is not None}
        turns: dict[str | None, int] = {}
        keyed = []
        for record in records:
            if record.state == "waiting":
                turns[record.owner] = turns.get(record.owner, 0) + 1
                keyed.append((turns[record.owner], served.get(record.owner) or 0.0, record.created, record))
        return [record for *_, record in sorted(keyed, key=lambda key: key[:3])]

    def _run_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._order())
                if self._stopped:
                    return
                record = self._running = self._order()[0]
                record.state, record.started = "running", time.time()
            try:
                self._run(record)
            except StackSegError as error:
                self._end(record, "failed", shorten(str(error)))
            except Exception:
                log.exception("training %s", record.id)
                self._end(record, "failed", UNEXPECTED)
            finally:
                with self._changed:
                    self._running = None

    def _run(self, record: TrainingRecord) -> None:
        """Run a training, and serve the model that it has made. Raises StackSegError."""
        failure = self._make_model(record)
        if record.over:
            self._withdraw(record)
            self._save(record)
        elif failure is not None:
            self._end(record, "failed", failure)
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
                    (work / record.name / OWNER).write_text(json.dumps(record.owner), encoding="utf-8")
                with self._changed:
                    if failure is None and not self._settle(record):
                        (work / record.name).rename(trained / record.name)
                return failure
            finally:
                shutil.rmtree(work, ignore_errors=True)
                os.close(lock)

    def _settle(self, record: TrainingRecord) -> bool:
        """Return whether a training is over because it was cancelled or the service stops; called with the lock."""
        if (self._stopped or self._is_stopping()) and not record.over:
            record.state, record.message, record.ended = "interrupted", INTERRUPTED, time.time()
        return record.over

    def _train(self, record: TrainingRecord, out: Path) -> str | None:
        """Have a child process make the model; return why it has not. Raises StackSegError."""
        spec = self._models.servable_spec(record.base_model.partition("/")[0])
        stacks = [self._annotations.find(annotation, None, everyone=True) for annotation in record.annotations]
        limits = self._settings.trainings
        settings = self._settings.model_dump(mode="json", include=set(SECTIONS))
        request = {
            "stacks": [_describe(stack) for stack in stacks],
            "base": str(spec.folder),
            "out": str(out),
            "minutes": record.minutes,
            "memory_bytes": limits.memory_bytes,
            "niceness": limits.niceness,
            "settings": settings,
        }
        with self._changed:
            if self._settle(record):
                return record.message
            child = self._child = TrainingChild(record.id, self._module)
        with closing(child):
            # Scoring is beside the minutes that are asked for, and takes as long as the annotated stacks are large.
            failure = child.run(request, MOST_TIMES * 60 * limits.minutes, record.update)
            with self._changed:
                self._child = None
                if self._settle(record):
                    return record.message
            if failure is None and (out / FILE_NAME).is_file() and record.after is not None:
                return None
            return child.explain(failure)

    def _serve(self, record: TrainingRecord) -> None:
        """Serve a model, which goes where that fails, or was cancelled meanwhile. Raises StackSegError."""
        record.stage = "serving"
        try:
            self._reload()
            self._models.servable_spec(record.name)
            self._end(record, "done", record.message)
        finally:
            if record.state == "done":
                log.info("training %s has made the model %s: %s", record.id, record.name, record.message)
            else:
                self._withdraw(record)

    def _withdraw(self, record: TrainingRecord) -> None:
        """Delete the model of a training that is not done, if it was made, and have it served no longer."""
        made = self._settings.trained_folder / record.name
        if made.exists():
            shutil.rmtree(made, ignore_errors=True)
            with suppress(StackSegError):
                self._reload()

    def _reload(self) -> None:
        """Have the registry read the models again. Raises StackSegError."""
        self._change_models(self._models.reload)

    def _change_models(self, change: Callable[[], object]) -> None:
        """Change which models are served, once no other change is under way. Raises StackSegError."""
        deadline = time.monotonic() + RELOAD_SECONDS
        while True:
            try:
                change()
            except NotReady:
                # A reload may have begun before the model was there.
                if time.monotonic() > deadline or self._stopped:
                    raise
                time.sleep(0.1)
            else:
                return

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _end(self, record: TrainingRecord, state: TrainingState, message: str) -> None:
        """Record how a training has ended, on disk first."""
        now = time.time()
        self._save(record if record.over else replace(record, state=state, message=message, ended=now))
        with self._changed:
            if not record.over:
                record.state, record.message, record.ended = state, message, now

    def _save(self, record: TrainingRecord) -> None:
        """Write a record; one that cannot be written is known until the service ends."""
        try:
            record.save(self._folder)
        except OSError as error:
            log.warning("training %s cannot be recorded: %s", record.id, error)

    def _forget_oldest(self, owner: str | None) -> None:
        over = [record for record in self.newest(owner) if record.over]
        for record in over[MOST_RECORDS:]:
            with suppress(StackSegError):
                self.cancel(record.id, owner)


def _read_owner(folder: Path) -> str | None:
    """Return who has trained the model in a folder; None where that is not known."""
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, str) else None


def _check_apart(stacks: Sequence[Annotation]) -> None:
    """Raise BadParameter where two have labels for one place: one would teach what the other holds out."""
    overlaps = find_overlaps(stacks)
    for stack in stacks:
        for other in overlaps[stack.id]:
            older, newer = sorted((stack, other), key=lambda each: each.created)
            raise BadParameter(
                f"annotations: {older.id} ({older.name}) and the newer {newer.id} ({newer.name}) have labels for the"
                " same place of one image; leave one of them out."
            )


def _describe(stack: Annotation) -> dict[str, Any]:
    return {
        "name": stack.name,
        "image": str(stack.image.resolve()),
        "labels": str(stack.labels.resolve()),
        "region": None if stack.region is None else stack.region.ranges,
        "diameter": stack.origin.diameter,
    }
