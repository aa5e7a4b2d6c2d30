"""The state of a model in the repository and on the devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from service.core.errors import BrokenModel
from service.models import repository
from service.models.spec import ModelSpec
from service.serving.devices.models.eviction import ModelUsage
from service.serving.devices.models.model import DeviceModel

State = Literal["unloaded", "loading", "ready", "failed"]

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """A model in the repository, with its current state.

    state         "unloaded" until the model is requested for the first time
    spec          None if the folder cannot be read
    device_model  the loaded model, on the first device that has loaded it
    problem       reason why the model has failed, or why the current content of its folder is not served
    usage         usage of the model on each device that has loaded it, by device
    """

    name: str
    state: State
    spec: ModelSpec | None = None
    device_model: DeviceModel | None = None
    problem: str | None = None
    usage: Mapping[str, ModelUsage] = {}


def read_models(folders: Sequence[Path], trained_folder: Path | None) -> dict[str, ModelState]:
    """Read the models in `folders` and return their states by name. A folder that cannot be read counts as failed.

    If two models have the same name, neither is served. However, if one of them is in `trained_folder`, the other one
    is served.
    """
    states: dict[str, ModelState] = {}
    for folder in folders:
        state = _read_model(folder)
        if state.name in states and folder.parent == trained_folder:
            log.error("%s is not served, because another folder contains a model named %r.", folder, state.name)
            continue
        if state.name in states:
            problem = f"{folder}: another folder contains a model named {state.name!r}. Rename one of the models."
            log.error("%s", problem)
            state = ModelState(state.name, "failed", problem=problem)
        states[state.name] = state
    return states


def _read_model(folder: Path) -> ModelState:
    try:
        spec = repository.read_spec(folder)
    except BrokenModel as error:
        log.error("%s", error)  # noqa: TRY400 - the message is sufficient
        return ModelState(folder.name, "failed", problem=str(error))
    return ModelState(spec.name, "unloaded", spec)
