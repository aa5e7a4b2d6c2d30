"""Registry of the served models: their specs and states, the default model, and reloading of the repository."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from service.core.errors import BrokenModel, ConfigError, NotReady, StackSegError
from service.core.sections.computing import Models
from service.models import repository
from service.serving.devices.models.state import ModelState, read_models

if TYPE_CHECKING:
    from service.models.spec import ModelSpec
    from service.serving.devices.device import Device
    from service.serving.devices.models.cache import ModelCache
    from service.serving.devices.models.eviction import LoadedModel
    from service.serving.devices.models.model import DeviceModel

log = logging.getLogger(__name__)


class ReloadResult(NamedTuple):
    """Result of reloading the repository: the names of added, changed, removed and broken models.

    broken  why the present content of a model folder is not served, by model name
    """

    added: list[str]
    changed: list[str]
    removed: list[str]
    broken: dict[str, str]


class ModelRegistry:
    """The served models. Specs are those of the last time the repository was read; states come from the devices.

    specs       specs of the readable models, by name
    spec_json   the specs as JSON; equal specs have equal JSON
    load_first  names of the models to load at startup
    """

    def __init__(self, settings: Models, devices: Sequence[Device], trained: Path | None = None) -> None:
        """Find the model folders, including those below `trained`. Raises ConfigError if the repository is invalid."""
        self._settings, self._trained = settings, trained
        self._folders = repository.find_model_folders(settings.folder, settings.serve, trained)
        self._devices = devices
        self._states: dict[str, ModelState] = {}
        self._reloading = threading.Lock()
        self.spec_json: Mapping[str, str] = {}
        self.specs: Mapping[str, ModelSpec] = {}
        self.load_first: tuple[str, ...] = ()

    def read_repository(self) -> None:
        """Read all model files. A model that cannot be read counts as failed; other models are served."""
        self._serve(read_models(self._folders, self._trained))
        startup_names = self._names_at_start(self._states)
        self.load_first = tuple(name for name in self.specs if name in startup_names)
        for name in sorted(startup_names - self._states.keys()):
            log.error("%s", self._explain(name))

    def reload(self) -> ReloadResult:
        """Read the repository again, and wait until changed models that were loaded have been reloaded.

        Running requests continue with the previous version of their model. If a folder is broken or its model cannot be
        loaded, the previous version is still served. Raises BrokenModel if the repository has become invalid, and
        NotReady if a reload is already running.
        """
        if not self._reloading.acquire(blocking=False):
            raise NotReady("The models are already being reloaded. Try again when that is done.")
        try:
            folders = repository.find_model_folders(self._settings.folder, self._settings.serve, self._trained)
            return self._reload(read_models(folders, self._trained))
        except ConfigError as error:
            raise BrokenModel(str(error)) from error
        finally:
            self._reloading.release()

    def remove(self, name: str, delete: Callable[[], None]) -> None:
        """Stop serving a model, call `delete` to delete its files, and unload it.

        Running requests finish. If `delete` fails, the model is served again. Raises the error of `delete`,
        UnknownModel, and NotReady if a reload is running.
        """
        if not self._reloading.acquire(blocking=False):
            raise NotReady("The models are being reloaded. Try again when that is done.")
        try:
            states = self._states
            repository.select_model(states, name, None)
            self._serve({other: state for other, state in states.items() if other != name})
            try:
                delete()
            except BaseException:
                self._serve(states)
                raise
            self._forget(name)
        finally:
            self._reloading.release()

    def _reload(self, new_states: Mapping[str, ModelState]) -> ReloadResult:
        before, at_start = self._states, self._names_at_start(new_states)
        served: dict[str, ModelState] = {}
        for name, state in new_states.items():
            renewed = self._renew(name, state, load=name in at_start)
            served[renewed.name] = renewed
            self._serve({**self._states, renewed.name: renewed})
        self._serve(served)
        removed = sorted(before.keys() - served.keys())
        for name in removed:
            self._forget(name)
        reloaded = ReloadResult(
            added=sorted(served.keys() - before.keys()),
            changed=[name for name in served if name in before and served[name].spec is not before[name].spec],
            removed=removed,
            broken={state.name: state.problem for state in self.states() if state.problem is not None},
        )
        log.info("reloaded the models: %s", reloaded)
        return reloaded

    def _serve(self, states: dict[str, ModelState]) -> None:
        self.specs = {name: state.spec for name, state in states.items() if state.spec is not None}
        self.spec_json = {name: spec.model_dump_json() for name, spec in self.specs.items()}
        self._states = states

    def _renew(self, name: str, new_state: ModelState, *, load: bool) -> ModelState:
        """Return the state of the model to serve after its folder was read again."""
        if new_state.spec is None:
            previous = self._find_by_folder(name)
            return new_state if previous is None else self._keep(previous, new_state.problem)
        previous = self._states.get(name)
        failed = any(name in cache.problems for cache in self._caches)
        if previous is not None and previous.spec == new_state.spec and not failed:
            return previous._replace(problem=None)
        try:
            self._renew_on_devices(new_state.spec, load=load)
        except StackSegError as error:
            if previous is not None:
                return self._keep(previous, str(error))
        return new_state

    def _find_by_folder(self, name: str) -> ModelState | None:
        """Return the model that was read from the folder `name`; the folder and the model may have different names."""
        states = (state for state in self._states.values() if state.spec and state.spec.folder.name == name)
        return next(states, self._states.get(name))

    def _renew_on_devices(self, spec: ModelSpec, *, load: bool) -> None:
        """Serve a new version of a model on every device, or on none if the first device cannot load it.

        The new version is loaded now if `load` is True, or on devices that have loaded the previous version. Raises the
        error of loading.
        """
        keep = True
        for device in self._devices:
            models = device.scheduler.models
            loaded = models.cache.get(spec.name) is not None or models.cache.is_awaited(spec.name)
            try:
                models.renew(spec, load=load or loaded, keep=keep)
            except StackSegError:
                if keep:
                    raise
            keep = False

    def _keep(self, state: ModelState, problem: str | None) -> ModelState:
        """Continue to serve the previous version of a model if it is loaded. Otherwise its files are gone."""
        if self.loaded(state.name) is None:
            self._forget(state.name)
            return ModelState(state.name, "failed", problem=problem)
        return state._replace(problem=problem)

    def _forget(self, name: str) -> None:
        for device in self._devices:
            device.scheduler.models.forget(name)

    def _names_at_start(self, names: Collection[str]) -> frozenset[str]:
        """Return the names of the models to load at startup, including configured names that are not in `names`."""
        if self._settings.load == "all":
            return frozenset(names)
        return frozenset({*self._settings.load, self._default_name(names)})

    def _default_name(self, names: Collection[str]) -> str:
        return self._settings.default or repository.choose_default_name(names)

    @property
    def _caches(self) -> list[ModelCache[DeviceModel]]:
        return [device.scheduler.models.cache for device in self._devices]

    @property
    def default(self) -> str:
        """Name of the model for requests that do not specify one."""
        return self._default_name(self._states)

    def states(self) -> tuple[ModelState, ...]:
        """Return the states of all models, ordered by name."""
        return tuple(self._update(state) for state in self._states.values())

    def state(self, name: str | None) -> ModelState:
        """Return the state of a model. None: the configured default model, or else the first. Raises UnknownModel."""
        return self._update(repository.select_model(self._states, name, self._settings.default))

    def servable_spec(self, name: str | None) -> ModelSpec:
        """Return the spec of a model, which may still be loading. Raises UnknownModel and BrokenModel."""
        state = repository.select_model(self._states, name, self._settings.default)
        # This runs for every request, so the state is determined only if the model is not loaded.
        if self.loaded(state.name) is None:
            state = self._update(state)
        if state.state == "failed" or state.spec is None:
            raise BrokenModel(f"The model {state.name} cannot be used. The operator can find the reason in the log.")
        return state.spec

    def spec(self, name: str | None) -> ModelSpec:
        """Return the spec of a model. Raises UnknownModel, BrokenModel, and NotReady while it is loaded at startup."""
        spec = self.servable_spec(name)
        if all(spec.name in cache.starting for cache in self._caches):
            raise NotReady(f"The model {spec.name} is still being loaded. Try again in a few seconds.")
        return spec

    def loaded(self, name: str) -> DeviceModel | None:
        """Return the loaded model of the first device that has loaded it; None if no device has."""
        return next(filter(None, (cache.get(name) for cache in self._caches)), None)

    def unready_reasons(self) -> Iterator[str]:
        """Yield a sentence for each model that makes the service unready: models that are loading, or the default."""
        for name in self._states:
            starting = [device for device in self._devices if name in device.scheduler.models.cache.starting]
            # A ready device can compute the requests of remote devices that are not ready.
            if len(starting) == len(self._devices) or any(device.is_required for device in starting):
                at = "".join(str(device.scheduler.models.loading.get(name, "")) for device in self._devices)
                yield f"{name} is being loaded{at and ': '}{at}."
        if self._is_faulty(self.default):
            yield self._explain(self.default)

    def degradations(self) -> Iterator[str]:
        """Yield a sentence for each model that cannot be used or is outdated, but does not make the service unready."""
        default = self.default
        for name in (*self._states, *sorted(self._names_at_start(self._states) - self._states.keys())):
            if name != default and self._is_faulty(name):
                yield self._explain(name)
            elif name in self._states and self._states[name].spec is not None and self._states[name].problem:
                yield f"{name} is served as it was before its folder changed. GET /models and the log show the reason."

    def _is_faulty(self, name: str) -> bool:
        """Return whether a model is missing or has failed on a device."""
        state = self._states.get(name)
        failed = any(name in cache.problems for cache in self._caches)
        return failed or state is None or state.spec is None

    def _explain(self, name: str) -> str:
        if name not in self._states:
            return f"models.load or models.default contains {name}, which is not in the repository."
        # Health checks need no API key, so they must not show the problem, which may contain paths.
        return f"{name} cannot be used. GET /models and the log show the reason."

    def _update(self, state: ModelState) -> ModelState:
        """Return the model with its current state on the devices."""
        if state.spec is None:
            return state
        loaded, model = self._loaded_on(state.name), self.loaded(state.name)
        if model is not None and loaded:
            return state._replace(state="ready", device_model=model, loaded=loaded)
        caches = self._caches
        if any(cache.is_awaited(state.name) for cache in caches):
            return state._replace(state="loading")
        problem = next((cache.problems[state.name] for cache in caches if state.name in cache.problems), None)
        return state if problem is None else state._replace(state="failed", problem=problem)

    def _loaded_on(self, name: str) -> dict[str, LoadedModel]:
        """Return the memory and use of a model on each device that has loaded it."""
        devices = {device.name: device.loaded_models.get(name) for device in self._devices}
        return {device: model for device, model in devices.items() if model is not None}
