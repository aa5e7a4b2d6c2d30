"""The models that are loaded on one device, within a memory limit: the least recently used make room for others."""

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
    """The use of a model until `end`. The future `model` has the loaded model, or the error of loading it."""

    def __init__(self, give_back: Callable[[Entry[T]], None]) -> None:
        self.model: Future[T] = Future()
        # Set before the model is.
        self.entry: Entry[T]
        self._give_back = give_back
        self._ended = threading.Lock()

    def end(self) -> None:
        """Let others unload the model, or stop waiting for it. May be called twice."""
        if not self._ended.acquire(blocking=False) or self.model.cancel():
            return
        if self.model.exception() is None:
            self._give_back(self.entry)


class ModelCache(Generic[T]):
    """A thread that loads models by name, one at a time, in the order of the requests for them.

    A model is never unloaded while a request uses it. A model that is in use and has to make room gets no more users,
    so that requests for the other model have their turn; later requests wait until it is loaded again. A model that is
    loaded anew replaces the earlier one, which stays loaded for those who use it.

    limit_bytes  of all loaded models together
    load         makes a model ready to run; runs in the thread, without a lock of this object
    guess        returns the bytes that a model may take, until it has been loaded once
    unloaded     runs in the thread after a model was dropped, to free what it leaves behind
    lock         held while a model is loaded; several devices share one
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
        # Leases that wait for a model, by its name, in the order of the first one for each.
        self._wanted: dict[str, list[Lease[T]]] = {}
        self._first: list[str] = []
        # Models to be loaded anew, and whether the earlier one is kept where that fails.
        self._stale: dict[str, tuple[Future[None], bool]] = {}
        self._loading: str | None = None
        # What was asked for when loading began.
        self._renewal: tuple[Future[None], bool] | None = None
        self._problems: dict[str, str] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="load", daemon=True)

    def start(self, names: Iterable[str]) -> None:
        """Load these first. No lease gets a model until then, because engines are timed meanwhile."""
        self._first = list(names)
        self._thread.start()

    def close(self) -> None:
        """Load no more; leases that wait get Cancelled."""
        with self._changed:
            self._closed = True
            waiting = self._pop_waiting(tuple(self._wanted))
            stale = [done for done, _ in self._stale.values()]
            self._stale.clear()
            self._changed.notify_all()
        for lease in waiting:
            _refuse_stopping(lease.model)
        for done in stale:
            _refuse_stopping(done)

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; return False if it has not after `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def starting(self) -> tuple[str, ...]:
        """The models to be loaded at start that are not loaded yet."""
        with self._changed:
            return tuple(self._first)

    @property
    def problems(self) -> dict[str, str]:
        """The reasons why models cannot be loaded, by name."""
        with self._changed:
            return dict(self._problems)

    @property
    def loaded_models(self) -> dict[str, LoadedModel]:
        """The loaded models by name."""
        with self._changed:
            return self._memory.measure()

    def get(self, name: str) -> T | None:
        """Return the model if it is loaded, without a lease."""
        with self._changed:
            entry = self._memory.entries.get(name)
            return None if entry is None else entry.model

    def is_awaited(self, name: str) -> bool:
        """Return whether the model is being loaded, or waits for that."""
        with self._changed:
            return name == self._loading or name in self._wanted or name in self._first

    def lease(self, name: str) -> Lease[T]:
        """Return a lease, which gets the model once it is loaded. The model stays loaded until the lease ends."""
        lease: Lease[T] = Lease(self._end_use)
        with self._changed:
            if self._closed or name in self._problems:
                error = BrokenModel(self._problems[name]) if name in self._problems else Cancelled("stopping")
                lease.model.set_exception(error)
                return lease
            self._wanted.setdefault(name, []).append(lease)
            self._choose_next()
            granted = self._grant()
            self._wake()
        _hand_out(granted)
        return lease

    def reload(self, name: str, *, keep: bool = True) -> Future[None]:
        """Load a model anew; the future is done once new leases get that one, or has the error.

        Where that fails, the earlier one stays if it is to be kept; otherwise the model cannot be used.
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
        """Unload a model once nobody uses it, and forget why it could not be loaded."""
        with self._changed:
            self._problems.pop(name, None)
            self._memory.forget(name)
            self._changed.notify_all()

    def _end_use(self, entry: Entry[T]) -> None:
        with self._changed:
            entry.end_use()
            self._wake()

    def _wake(self) -> None:
        """Wake the thread if there may be something to load, to make room for, or to unload."""
        if self._wanted or self._stale or self._memory.has_replaced:
            self._changed.notify_all()

    def _loop(self) -> None:
        while (step := self._wait_for_step()) is not None:
            for name in step.dropped:
                log.info("%s was unloaded", name)
                self._free(name)
            if step.name is not None:
                self._load_model(step.name)

    def _wait_for_step(self) -> _Step | None:
        """Wait for the next step; None once closed."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                step = self._step()
                granted = self._grant()
                if step is None and not granted:
                    self._changed.wait()
            _hand_out(granted)
            if step is not None:
                return step

    def _step(self) -> _Step | None:
        """Drop models that have to make room and are not in use; return a model to load once there is room."""
        name = self._choose_next()
        dropped = self._memory.drop_unused()
        if name is None or self._memory.is_making_room:
            return _Step(dropped, None) if dropped else None
        self._loading, self._renewal = name, self._stale.get(name)
        return _Step(dropped, name)

    def _choose_next(self) -> str | None:
        """Return the model to load next, and mark those that have to make room for it."""
        for wanted, leases in list(self._wanted.items()):
            if all(lease.model.cancelled() for lease in leases):
                del self._wanted[wanted]
        absent = self._first or [name for name in self._wanted if name not in self._memory.entries] or list(self._stale)
        name = absent[0] if absent else None
        self._memory.make_room(name)
        return name

    def _grant(self) -> list[Lease[T]]:
        """Return the waiting leases whose model is loaded, with its entry, and count them as users."""
        if self._first:
            return []
        entries = self._memory.entries.items()
        usable = {name: entry for name, entry in entries if name in self._wanted and not entry.leaving}
        granted = []
        for name, entry in usable.items():
            leases = self._pop_waiting((name,))
            entry.begin_use(len(leases))
            for lease in leases:
                lease.entry = entry
            granted += leases
        return granted

    def _pop_waiting(self, names: Iterable[str]) -> list[Lease[T]]:
        """Remove and return the leases that wait for one of these models and have not ended."""
        leases = [lease for name in names for lease in self._wanted.pop(name, ())]
        return [lease for lease in leases if lease.model.set_running_or_notify_cancel()]

    def _load_model(self, name: str) -> None:
        """Load a model for which there is room, by the bytes that are known or guessed."""
        try:
            with self._load_lock:
                model = self._load(name)
        except Exception as error:  # noqa: BLE001 - the leases get it
            self._refuse(name, error)
            return
        nbytes = model.nbytes
        granted = None
        with self._changed:
            if self._memory.put(name, model, nbytes):
                self._problems.pop(name, None)
                renewed, _ = self._end_loading(name)
                # Before the model might have to make room for others.
                granted = self._grant()
        if granted is not None:
            _hand_out(granted)
            renewed.set_result(None)
            return
        del model
        self._free(name)
        if nbytes > (limit := self._memory.limit_bytes):
            self._refuse(name, BrokenModel(too_large_message(name, nbytes, limit)))
        # Otherwise it is larger than the guess, and is loaded again once there is room.

    def _free(self, name: str) -> None:
        """Free the memory of an unloaded model; where that fails, the thread goes on to load others."""
        try:
            self._unloaded(name)
        except Exception:
            log.exception("memory of %s cannot be freed", name)

    def _refuse(self, name: str, error: Exception) -> None:
        with self._changed:
            renewed, keep = self._end_loading(name)
            kept = keep and name in self._memory.entries
            problem = str(error) if isinstance(error, StackSegError) else f"{type(error).__name__}: {error}"
            if not kept and not isinstance(error, CapacityError | RequestError | Cancelled):
                self._memory.replace(name)
                self._problems[name] = problem
            log.error("%s cannot be served%s: %s", name, " as it is now" if kept else "", problem)
            waiting = [] if kept else self._pop_waiting((name,))
        for lease in waiting:
            lease.model.set_exception(error)
        renewed.set_exception(error if isinstance(error, StackSegError) else BrokenModel(problem))

    def _end_loading(self, name: str) -> tuple[Future[None], bool]:
        """Return the future of whoever has asked for loading the model anew, and whether to keep the earlier one."""
        self._loading = None
        self._first = [other for other in self._first if other != name]
        renewal, self._renewal = self._renewal, None
        if renewal is None or self._stale.get(name) is not renewal:
            return Future(), True
        del self._stale[name]
        return renewal


class _Step(NamedTuple):
    """Models that were dropped, and the model to load next, if any."""

    dropped: list[str]
    name: str | None


def _refuse_stopping(future: Future[Any]) -> None:
    future.set_exception(Cancelled("the service is stopping"))


def _hand_out(granted: list[Lease[T]]) -> None:
    for lease in granted:
        lease.model.set_result(lease.entry.model)


def too_large_message(name: str, nbytes: int, limit: int) -> str:
    """Return the message for a model that exceeds the limit of all models."""
    return (
        f"The model {name} takes {nbytes / 2**20:.0f} MiB when loaded, and models.memory_bytes allows "
        f"{limit / 2**20:.0f} MiB for all; raise it."
    )
