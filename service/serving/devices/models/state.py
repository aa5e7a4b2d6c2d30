"""What a model of the repository is, and what it is on the devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from service.core.errors import BrokenModel
from service.models import repository
from service.models.spec import ModelSpec
from service.serving.devices.models.eviction import LoadedModel
from service.serving.devices.models.model import DeviceModel

State = Literal["unloaded", "loading", "ready", "failed"]

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """A model of the repository and its present state.

    state         unloaded until the first request for it
    spec          None for a folder that cannot be read
    device_model  the loaded model, on the first device that has it
    problem       why it failed, or why it is not served as its folder has it
    loaded        memory and use on each device that has it loaded, by the device's name
    """

    name: str
    state: State
    spec: ModelSpec | None = None
    device_model: DeviceModel | None = None
    problem: str | None = None
    loaded: Mapping[str, LoadedModel] = {}


def read_models(folders: Sequence[Path], trained: Path | None) -> dict[str, ModelState]:
    """Return the model of each folder by its name; one that cannot be read has failed, under the folder's name.

    Of two with one name none is served, but for one below `trained`, which the other takes the place of.
    """
    states: dict[str, ModelState] = {}
    for folder in folders:
        state = _read_model(folder)
        if state.name in states and folder.parent == trained:
            log.error("%s is not served: %r is the name of a model of another folder.", folder, state.name)
            continue
        if state.name in states:
            problem = f"{folder}: the name {state.name!r} is taken by another folder; give one of them another."
            log.error("%s", problem)
            state = ModelState(state.name, "failed", problem=problem)
        states[state.name] = state
    return states


def _read_model(folder: Path) -> ModelState:
    try:
        spec = repository.read_spec(folder)
    except BrokenModel as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        return ModelState(folder.name, "failed", problem=str(error))
    return ModelState(spec.name, "unloaded", spec)
