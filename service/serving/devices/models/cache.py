"""The cache of loaded models on one device, with least recently used (LRU) eviction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple

from service.core.errors import BrokenModel, Cancelled, CapacityError, RequestError, StackSegError
from service.serving.devices.models.eviction import LoadedModel, ModelMemory, ModelUsage, T

log = logging.getLogger(__name__)


class Lease(Generic[T]):
    """A lease on a model, which lasts until `end` is called.

    model_future  future that returns the loaded model, or raises the error if loading fails
    """

    def __init__(self, release: Callable[[LoadedModel[T]], None]) -> None:
        self.model_future: Future[T] = Future()
        # Set before `model_future` gets its result.
        self.entry: LoadedModel[T]
        self._release = release
        self._end_lock = threading.Lock()

    def end(self) -> None:
        """Release the model so that it may be unloaded, or stop waiting for it. May be called repeatedly."""
        if not self._end_lock.acquire(blocking=False) or self.model_future.cancel():
            return
        if self.model_future.exception() is None:
            self._release(self.entry)


class ModelCache(Generic[T]):
    """A thread that loads models by name, one at a time, in the order in which they were requested.

    A model is never unloaded while a request uses it. If a model in use has to be evicted, no new leases on it are
    granted, so that requests for other models are not starved. Later requests for the evicted model wait until it is
    loaded again. A reloaded model replaces the previous version, which stays loaded until its leases end.

    limit_bytes     memory limit for all loaded models
    load            loads a model and prepares it for running; called in the thread, without the lock of this object
    estimate_bytes  estimates the memory of a model in bytes; used until the model has been loaded once
    after_unload    called in the thread after a model has been unloaded, to free the memory that it leaves behind
    lock            held while a model is loaded; may be shared by several devices
    """

    def __init__(
        self,
        limit_bytes: int,
        load: Callable[[str], T],
        *,
        estimate_bytes: Callable[[str], int] = lambda _name: 0,
        after_unload: Callable[[str], None] = lambda _name: None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._load, self._after_unload = load, after_unload
        self._load_lock = lock or threading.Lock()
        self._memory: ModelMemory[T] = ModelMemory(limit_bytes, estimate_bytes)
        # Waiting leases by model, in the order of the first lease for each model.
        self._waiting_leases: dict[str, list[Lease[T]]] = {}
        self._startup_models: list[str] = []
        # Models to reload, with the future to complete and whether to keep the previous version if reloading fails.
        self._pending_reloads: dict[str, tuple[Future[None], bool]] = {}
        self._loading_name: str | None = None
        # Value in `_pending_reloads` for the model that is being loaded.
        self._current_reload: tuple[Future[None], bool] | None = None
        self._problems: dict[str, str] = {}
        self._is_closed = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="load", daemon=True)

    def start(self, startup_models: Iterable[str]) -> None:
        """Start the thread and load these models first.

        No lease is granted until they are loaded, because requests would affect the timing of engines.
        """
        self._startup_models = list(startup_models)
        self._thread.start()

    def close(self) -> None:
        """Stop loading models. Waiting leases fail with Cancelled."""
        with self._condition:
            self._is_closed = True
            leases = self._pop_waiting_leases(tuple(self._waiting_leases))
            reload_futures = [future for future, _ in self._pending_reloads.values()]
            self._pending_reloads.clear()
            self._condition.notify_all()
        for lease in leases:
            _cancel_for_shutdown(lease.model_future)
        for future in reload_futures:
            _cancel_for_shutdown(future)

    def join(self, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the thread has ended; return whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def pending_startup_models(self) -> tuple[str, ...]:
        """Names of the startup models that have not been loaded yet."""
        with self._condition:
            return tuple(self._startup_models)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why models cannot be loaded, by model."""
        with self._condition:
            return dict(self._problems)

    @property
    def loaded_models(self) -> dict[str, ModelUsage]:
        """Usage of each loaded model, by name."""
        with self._condition:
            return self._memory.get_usage()

    def get(self, name: str) -> T | None:
        """Return the model without a lease; None if it is not loaded."""
        with self._condition:
            entry = self._memory.entries.get(name)
            return None if entry is None else entry.model

    def is_load_pending(self, name: str) -> bool:
        """Return whether the model is being loaded or is waiting to be loaded."""
        with self._condition:
            return name == self._loading_name or name in self._waiting_leases or name in self._startup_models

    def lease(self, name: str) -> Lease[T]:
        """Return a lease, which gets the model as soon as it is loaded. The model stays loaded until the lease ends."""
        lease: Lease[T] = Lease(self._end_use)
        with self._condition:
            if self._is_closed or name in self._problems:
                error = (
                    BrokenModel(self._problems[name])
                    if name in self._problems
                    else Cancelled("The service is stopping.")
                )
                lease.model_future.set_exception(error)
                return lease
            self._waiting_leases.setdefault(name, []).append(lease)
            self._choose_next_model()
            granted_leases = self._grant_leases()
            self._wake_thread()
        _complete_leases(granted_leases)
        return lease

    def reload(self, name: str, *, keep_previous: bool = True) -> Future[None]:
        """Reload a model. The returned future completes when new leases get the new version, or fails with the error.

        keep_previous  whether the previous version remains in use if loading fails, so that the model stays usable
        """
        future: Future[None] = Future()
        with self._condition:
            if self._is_closed:
                _cancel_for_shutdown(future)
            else:
                self._pending_reloads[name] = future, keep_previous
                self._condition.notify_all()
        return future

    def forget(self, name: str) -> None:
        """Unload a model after its last lease has ended, and forget why it could not be loaded."""
        with self._condition:
            self._problems.pop(name, None)
            self._memory.forget(name)
            self._condition.notify_all()

    def _end_use(self, entry: LoadedModel[T]) -> None:
        with self._condition:
            entry.end_use()
            self._wake_thread()

    def _wake_thread(self) -> None:
        """Wake the thread if there may be models to load, evict or unload."""
        if self._waiting_leases or self._pending_reloads or self._memory.has_retired_models:
            self._condition.notify_all()

    def _loop(self) -> None:
        while (step := self._wait_for_step()) is not None:
            for name in step.removed_models:
                log.info("%s was unloaded", name)
                self._free_memory(name)
            if step.model_to_load is not None:
                self._load_model(step.model_to_load)

    def _wait_for_step(self) -> _LoadingStep | None:
        """Wait for the next step; return None when the cache is closed."""
        while True:
            with self._condition:
                if self._is_closed:
                    return None
                step = self._choose_step()
                granted_leases = self._grant_leases()
                if step is None and not granted_leases:
                    self._condition.wait()
            _complete_leases(granted_leases)
            if step is not None:
                return step

    def _choose_step(self) -> _LoadingStep | None:
        """Remove unused models that have to be evicted, and return the model to load if there is enough memory."""
        name = self._choose_next_model()
        removed_models = self._memory.remove_unused_models()
        if name is None or self._memory.is_evicting:
            return _LoadingStep(removed_models, None) if removed_models else None
        self._loading_name, self._current_reload = name, self._pending_reloads.get(name)
        return _LoadingStep(removed_models, name)

    def _choose_next_model(self) -> str | None:
        """Return the model to load next, and mark the models that must be evicted first."""
        for waiting_name, leases in list(self._waiting_leases.items()):
            if all(lease.model_future.cancelled() for lease in leases):
                del self._waiting_leases[waiting_name]
        names_to_load = (
            self._startup_models
            or [name for name in self._waiting_leases if name not in self._memory.entries]
            or list(self._pending_reloads)
        )
        name = names_to_load[0] if names_to_load else None
        self._memory.mark_evictions_to_load(name)
        return name

    def _grant_leases(self) -> list[Lease[T]]:
        """Grant the waiting leases whose model is loaded: set their entry, count them as requests, and return them."""
        if self._startup_models:
            return []
        entries = self._memory.entries.items()
        usable_entries = {
            name: entry for name, entry in entries if name in self._waiting_leases and not entry.must_evict
        }
        granted_leases = []
        for name, entry in usable_entries.items():
            leases = self._pop_waiting_leases((name,))
            entry.begin_use(len(leases))
            for lease in leases:
                lease.entry = entry
            granted_leases += leases
        return granted_leases

    def _pop_waiting_leases(self, names: Iterable[str]) -> list[Lease[T]]:
        """Remove the leases that wait for these models, and return those that have not ended."""
        leases = [lease for name in names for lease in self._waiting_leases.pop(name, ())]
        return [lease for lease in leases if lease.model_future.set_running_or_notify_cancel()]

    def _load_model(self, name: str) -> None:
        """Load a model. Its known or estimated size is within the memory limit."""
        try:
            with self._load_lock:
                model = self._load(name)
        except Exception as error:  # noqa: BLE001 - the leases get the error
            self._fail_loading(name, error)
            return
        nbytes = model.nbytes
        granted_leases = None
        with self._condition:
            if self._memory.put(name, model, nbytes):
                self._problems.pop(name, None)
                reload_future, _ = self._end_loading(name)
                # Grant the leases before the model might be evicted.
                granted_leases = self._grant_leases()
        if granted_leases is not None:
            _complete_leases(granted_leases)
            reload_future.set_result(None)
            return
        del model
        self._free_memory(name)
        if nbytes > (limit_bytes := self._memory.limit_bytes):
            self._fail_loading(name, BrokenModel(format_too_large_error(name, nbytes, limit_bytes)))
        # Otherwise the model is larger than estimated, and is loaded again when there is enough memory.

    def _free_memory(self, name: str) -> None:
        """Free the memory of an unloaded model. If this fails, log the error and continue."""
        try:
            self._after_unload(name)
        except Exception:
            log.exception("the memory of %s could not be freed", name)

    def _fail_loading(self, name: str, error: Exception) -> None:
        with self._condition:
            reload_future, keep_previous = self._end_loading(name)
            is_previous_kept = keep_previous and name in self._memory.entries
            problem = str(error) if isinstance(error, StackSegError) else f"{type(error).__name__}: {error}"
            if not is_previous_kept and not isinstance(error, CapacityError | RequestError | Cancelled):
                self._memory.retire(name)
                self._problems[name] = problem
            log.error("%s cannot be %s: %s", name, "reloaded" if is_previous_kept else "loaded", problem)
            leases = [] if is_previous_kept else self._pop_waiting_leases((name,))
        for lease in leases:
            lease.model_future.set_exception(error)
        reload_future.set_exception(error if isinstance(error, StackSegError) else BrokenModel(problem))

    def _end_loading(self, name: str) -> tuple[Future[None], bool]:
        """End loading a model, and return the future of its `reload` call and whether to keep the previous version."""
        self._loading_name = None
        self._startup_models = [other for other in self._startup_models if other != name]
        current_reload, self._current_reload = self._current_reload, None
        if current_reload is None or self._pending_reloads.get(name) is not current_reload:
            return Future(), True
        del self._pending_reloads[name]
        return current_reload


class _LoadingStep(NamedTuple):
    """A step of the thread: the models that were removed, and the model to load next, if any."""

    removed_models: list[str]
    model_to_load: str | None


def _cancel_for_shutdown(future: Future[Any]) -> None:
    future.set_exception(Cancelled("The service is stopping."))


def _complete_leases(granted_leases: list[Lease[T]]) -> None:
    for lease in granted_leases:
        lease.model_future.set_result(lease.entry.model)


def format_too_large_error(name: str, nbytes: int, limit_bytes: int) -> str:
    """Return the error message for a model that exceeds the memory limit for all models."""
    return (
        f"The model {name} takes {nbytes / 2**20:.0f} MiB when loaded, but models.memory_bytes allows only "
        f"{limit_bytes / 2**20:.0f} MiB for all models. Increase models.memory_bytes."
    )
