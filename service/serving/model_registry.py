"""The model repository as served: which models there are, which is the default, and why one cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from service.core import config
from service.core.errors import BrokenModel, NotReady
from service.inference.segmenter import Segmenter
from service.models import repository
from service.models.spec import ModelSpec
from service.serving.device_worker import DeviceWorker
from service.serving.model_cache import LoadedModel

State = Literal["unloaded", "loading", "ready", "failed"]

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """A model of the repository and its present state.

    state      unloaded until the first request for it
    spec       None for a folder that cannot be read
    segmenter  the loaded model
    problem    why it failed
    loaded     memory and use on each device that has it loaded, by the device's name
    """

    name: str
    state: State
    spec: ModelSpec | None = None
    segmenter: Segmenter | None = None
    problem: str | None = None
    loaded: Mapping[str, LoadedModel] = {}


class ModelRegistry:
    """The models that are served, read once from the repository; their state is asked of the devices.

    problem     which model is to be loaded at start that is not served; None if all are
    specs       the readable models by name
    spec_json   the same as JSON; models whose specs are equal have equal JSON
    load_first  names of the models that are loaded at start
    """

    def __init__(self, settings: config.Models, device_workers: Sequence[DeviceWorker]) -> None:
        """Find the model folders. Raises ConfigError for a repository that is none."""
        self._settings = settings
        self._folders = repository.find_model_folders(settings.folder, settings.serve)
        self._device_workers = device_workers
        self._states: dict[str, ModelState] = {}
        self.spec_json: Mapping[str, str] = {}
        self.problem: str | None = None
        self.specs: Mapping[str, ModelSpec] = {}
        self.load_first: tuple[str, ...] = ()

    def read_repository(self) -> None:
        """Read every model file. A model that cannot be read has failed, and keeps no other from being served."""
        for folder in self._folders:
            state = _read_model(folder)
            if state.name in self._states:
                problem = f"{folder}: the name {state.name!r} is taken by another folder; give one of them another."
                log.error("%s", problem)
                state = ModelState(state.name, "failed", problem=problem)
            self._states[state.name] = state
        self.specs = {name: state.spec for name, state in self._states.items() if state.spec is not None}
        self.spec_json = {name: spec.model_dump_json() for name, spec in self.specs.items()}
        wanted = self._models_at_start()
        self.load_first = tuple(name for name in self.specs if name in wanted)

    def _models_at_start(self) -> frozenset[str]:
        if self._settings.load == "all":
            return frozenset(self._states)
        names = {*self._settings.load, self._settings.default or repository.default_name(self._states)}
        if unknown := sorted(names - self._states.keys()):
            self.problem = f"models.load or models.default names {unknown[0]}, which is not served."
            log.error("%s", self.problem)
        return frozenset(names)

    def states(self) -> tuple[ModelState, ...]:
        """Return the state of every model, in the order of their names."""
        return tuple(self._update(state) for state in self._states.values())

    def state(self, name: str | None) -> ModelState:
        """Return the state of a model; None: the configured default, or else the first. Raises UnknownModel."""
        return self._update(repository.select_model(self._states, name, self._settings.default))

    def servable_spec(self, name: str | None) -> ModelSpec:
        """Return the spec of a model, which may still be loading. Raises UnknownModel and BrokenModel."""
        state = repository.select_model(self._states, name, self._settings.default)
        # Every request asks, so that the state of a model that is loaded is not worked out.
        if self.loaded(state.name) is None:
            state = self._update(state)
        if state.state == "failed" or state.spec is None:
            raise BrokenModel(f"The model {state.name} cannot be served; its operator finds the reason in the log.")
        return state.spec

    def spec(self, name: str | None) -> ModelSpec:
        """Return the spec of a model. Raises UnknownModel, BrokenModel, and NotReady while models load at start."""
        spec = self.servable_spec(name)
        if all(spec.name in worker.model_cache.starting for worker in self._device_workers):
            raise NotReady(f"The model {spec.name} is still being loaded; try again in a few seconds.")
        return spec

    def loaded(self, name: str) -> Segmenter | None:
        """Return the model as the first device has it loaded; None where no device has."""
        return next(filter(None, (worker.model_cache.get(name) for worker in self._device_workers)), None)

    def unready_reasons(self) -> Iterator[str]:
        """Yield a sentence for each model that keeps the service from being ready.

        A model that cannot be loaded counts if its folder cannot be read, or if it was to be loaded at start.
        """
        for name, state in self._states.items():
            if any(name in worker.model_cache.starting for worker in self._device_workers):
                at = "".join(str(worker.loading.get(name, "")) for worker in self._device_workers)
                yield f"{name} is being loaded{at and ': '}{at}."
            elif state.state == "failed" or self._failed_at_start(name):
                # Health is open to everybody, and the problem may tell of paths.
                yield f"{name} cannot be served; GET /models and the log say why."

    def _failed_at_start(self, name: str) -> bool:
        return name in self.load_first and any(name in worker.model_cache.problems for worker in self._device_workers)

    def _update(self, state: ModelState) -> ModelState:
        """Return the model with its present state on the devices."""
        if state.spec is None:
            return state
        loaded, segmenter = self._loaded_on(state.name), self.loaded(state.name)
        if segmenter is not None and loaded:
            return state._replace(state="ready", segmenter=segmenter, loaded=loaded)
        caches = [worker.model_cache for worker in self._device_workers]
        if any(cache.is_awaited(state.name) for cache in caches):
            return state._replace(state="loading")
        problem = next((cache.problems[state.name] for cache in caches if state.name in cache.problems), None)
        return state if problem is None else state._replace(state="failed", problem=problem)

    def _loaded_on(self, name: str) -> dict[str, LoadedModel]:
        """Return what is known of the loaded model by device."""
        devices = {worker.name: worker.model_cache.loaded_models.get(name) for worker in self._device_workers}
        return {device: model for device, model in devices.items() if model is not None}


def _read_model(folder: Path) -> ModelState:
    try:
        spec = repository.read_spec(folder)
    except BrokenModel as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        return ModelState(folder.name, "failed", problem=str(error))
    return ModelState(spec.name, "unloaded", spec)
