"""The model repository as served: which models there are, which is the default, and why one cannot be used."""

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


class Reloaded(NamedTuple):
    """The names of models that a reload of the repository has found to be new, changed or gone, and those with faults.

    broken  why a model is not served as its folder has it, by its name
    """

    added: list[str]
    changed: list[str]
    removed: list[str]
    broken: dict[str, str]


class ModelRegistry:
    """The models that are served, as the repository was when it was last read; their state is asked of the devices.

    specs       the readable models by name
    spec_json   the same as JSON; models whose specs are equal have equal JSON
    load_first  names of the models that are loaded at start
    """

    def __init__(self, settings: Models, devices: Sequence[Device], trained: Path | None = None) -> None:
        """Find the model folders, also below `trained`. Raises ConfigError for a repository that is none."""
        self._settings, self._trained = settings, trained
        self._folders = repository.find_model_folders(settings.folder, settings.serve, trained)
        self._devices = devices
        self._states: dict[str, ModelState] = {}
        self._reloading = threading.Lock()
        self.spec_json: Mapping[str, str] = {}
        self.specs: Mapping[str, ModelSpec] = {}
        self.load_first: tuple[str, ...] = ()

    def read_repository(self) -> None:
        """Read every model file. A model that cannot be read has failed, and keeps no other from being served."""
        self._serve(read_models(self._folders, self._trained))
        wanted = self._names_at_start(self._states)
        self.load_first = tuple(name for name in self.specs if name in wanted)
        for name in sorted(wanted - self._states.keys()):
            log.error("%s", self._explain(name))

    def reload(self) -> Reloaded:
        """Read the repository again, and wait until models that were loaded and have changed are loaded anew.

        Requests that use a model keep the one that they have. Where a folder is broken or its model cannot be loaded,
        the earlier one is served as before. Raises BrokenModel for a repository that is none any more, and NotReady
        while another call is at it.
        """
        if not self._reloading.acquire(blocking=False):
            raise NotReady("The models are being reloaded already; try again when that is done.")
        try:
            folders = repository.find_model_folders(self._settings.folder, self._settings.serve, self._trained)
            return self._reload(read_models(folders, self._trained))
        except ConfigError as error:
            raise BrokenModel(str(error)) from error
        finally:
            self._reloading.release()

    def remove(self, name: str, delete: Callable[[], None]) -> None:
        """Serve a model to no new request, have it deleted, and unload it where that succeeds.

        Requests that compute with it finish. Raises what `delete` raises, UnknownModel, and NotReady as `reload` does.
        """
        if not self._reloading.acquire(blocking=False):
            raise NotReady("The models are being reloaded; try again when that is done.")
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

    def _reload(self, found: Mapping[str, ModelState]) -> Reloaded:
        before, at_start = self._states, self._names_at_start(found)
        served: dict[str, ModelState] = {}
        for name, state in found.items():
            renewed = self._renew(name, state, load=name in at_start)
            served[renewed.name] = renewed
            self._serve({**self._states, renewed.name: renewed})
        self._serve(served)
        removed = sorted(before.keys() - served.keys())
        for name in removed:
            self._forget(name)
        reloaded = Reloaded(
            added=sorted(served.keys() - before.keys()),
            changed=[name for name in served if name in before and served[name].spec is not before[name].spec],
            removed=removed,
            broken={state.name: state.problem for state in self.states() if state.problem is not None},
        )
        log.info("models were reloaded: %s", reloaded)
        return reloaded

    def _serve(self, states: dict[str, ModelState]) -> None:
        self.specs = {name: state.spec for name, state in states.items() if state.spec is not None}
        self.spec_json = {name: spec.model_dump_json() for name, spec in self.specs.items()}
        self._states = states

    def _renew(self, name: str, found: ModelState, *, load: bool) -> ModelState:
        """Return the model that is served from now on, after its folder was read again."""
        if found.spec is None:
            known = self._find_by_folder(name)
            return found if known is None else self._keep(known, found.problem)
        known = self._states.get(name)
        failed = any(name in cache.problems for cache in self._caches)
        if known is not None and known.spec == found.spec and not failed:
            return known._replace(problem=None)
        try:
            self._renew_on_devices(found.spec, load=load)
        except StackSegError as error:
            if known is not None:
                return self._keep(known, str(error))
        return found

    def _find_by_folder(self, name: str) -> ModelState | None:
        """Return the model that was read from a folder, which may have another name than the model."""
        held = (state for state in self._states.values() if state.spec and state.spec.folder.name == name)
        return next(held, self._states.get(name))

    def _renew_on_devices(self, spec: ModelSpec, *, load: bool) -> None:
        """Serve a model on every device, or on none where the first cannot load it. Raises the error of loading.

        It is loaded at once where the earlier one is, or with `load`.
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
        """Go on with a model as it was, if that can be: one that is not loaded has lost its files."""
        if self.loaded(state.name) is None:
            self._forget(state.name)
            return ModelState(state.name, "failed", problem=problem)
        return state._replace(problem=problem)

    def _forget(self, name: str) -> None:
        for device in self._devices:
            device.scheduler.models.forget(name)

    def _names_at_start(self, names: Collection[str]) -> frozenset[str]:
        """Return which of the models that have these names are loaded at start, and names that no model has."""
        if self._settings.load == "all":
            return frozenset(names)
        return frozenset({*self._settings.load, self._default_name(names)})

    def _default_name(self, names: Collection[str]) -> str:
        return self._settings.default or repository.default_name(names)

    @property
    def _caches(self) -> list[ModelCache[DeviceModel]]:
        return [device.scheduler.models.cache for device in self._devices]

    @property
    def default(self) -> str:
        """The name of the model of requests that name none."""
        return self._default_name(self._states)

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
        if all(spec.name in cache.starting for cache in self._caches):
            raise NotReady(f"The model {spec.name} is still being loaded; try again in a few seconds.")
        return spec

    def loaded(self, name: str) -> DeviceModel | None:
        """Return the model as the first device has it loaded; None where no device has."""
        return next(filter(None, (cache.get(name) for cache in self._caches)), None)

    def unready_reasons(self) -> Iterator[str]:
        """Yield a sentence for each model that keeps the service from being ready: the default one has to be well."""
        for name in self._states:
            starting = [device for device in self._devices if name in device.scheduler.models.cache.starting]
            # One that is ready answers for those of other hosts that are not.
            if len(starting) == len(self._devices) or any(device.is_required for device in starting):
                at = "".join(str(device.scheduler.models.loading.get(name, "")) for device in self._devices)
                yield f"{name} is being loaded{at and ': '}{at}."
        if self._is_faulty(self.default):
            yield self._explain(self.default)

    def degradations(self) -> Iterator[str]:
        """Yield a sentence for each model that is not served as the operator wants it; others do not suffer."""
        default = self.default
        for name in (*self._states, *sorted(self._names_at_start(self._states) - self._states.keys())):
            if name != default and self._is_faulty(name):
                yield self._explain(name)
            elif name in self._states and self._states[name].spec is not None and self._states[name].problem:
                yield f"{name} is served as it was before its folder changed; GET /models and the log say why."

    def _is_faulty(self, name: str) -> bool:
        """Whether a model is not there or cannot be used on a device."""
        state = self._states.get(name)
        failed = any(name in cache.problems for cache in self._caches)
        return failed or state is None or state.spec is None

    def _explain(self, name: str) -> str:
        if name not in self._states:
            return f"models.load or models.default names {name}, which is not served."
        # Health is open to everybody, and the problem may tell of paths.
        return f"{name} cannot be served; GET /models and the log say why."

    def _update(self, state: ModelState) -> ModelState:
        """Return the model with its present state on the devices."""
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
        """Return what is known of the loaded model by device."""
        devices = {device.name: device.loaded_models.get(name) for device in self._devices}
        return {device: model for device, model in devices.items() if model is not None}
