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
    from service.serving.devices.models.eviction import ModelUsage
    from service.serving.devices.models.model import DeviceModel

log = logging.getLogger(__name__)


class ReloadResult(NamedTuple):
    """Result of reloading the repository: the names of added, changed, removed and broken models.

    broken  reason why the current content of a model folder is not served, by model name
    """

    added: list[str]
    changed: list[str]
    removed: list[str]
    broken: dict[str, str]


class ModelRegistry:
    """The served models. The specs are those found when the repository was last read; the devices provide the states.

    specs           specs of the readable models, by name
    spec_json       the specs as JSON, by name; equal specs have equal JSON
    startup_models  names of the models to load at startup
    default_name    name of the model for requests that do not specify one; it does not change while the service runs
    """

    def __init__(self, settings: Models, devices: Sequence[Device], trained_folder: Path | None = None) -> None:
        """Find the folders of all models, including trained models. Raises ConfigError if the repository is invalid."""
        self._settings, self._trained_folder = settings, trained_folder
        self._folders = repository.find_model_folders(settings.folder, settings.serve, trained_folder)
        self._devices = devices
        self._states: dict[str, ModelState] = {}
        self._reload_lock = threading.Lock()
        self.spec_json: Mapping[str, str] = {}
        self.specs: Mapping[str, ModelSpec] = {}
        self.startup_models: tuple[str, ...] = ()
        self.default_name = settings.default or ""

    def read_repository(self) -> None:
        """Read all model files. A model that cannot be read counts as failed; the other models are served."""
        self._serve(read_models(self._folders, self._trained_folder))
        self.default_name = self._settings.default or repository.choose_default_name(self._states)
        startup_names = self._choose_startup_names(self._states)
        self.startup_models = tuple(name for name in self.specs if name in startup_names)
        for name in sorted(startup_names - self._states.keys()):
            log.error("%s", self._describe_problem(name))

    def reload(self) -> ReloadResult:
        """Read the repository again, and wait until changed models that were loaded have been reloaded.

        Running requests continue with the previous version of their model. If a folder is broken or its model cannot be
        loaded, the previous version is still served. Raises BrokenModel if the repository has become invalid, and
        NotReady if a reload is already running.
        """
        if not self._reload_lock.acquire(blocking=False):
            raise NotReady("The models are already being reloaded. Try again when the reload is complete.")
        try:
            folders = repository.find_model_folders(self._settings.folder, self._settings.serve, self._trained_folder)
            return self._reload(read_models(folders, self._trained_folder))
        except ConfigError as error:
            raise BrokenModel(str(error)) from error
        finally:
            self._reload_lock.release()

    def delete_model(self, name: str, delete_files: Callable[[], None]) -> None:
        """Stop serving a model, call `delete_files` to delete its files, and unload it.

        Running requests are still completed. If `delete_files` fails, the model is served again. Raises UnknownModel,
        NotReady if a reload is running, and any error that `delete_files` raises.
        """
        if not self._reload_lock.acquire(blocking=False):
            raise NotReady("The models are being reloaded. Try again when the reload is complete.")
        try:
            states = self._states
            repository.select_model(states, name, None)
            self._serve({other: state for other, state in states.items() if other != name})
            try:
                delete_files()
            except BaseException:
                self._serve(states)
                raise
            self._forget_on_devices(name)
        finally:
            self._reload_lock.release()

    def _reload(self, new_states: Mapping[str, ModelState]) -> ReloadResult:
        previous_states, startup_names = self._states, self._choose_startup_names(new_states)
        served_states: dict[str, ModelState] = {}
        for name, state in new_states.items():
            updated_state = self._update_model(name, state, load=name in startup_names)
            served_states[updated_state.name] = updated_state
            self._serve({**self._states, updated_state.name: updated_state})
        self._serve(served_states)
        removed_names = sorted(previous_states.keys() - served_states.keys())
        for name in removed_names:
            self._forget_on_devices(name)
        result = ReloadResult(
            added=sorted(served_states.keys() - previous_states.keys()),
            changed=[
                name
                for name in served_states
                if name in previous_states and served_states[name].spec is not previous_states[name].spec
            ],
            removed=removed_names,
            broken={state.name: state.problem for state in self.list_states() if state.problem is not None},
        )
        log.info("reloaded the models: %s", result)
        return result

    def _serve(self, states: dict[str, ModelState]) -> None:
        self.specs = {name: state.spec for name, state in states.items() if state.spec is not None}
        self.spec_json = {name: spec.model_dump_json() for name, spec in self.specs.items()}
        self._states = states

    def _update_model(self, name: str, new_state: ModelState, *, load: bool) -> ModelState:
        """Return the state of the model to serve after its folder has been read again."""
        if new_state.spec is None:
            previous_state = self._find_by_folder(name)
            return (
                new_state if previous_state is None else self._keep_previous_version(previous_state, new_state.problem)
            )
        previous_state = self._states.get(name)
        has_failed = any(name in cache.problems for cache in self._caches)
        if previous_state is not None and previous_state.spec == new_state.spec and not has_failed:
            return previous_state._replace(problem=None)
        try:
            self._update_on_devices(new_state.spec, load=load)
        except StackSegError as error:
            if previous_state is not None:
                return self._keep_previous_version(previous_state, str(error))
        return new_state

    def _find_by_folder(self, name: str) -> ModelState | None:
        """Return the model that was read from the folder `name`; the folder and the model may have different names."""
        states = (state for state in self._states.values() if state.spec and state.spec.folder.name == name)
        return next(states, self._states.get(name))

    def _update_on_devices(self, spec: ModelSpec, *, load: bool) -> None:
        """Serve a new version of a model on every device, or on none if the first device cannot load it.

        If `load` is False, the new version is loaded only on devices that have loaded the previous version. If loading
        fails on the first device, raises the error.
        """
        keep_previous = True
        for device in self._devices:
            models = device.scheduler.models
            is_loaded = models.cache.get(spec.name) is not None or models.cache.is_load_pending(spec.name)
            try:
                models.update(spec, load=load or is_loaded, keep_previous=keep_previous)
            except StackSegError:
                if keep_previous:
                    raise
            keep_previous = False

    def _keep_previous_version(self, state: ModelState, problem: str | None) -> ModelState:
        """Continue to serve the previous version of a model if it is loaded.

        Otherwise, mark the model as failed, because the files of the previous version no longer exist.
        """
        if self.get_loaded_model(state.name) is None:
            self._forget_on_devices(state.name)
            return ModelState(state.name, "failed", problem=problem)
        return state._replace(problem=problem)

    def _forget_on_devices(self, name: str) -> None:
        for device in self._devices:
            device.scheduler.models.forget(name)

    def _choose_startup_names(self, names: Collection[str]) -> frozenset[str]:
        """Return the names of the models to load at startup, including configured names that are not in `names`."""
        if self._settings.load == "all":
            return frozenset(names)
        return frozenset({*self._settings.load, self.default_name})

    @property
    def _caches(self) -> list[ModelCache[DeviceModel]]:
        return [device.scheduler.models.cache for device in self._devices]

    def list_states(self) -> tuple[ModelState, ...]:
        """Return the states of all models, ordered by name."""
        return tuple(self._add_device_state(state) for state in self._states.values())

    def get_state(self, name: str | None) -> ModelState:
        """Return the state of the model `name`; None selects the default model.

        Raises UnknownModel.
        """
        return self._add_device_state(repository.select_model(self._states, name, self.default_name))

    def get_servable_spec(self, name: str | None) -> ModelSpec:
        """Return the spec of a model, which may still be loading. Raises UnknownModel and BrokenModel."""
        state = repository.select_model(self._states, name, self.default_name)
        # This runs for every request, so the state is determined only if the model is not loaded.
        if self.get_loaded_model(state.name) is None:
            state = self._add_device_state(state)
        if state.state == "failed" or state.spec is None:
            raise BrokenModel(f"The model {state.name} cannot be used. The operator can find the reason in the log.")
        return state.spec

    def get_spec(self, name: str | None) -> ModelSpec:
        """Return the spec of a model.

        Raises UnknownModel, BrokenModel, and NotReady while the model is being loaded at startup.
        """
        spec = self.get_servable_spec(name)
        if all(spec.name in cache.pending_startup_models for cache in self._caches):
            raise NotReady(f"The model {spec.name} is still being loaded. Try again in a few seconds.")
        return spec

    def get_loaded_model(self, name: str) -> DeviceModel | None:
        """Return the loaded model from the first device that has loaded it; None if no device has loaded it."""
        return next(filter(None, (cache.get(name) for cache in self._caches)), None)

    def list_unready_reasons(self) -> Iterator[str]:
        """Yield a sentence for each model that makes the service unready, because it is loading or has failed."""
        for name in self._states:
            loading_devices = [
                device for device in self._devices if name in device.scheduler.models.cache.pending_startup_models
            ]
            # A ready device can process the requests of remote devices that are not ready.
            if len(loading_devices) == len(self._devices) or any(device.is_required for device in loading_devices):
                loading_steps = "".join(
                    str(device.scheduler.models.loading_progress.get(name, "")) for device in self._devices
                )
                yield f"{name} is being loaded{loading_steps and ': '}{loading_steps}."
        if self._is_faulty(self.default_name):
            yield self._describe_problem(self.default_name)

    def list_degradations(self) -> Iterator[str]:
        """Yield a sentence for each model that cannot be used or is outdated, but does not make the service unready."""
        default_name = self.default_name
        for name in (*self._states, *sorted(self._choose_startup_names(self._states) - self._states.keys())):
            if name != default_name and self._is_faulty(name):
                yield self._describe_problem(name)
            elif name in self._states and self._states[name].spec is not None and self._states[name].problem:
                yield f"The previous version of {name} is still served. GET /models and the log show the reason."

    def _is_faulty(self, name: str) -> bool:
        """Return whether a model is missing or has failed on a device."""
        state = self._states.get(name)
        has_failed = any(name in cache.problems for cache in self._caches)
        return has_failed or state is None or state.spec is None

    def _describe_problem(self, name: str) -> str:
        if name not in self._states:
            reason = "the default model" if name == self.default_name else "specified in models.load"
            return f"{name} is {reason}, but the repository has no such model."
        # Health checks need no API key, so they must not show the problem, which may contain paths.
        return f"{name} cannot be used. GET /models and the log show the reason."

    def _add_device_state(self, state: ModelState) -> ModelState:
        """Return the model with its current state on the devices."""
        if state.spec is None:
            return state
        usage, model = self._get_usage(state.name), self.get_loaded_model(state.name)
        if model is not None and usage:
            return state._replace(state="ready", device_model=model, usage=usage)
        caches = self._caches
        if any(cache.is_load_pending(state.name) for cache in caches):
            return state._replace(state="loading")
        problem = next((cache.problems[state.name] for cache in caches if state.name in cache.problems), None)
        return state if problem is None else state._replace(state="failed", problem=problem)

    def _get_usage(self, name: str) -> dict[str, ModelUsage]:
        """Return the usage of a model on each device that has loaded it, by device."""
        usage_by_device = {device.name: device.loaded_models.get(name) for device in self._devices}
        return {device: usage for device, usage in usage_by_device.items() if usage is not None}
