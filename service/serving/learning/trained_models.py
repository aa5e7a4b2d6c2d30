"""The models that trainings have made: who may delete them, and which names are free for new ones."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from service.core.config import Settings
from service.core.errors import BadParameter, ModelKept, NotReady, StackSegError, Unauthorized, UnknownModel
from service.models.repository import DEFAULT_NAME
from service.serving.storage.disk import translate_disk_faults
from service.serving.storage.scratch import make_locked_folder

if TYPE_CHECKING:
    from service.serving.devices.model_registry import ModelRegistry
    from service.serving.devices.models.state import ModelState
    from service.serving.learning.training_queue import TrainingQueue
    from service.serving.learning.training_record import TrainingRecord

WORK_PREFIX = ".training-"
# Next to the model file: the key that has trained the model, which no other client may see.
OWNER = "owner.json"
RELOAD_SECONDS = 120.0

log = logging.getLogger(__name__)


class TrainedModels:
    """The folder of trained models, each of which the registry serves. Safe to use from threads.

    most     trained models that there may be
    stopped  set once the service stops
    """

    def __init__(
        self, settings: Settings, models: ModelRegistry, queue: TrainingQueue, stopped: threading.Event
    ) -> None:
        self._settings, self._models, self._queue, self._stopped = settings, models, queue, stopped
        self.folder, self.most = settings.trained_folder, settings.trainings.models

    def count(self) -> int:
        """Return how many trained models there are."""
        return len(list(self.folder.glob("[!.]*")))

    def check_name(self, name: str) -> None:
        """Raise BadParameter if a model has the name, or is about to have it, and for names of default models."""
        models = self._settings.models
        taken = {DEFAULT_NAME, models.default, *models.serve}
        taken |= {state.name for state in self._models.states()}
        taken |= {record.name for record in self._queue.unfinished}
        if name in taken or (self.folder / name).exists():
            raise BadParameter.about("name", f"{name!r} is the name of a model, or kept for one; choose another name.")

    def made_by(self, record: TrainingRecord) -> str | None:
        """Return the name of the model that a training has made; None if it has made none, or that was deleted."""
        # The name of a model that was deleted is free for others.
        newest = self._queue.newest_done(record.name)
        return record.name if record is newest and record.name in self._models.specs else None

    def may_remove(self, model: ModelState, owner: str | None, *, everyone: bool = False) -> bool:
        """Return whether this owner, or with `everyone` an admin, may delete a model; None owns none."""
        folder = self.folder / model.name
        trained = folder.is_dir() if model.spec is None else folder == model.spec.folder
        return trained and (everyone or (owner is not None and _read_owner(folder) == owner))

    def remove(self, name: str, owner: str | None, *, everyone: bool = False, has_jobs: Callable[[str], bool]) -> None:
        """Delete a model that a training has made, with its files. Requests that compute with it finish.

        Args:
            name: of the model
            owner: the client; None owns no model
            everyone: whether the client is an admin
            has_jobs: whether jobs wait or run with a model; called now, and again when no new ones are accepted

        Raises UnknownModel, ModelKept, Unauthorized and NotReady.
        """
        model = self._models.state(name)
        if not self.may_remove(model, None, everyone=True):
            raise ModelKept(f"The model {name} was not trained here; its operator may remove its folder.")
        if not self.may_remove(model, owner, everyone=everyone):
            raise Unauthorized("Only the key that has trained a model, and those in access.admins, may delete it.")
        work, default = self.folder / f"{WORK_PREFIX}{uuid.uuid4().hex}", self._models.default

        def delete() -> None:
            with self._queue.changed, translate_disk_faults():
                self._check_unused(model, default, has_jobs)
                lock = make_locked_folder(work)
                try:
                    (self.folder / name).rename(work / name)
                except FileNotFoundError:
                    raise UnknownModel(f"The model {name} is being deleted already.") from None
                finally:
                    os.close(lock)

        with self._queue.changed:
            # What is refused anyway stays served: requests would not find it, and waiting jobs fail.
            self._check_unused(model, default, has_jobs)
        try:
            self._change(partial(self._models.remove, name, delete))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        log.info("the model %s was deleted", name)

    def serve(self, name: str) -> None:
        """Serve a new model. Raises StackSegError."""
        self._change(self._models.reload)
        self._models.servable_spec(name)

    def withdraw(self, name: str) -> None:
        """Delete the model of a training that is not done, if it was made, and stop serving it."""
        made = self.folder / name
        if made.exists():
            shutil.rmtree(made, ignore_errors=True)
            with suppress(StackSegError):
                self._change(self._models.reload)

    def _check_unused(self, model: ModelState, default: str, has_jobs: Callable[[str], bool]) -> None:
        """Raise ModelKept for a model that anything but a request needs, or that is being loaded."""
        name, models = model.name, self._settings.models
        if name in {default, *models.serve, *(() if models.load == "all" else models.load)}:
            raise ModelKept(f"The model {name} is the default one, or the configuration names it otherwise.")
        if any(record.base_model.partition("/")[0] == name for record in self._queue.unfinished):
            raise ModelKept(f"A training that waits or runs goes on from the model {name}; cancel it, or wait.")
        if has_jobs(name):
            raise ModelKept(f"Jobs wait or run with the model {name}; delete it when they are over, or cancel them.")
        if model.state == "loading":
            raise ModelKept(f"The model {name} is being loaded for a request; try again once that is done.")

    def _change(self, change: Callable[[], object]) -> None:
        """Change which models are served, once no other change is under way. Raises StackSegError."""
        deadline = time.monotonic() + RELOAD_SECONDS
        while True:
            try:
                change()
            except NotReady:
                # A reload may have begun before the model was there.
                if time.monotonic() > deadline or self._stopped.is_set():
                    raise
                time.sleep(0.1)
            else:
                return


def write_owner(folder: Path, owner: str | None) -> None:
    """Record the owner of the model in a folder. Raises OSError."""
    (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")


def _read_owner(folder: Path) -> str | None:
    """Return the owner of the model in a folder; None if that is not known."""
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, str) else None
