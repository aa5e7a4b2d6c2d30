"""The cache of loaded models on one device, which evicts the least recently used models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple

from service.core.errors import BrokenModel, Cancelled, CapacityError, RequestError, StackSegError
from service.serving.devices.models.eviction import Entry, LoadedModel, ModelMemory, T

log = logging.getLogger(__name__)


class Lease(Generic[T]):
    """A lease of a model, until `end` is called. The future `model` returns the loaded model or the loading error."""

    def __init__(self, give_back: Callable[[Entry[T]], None]) -> None:
        self.model: Future[T] = Future()
        # Set before `model` gets its result.
        self.entry: Entry[T]
        self._give_back = give_back
        self._ended = threading.Lock()

    def end(self) -> None:
        """Release the model so that it may be unloaded, or stop waiting for it. May be called repeatedly."""
        if not self._ended.acquire(blocking=False) or self.model.cancel():
            return
        if self.model.exception() is None:
            self._give_back(self.entry)


class ModelCache(Generic[T]):
    """A thread that loads models by name, one at a time, in the order in which they were requested.

    A model is never unloaded while a request uses it. If a model in use has to be evicted, it gets no new leases, so
    that requests for the other model are not starved. Later requests for the evicted model wait until it is loaded
    again. A reloaded model replaces the previous version, which stays loaded until its leases end.

    limit_bytes  memory limit for all loaded models
    load         loads a model and makes it ready to run; called in the thread, without the lock of this object
    guess        estimates the memory of a model in bytes; used until the model has been loaded once
    unloaded     called in the thread after a model was unloaded, to free the memory that it leaves behind
    lock         held while a model is loaded; may be shared by several devices
    """

    def __init__(
        self,
        limit_bytes: int,
        load: Callable[[str], T],
        *,
        guess: Callable[[str], int] = lambda _name: 0,
        unloaded: Callable[[str], None] = lambda _name: None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._load, self._unloaded = load, unloaded
        self._load_lock = lock or threading.Lock()
        self._memory: ModelMemory[T] = ModelMemory(limit_bytes, guess)
        # Waiting leases by model, in the order of the first lease for each model.
        self._waiting: dict[str, list[Lease[T]]] = {}
        self._startup_models: list[str] = []
        # Models to reload, with the future to complete and whether to keep the previous version if reloading fails.
        self._stale: dict[str, tuple[Future[None], bool]] = {}
        self._loading: str | None = None
        # The entry of `_stale` for the model that is being loaded.
        self._renewal: tuple[Future[None], bool] | None = None
        self._problems: dict[str, str] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="load", daemon=True)

    def start(self, names: Iterable[str]) -> None:
        """Start the thread and load these models first. No lease is granted until then, because engines are timed."""
        self._startup_models = list(names)
        self._thread.start()

    def close(self) -> None:
        """Stop loading models. Waiting leases get the error Cancelled."""
        with self._changed:
            self._closed = True
            waiting = self._pop_waiting(tuple(self._waiting))
            stale = [done for done, _ in self._stale.values()]
            self._stale.clear()
            self._changed.notify_all()
        for lease in waiting:
            _refuse_stopping(lease.model)
        for done in stale:
            _refuse_stopping(done)

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` until the thread has ended; return whether it has."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of the models of the startup that are not loaded yet."""
        with self._changed:
            return tuple(self._startup_models)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why models cannot be loaded, by model."""
        with self._changed:
            return dict(self._problems)

    @property
    def loaded_models(self) -> dict[str, LoadedModel]:
        """The loaded models by name."""
        with self._changed:
            return self._memory.measure()

    def get(self, name: str) -> T | None:
        """Return the model without a lease; None if it is not loaded."""
        with self._changed:
            entry = self._memory.entries.get(name)
            return None if entry is None else entry.model

    def is_awaited(self, name: str) -> bool:
        """Return whether the model is being loaded or is waiting to be loaded."""
        with self._changed:
            return name == self._loading or name in self._waiting or name in self._startup_models

    def lease(self, name: str) -> Lease[T]:
        """Return a lease, which gets the model as soon as it is loaded. The model stays loaded until the lease ends."""
        lease: Lease[T] = Lease(self._end_use)
        with self._changed:
            if self._closed or name in self._problems:
                error = BrokenModel(self._problems[name]) if name in self._problems else Cancelled("stopping")
                lease.model.set_exception(error)
                return lease
            self._waiting.setdefault(name, []).append(lease)
            self._choose_next()
            granted = self._grant()
            self._wake()
        _complete_leases(granted)
        return lease

    def reload(self, name: str, *, keep: bool = True) -> Future[None]:
        """Reload a model. The returned future completes when new leases get the new version, or with the loading error.

        keep  if loading fails, continue with the previous version; otherwise the model cannot be used
        """
        done: Future[None] = Future()
        with self._changed:
            if self._closed:
                _refuse_stopping(done)
            else:
                self._stale[name] = done, keep
                self._changed.notify_all()
        return done

    def forget(self, name: str) -> None:
        """Unload a model after its last lease has ended, and forget why it could not be loaded."""
        with self._changed:
            self._problems.pop(name, None)
            self._memory.forget(name)
            self._changed.notify_all()

    def _end_use(self, entry: Entry[T]) -> None:
        with self._changed:
            entry.end_use()
            self._wake()

    def _wake(self) -> None:
        """Wake the thread if there may be models to load, evict or unload."""
        if self._waiting or self._stale or self._memory.has_replaced:
            self._changed.notify_all()

    def _loop(self) -> None:
        while (step := self._wait_for_step()) is not None:
            for name in step.dropped:
                log.info("%s was unloaded", name)
                self._free(name)
            if step.name is not None:
                self._load_model(step.name)

    def _wait_for_step(self) -> _Step | None:
        """Wait for the next step; return None when the cache is closed."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                step = self._step()
                granted = self._grant()
                if step is None and not granted:
                    self._changed.wait()
            _complete_leases(granted)
            if step is not None:
                return step

    def _step(self) -> _Step | None:
        """Drop unused models that have to be evicted, and return the model to load if there is enough memory."""
        name = self._choose_next()
        dropped = self._memory.drop_unused()
        if name is None or self._memory.is_making_room:
            return _Step(dropped, None) if dropped else None
        self._loading, self._renewal = name, self._stale.get(name)
        return _Step(dropped, name)

    def _choose_next(self) -> str | None:
        """Return the model to load next, and mark the models to evict for it."""
        for waiting, leases in list(self._waiting.items()):
            if all(lease.model.cancelled() for lease in leases):
                del self._waiting[waiting]
        missing = (
            self._startup_models
            or [name for name in self._waiting if name not in self._memory.entries]
            or list(self._stale)
        )
        name = missing[0] if missing else None
        self._memory.make_room(name)
        return name

    def _grant(self) -> list[Lease[T]]:
        """Grant the waiting leases whose model is loaded: set their entry, count them as users, and return them."""
        if self._startup_models:
            return []
        entries = self._memory.entries.items()
        usable = {name: entry for name, entry in entries if name in self._waiting and not entry.must_evict}
        granted = []
        for name, entry in usable.items():
            leases = self._pop_waiting((name,))
            entry.begin_use(len(leases))
            for lease in leases:
                lease.entry = entry
            granted += leases
        return granted

    def _pop_waiting(self, names: Iterable[str]) -> list[Lease[T]]:
        """Remove the leases that wait for these models, and return those that have not ended."""
        leases = [lease for name in names for lease in self._waiting.pop(name, ())]
        return [lease for lease in leases if lease.model.set_running_or_notify_cancel()]

    def _load_model(self, name: str) -> None:
        """Load a model. Its known or estimated size fits into the memory limit."""
        try:
            with self._load_lock:
                model = self._load(name)
        except Exception as error:  # noqa: BLE001 - the leases get the error
            self._refuse(name, error)
            return
        nbytes = model.nbytes
        granted = None
        with self._changed:
            if self._memory.put(name, model, nbytes):
                self._problems.pop(name, None)
                renewed, _ = self._end_loading(name)
                # Grant the leases before the model might be evicted.
                granted = self._grant()
        if granted is not None:
            _complete_leases(granted)
            renewed.set_result(None)
            return
        del model
        self._free(name)
        if nbytes > (limit := self._memory.limit_bytes):
            self._refuse(name, BrokenModel(too_large_message(name, nbytes, limit)))
        # Otherwise the model is larger than estimated, and is loaded again when there is enough memory.

    def _free(self, name: str) -> None:
        """Free the memory of an unloaded model. If this fails, log the error and continue."""
        try:
            self._unloaded(name)
        except Exception:
            log.exception("the memory of %s could not be freed", name)

    def _refuse(self, name: str, error: Exception) -> None:
        with self._changed:
            renewed, keep = self._end_loading(name)
            is_kept = keep and name in self._memory.entries
            problem = str(error) if isinstance(error, StackSegError) else f"{type(error).__name__}: {error}"
            if not is_kept and not isinstance(error, CapacityError | RequestError | Cancelled):
                self._memory.replace(name)
                self._problems[name] = problem
            log.error("%s cannot be %s: %s", name, "reloaded" if is_kept else "loaded", problem)
            waiting = [] if is_kept else self._pop_waiting((name,))
        for lease in waiting:
            lease.model.set_exception(error)
        renewed.set_exception(error if isinstance(error, StackSegError) else BrokenModel(problem))

    def _end_loading(self, name: str) -> tuple[Future[None], bool]:
        """End loading a model, and return the future of its `reload` call and whether to keep the previous version."""
        self._loading = None
        self._startup_models = [other for other in self._startup_models if other != name]
        renewal, self._renewal = self._renewal, None
        if renewal is None or self._stale.get(name) is not renewal:
            return Future(), True
        del self._stale[name]
        return renewal


class _Step(NamedTuple):
    """A step of the thread: models that were dropped, and the model to load next, if any."""

    dropped: list[str]
    name: str | None


def _refuse_stopping(future: Future[Any]) -> None:
    future.set_exception(Cancelled("the service is stopping"))


def _complete_leases(granted: list[Lease[T]]) -> None:
    for lease in granted:
        lease.model.set_result(lease.entry.model)


def too_large_message(name: str, nbytes: int, limit: int) -> str:
    """Return the error message for a model that exceeds the memory limit for all models."""
    return (
        f"The model {name} takes {nbytes / 2**20:.0f} MiB when loaded, but models.memory_bytes allows only "
        f"{limit / 2**20:.0f} MiB for all models. Increase models.memory_bytes."
    )
