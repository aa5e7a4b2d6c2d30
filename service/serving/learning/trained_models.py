"""Trained models: names, owners and deletion."""

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
from service.core.errors import BadParameter, ModelNotDeletable, NotReady, StackSegError, Unauthorized, UnknownModel
from service.models.repository import DEFAULT_NAME
from service.serving.storage.disk import translate_disk_errors
from service.serving.storage.scratch import make_locked_folder

if TYPE_CHECKING:
    from service.serving.devices.model_registry import ModelRegistry
    from service.serving.devices.models.state import ModelState
    from service.serving.learning.training_queue import TrainingQueue
    from service.serving.learning.training_record import TrainingRecord

WORK_PREFIX = ".training-"
# File in the model folder with the API key that trained the model. Other clients must not see it.
OWNER_FILE = "owner.json"
RELOAD_TIMEOUT_SECONDS = 120.0

log = logging.getLogger(__name__)


class TrainedModels:
    """The folder of trained models, which the model registry serves. Thread-safe.

    max_models  maximum number of trained models
    stopped     set when the service stops
    """

    def __init__(
        self, settings: Settings, models: ModelRegistry, queue: TrainingQueue, stopped: threading.Event
    ) -> None:
        self._settings, self._models, self._queue, self._stopped = settings, models, queue, stopped
        self.folder, self.max_models = settings.trained_folder, settings.trainings.models

    def count(self) -> int:
        """Return the number of trained models."""
        return len(list(self.folder.glob("[!.]*")))

    def check_name(self, name: str) -> None:
        """Raise BadParameter if a model or an unfinished training has the name, or if it is a default name."""
        models = self._settings.models
        used_names = {DEFAULT_NAME, models.default, *models.serve}
        used_names |= {state.name for state in self._models.states()}
        used_names |= {record.name for record in self._queue.unfinished}
        if name in used_names or (self.folder / name).exists():
            raise BadParameter.about(
                "name", f"{name!r} is the name of a model, or reserved for one. Choose another name."
            )

    def find_trained_model(self, record: TrainingRecord) -> str | None:
        """Return the name of the model that a training created; None if there is none or it was deleted."""
        # The name of a deleted model may be used again by a later training.
        newest = self._queue.find_latest_done(record.name)
        return record.name if record is newest and record.name in self._models.specs else None

    def can_remove(self, model: ModelState, owner: str | None, *, everyone: bool = False) -> bool:
        """Return whether this owner, or with `everyone` an admin, may delete a model. The owner None owns no models."""
        folder = self.folder / model.name
        trained = folder.is_dir() if model.spec is None else folder == model.spec.folder
        return trained and (everyone or (owner is not None and _read_owner(folder) == owner))

    def remove(self, name: str, owner: str | None, *, everyone: bool = False, has_jobs: Callable[[str], bool]) -> None:
        """Delete a trained model and its files. Running requests for the model finish.

        Args:
            name: name of the model
            owner: the client; None owns no models
            everyone: whether the client is an admin
            has_jobs: returns whether unfinished jobs use a model; called now, and again when no new jobs are accepted

        Raises UnknownModel, ModelNotDeletable, Unauthorized and NotReady.
        """
        model = self._models.state(name)
        if not self.can_remove(model, None, everyone=True):
            raise ModelNotDeletable(
                f"The model {name} was not trained by this service. Only the operator can remove it."
            )
        if not self.can_remove(model, owner, everyone=everyone):
            raise Unauthorized("Only the API key that trained a model, and the keys in access.admins, can delete it.")
        work, default = self.folder / f"{WORK_PREFIX}{uuid.uuid4().hex}", self._models.default

        def delete() -> None:
            with self._queue.changed, translate_disk_errors():
                self._check_unused(model, default, has_jobs)
                lock = make_locked_folder(work)
                try:
                    (self.folder / name).rename(work / name)
                except FileNotFoundError:
                    raise UnknownModel(f"The model {name} is already being deleted.") from None
                finally:
                    os.close(lock)

        with self._queue.changed:
            # Check before removing the model from the registry. Removing a model that must stay, even for a moment,
            # would make requests and waiting jobs fail.
            self._check_unused(model, default, has_jobs)
        try:
            self._change(partial(self._models.remove, name, delete))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        log.info("deleted the model %s", name)

    def serve(self, name: str) -> None:
        """Start serving a new model. Raises StackSegError."""
        self._change(self._models.reload)
        self._models.servable_spec(name)

    def withdraw(self, name: str) -> None:
        """Delete the model of an unfinished training, if it exists, and stop serving it."""
        folder = self.folder / name
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(StackSegError):
                self._change(self._models.reload)

    def _check_unused(self, model: ModelState, default: str, has_jobs: Callable[[str], bool]) -> None:
        """Raise ModelNotDeletable if the configuration, a training or a job needs the model, or while it is loading."""
        name, models = model.name, self._settings.models
        if name in {default, *models.serve, *(() if models.load == "all" else models.load)}:
            raise ModelNotDeletable(f"The model {name} is the default model, or the configuration refers to it.")
        if any(record.base_model.partition("/")[0] == name for record in self._queue.unfinished):
            raise ModelNotDeletable(
                f"An unfinished training starts from the model {name}. Cancel the training, or wait until it ends."
            )
        if has_jobs(name):
            raise ModelNotDeletable(f"Unfinished jobs use the model {name}. Cancel them, or wait until they end.")
        if model.state == "loading":
            raise ModelNotDeletable(f"The model {name} is being loaded for a request. Try again in a moment.")

    def _change(self, change: Callable[[], object]) -> None:
        """Change the set of served models, after any other change has finished. Raises StackSegError."""
        deadline = time.monotonic() + RELOAD_TIMEOUT_SECONDS
        while True:
            try:
                change()
            except NotReady:
                # Another reload is running. It may have begun before the model existed.
                if time.monotonic() > deadline or self._stopped.is_set():
                    raise
                time.sleep(0.1)
            else:
                return


def write_owner(folder: Path, owner: str | None) -> None:
    """Record the owner of the model in a folder. Raises OSError."""
    (folder / OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")


def _read_owner(folder: Path) -> str | None:
    """Return the owner of the model in a folder, or None if it is unknown."""
    try:
        owner = json.loads((folder / OWNER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, str) else None
