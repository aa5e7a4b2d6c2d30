"""Trained models: their names, owners and deletion."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections import Counter
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

# Prefix of folders for models that are being created or deleted.
WORK_FOLDER_PREFIX = ".training-"
# File in a model folder with the name of the API key used to train the model. Other clients must not see the name.
OWNER_FILE = "owner.json"
RELOAD_TIMEOUT_SECONDS = 120.0

log = logging.getLogger(__name__)


class TrainedModels:
    """The trained models, which are served by the model registry. Thread-safe.

    folder      folder with a subfolder for each trained model
    max_models  maximum number of trained models
    stopped     event that is set when the service stops
    """

    def __init__(
        self, settings: Settings, models: ModelRegistry, queue: TrainingQueue, stopped: threading.Event
    ) -> None:
        self._settings, self._models, self._queue, self._stopped = settings, models, queue, stopped
        self.folder, self.max_models = settings.trained_folder, settings.trainings.models

    def count_models(self) -> Counter[str | None]:
        """Return the number of trained models by owner."""
        return Counter(_read_owner(folder) for folder in self.folder.glob("[!.]*"))

    def check_name(self, name: str) -> None:
        """Raise BadParameter if a model or an unfinished training run has this name, or if the name is reserved."""
        models = self._settings.models
        used_names = {DEFAULT_NAME, models.default, *models.serve}
        used_names |= {state.name for state in self._models.list_states()}
        used_names |= {record.name for record in self._queue.unfinished_records}
        if name in used_names or (self.folder / name).exists():
            raise BadParameter.for_parameter(
                "name", f"{name!r} is already used or reserved for another model. Choose another name."
            )

    def find_trained_model(self, record: TrainingRecord) -> str | None:
        """Return the name of the model that a training run created; None if there is no such model."""
        # A later training run may have reused the name of a deleted model.
        latest_record = self._queue.find_latest_completed_record(record.name)
        return record.name if record is latest_record and record.name in self._models.specs else None

    def can_delete(self, model: ModelState, owner: str | None, *, is_admin: bool = False) -> bool:
        """Return whether a client can delete a model. The parameters are described in `delete`."""
        folder = self.folder / model.name
        is_trained = folder.is_dir() if model.spec is None else folder == model.spec.folder
        return is_trained and (is_admin or (owner is not None and _read_owner(folder) == owner))

    def delete(self, name: str, owner: str | None, *, is_admin: bool = False, has_jobs: Callable[[str], bool]) -> None:
        """Delete a trained model and its files. Running requests for the model are still completed.

        Args:
            name: name of the model
            owner: name of the API key of the client; a client without a key (None) owns no models
            is_admin: whether the client is an admin, who can delete the models of all owners
            has_jobs: returns whether unfinished jobs use a model; called twice, the second time when new jobs are no
                longer accepted

        Raises UnknownModel, ModelNotDeletable, Unauthorized and NotReady.
        """
        model = self._models.get_state(name)
        if not self.can_delete(model, None, is_admin=True):
            raise ModelNotDeletable(
                f"The model {name} was not trained by this service. Only the operator can delete it."
            )
        if not self.can_delete(model, owner, is_admin=is_admin):
            raise Unauthorized(
                "Deleting this model requires the API key used to train it, or one of the keys in access.admins."
            )
        work_folder, default_name = self.folder / f"{WORK_FOLDER_PREFIX}{uuid.uuid4().hex}", self._models.default_name

        def delete_files() -> None:
            with self._queue.condition, translate_disk_errors():
                self._check_unused(model, default_name, has_jobs)
                lock_fd = make_locked_folder(work_folder)
                try:
                    (self.folder / name).rename(work_folder / name)
                except FileNotFoundError:
                    raise UnknownModel(f"The model {name} is already being deleted.") from None
                finally:
                    os.close(lock_fd)

        with self._queue.condition:
            # Check before removing the model from the registry. Even briefly removing a model that must stay would make
            # requests and waiting jobs fail.
            self._check_unused(model, default_name, has_jobs)
        try:
            self._change_served_models(partial(self._models.delete_model, name, delete_files))
        finally:
            shutil.rmtree(work_folder, ignore_errors=True)
        log.info("deleted the model %s", name)

    def serve(self, name: str) -> None:
        """Start serving a new model. Raises StackSegError."""
        self._change_served_models(self._models.reload)
        self._models.get_servable_spec(name)

    def withdraw(self, name: str) -> None:
        """Delete the model of a training run that did not succeed, if the model exists, and stop serving it."""
        folder = self.folder / name
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(StackSegError):
                self._change_served_models(self._models.reload)

    def _check_unused(self, model: ModelState, default_name: str, has_jobs: Callable[[str], bool]) -> None:
        """Raise ModelNotDeletable if the model is loading, or if the configuration, a training run or a job uses it."""
        name, models = model.name, self._settings.models
        if name in {default_name, *models.serve, *(() if models.load == "all" else models.load)}:
            raise ModelNotDeletable(f"The model {name} is the default model, or the configuration refers to it.")
        if any(record.base_model.partition("/")[0] == name for record in self._queue.unfinished_records):
            raise ModelNotDeletable(
                f"An unfinished training run starts from the model {name}. Cancel the run, or wait until it ends."
            )
        if has_jobs(name):
            raise ModelNotDeletable(f"Unfinished jobs use the model {name}. Cancel them, or wait until they end.")
        if model.state == "loading":
            raise ModelNotDeletable(f"The model {name} is being loaded for a request. Try again in a moment.")

    def _change_served_models(self, change: Callable[[], object]) -> None:
        """Change the set of served models, after any other change has finished. Raises StackSegError."""
        deadline = time.monotonic() + RELOAD_TIMEOUT_SECONDS
        while True:
            try:
                change()
            except NotReady:
                # Another reload is running. That reload may have begun before the model existed.
                if time.monotonic() > deadline or self._stopped.is_set():
                    raise
                time.sleep(0.1)
            else:
                return


def write_owner(folder: Path, owner: str | None) -> None:
    """Record the owner of the model in a folder. Raises OSError."""
    (folder / OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")


def _read_owner(folder: Path) -> str | None:
    """Return the owner of the model in a folder, or None if the owner is unknown."""
    try:
        owner = json.loads((folder / OWNER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, str) else None
