"""The models that are loaded on one device, within a budget of memory: the least recently used make room for others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from service.core.errors import BrokenModel, Cancelled, CapacityError, StackSegError

log = logging.getLogger(__name__)


class Loadable(Protocol):
    """What is loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that it takes."""


T = TypeVar("T", bound=Loadable)


class LoadedModel(NamedTuple):
    """A model that is loaded: its bytes, how many requests use it or will, and when the last one began or ended.

    `used` is on the clock of `time.time`.
    """

    nbytes: int
    users: int
    used: float


@dataclass
class _Resident(Generic[T]):
    model: T
    nbytes: int
    used: float
    users: int = 0
    # Has to go, and gets no more users: others would keep it here for ever.
    leaving: bool = False


class Lease(Generic[T]):
    """The use of a model until `end`: `model` has it once it is loaded, or why it cannot be."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self.model: Future[T] = Future()
        self._give_back = give_back
        self._ended = threading.Lock()

    def end(self) -> None:
        """The model is not needed any more, or no longer waited for; may be called twice."""
        if not self._ended.acquire(blocking=False) or self.model.cancel():
            return
        if self.model.exception() is None:
            self._give_back()


class ModelCache(Generic[T]):
    """Loads models by name on demand, one at a time, in a thread of its own, in the order in which they are asked for.

    A model is never unloaded while somebody uses it. One that has to make room and is in use gets no more users, so
    that the one that waits for the room has its turn; who asks for it meanwhile waits until it is loaded again.

    limit_bytes  that the loaded models may take together
    load         makes a model ready to run; called in the thread, without a lock of this object
    guess        bytes that a model may take, until it has been loaded once
    unloaded     called likewise after a model was let go of, to free what it leaves behind
    turn         held while a model is loaded; several devices share one
    """

    def __init__(  # noqa: PLR0913
        self,
        limit_bytes: int,
        load: Callable[[str], T],
        *,
        guess: Callable[[str], int] = lambda _name: 0,
        unloaded: Callable[[str], None] = lambda _name: None,
        turn: AbstractContextManager[object] | None = None,
        name: str = "load",
    ) -> None:
        self._limit, self._load, self._guess, self._unloaded = limit_bytes, load, guess, unloaded
        self._turn = turn or threading.Lock()
        self._model_cache: dict[str, _Resident[T]] = {}
        self._sizes: dict[str, int] = {}
        # Who waits for which model, in the order of the first who asked for each.
        self._wanted: dict[str, list[Lease[T]]] = {}
        self._first: list[str] = []
        self._loading: str | None = None
        self._problems: dict[str, str] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self, names: Iterable[str]) -> None:
        """Load these first. Until that is over nobody gets a model: it is then that ways to run them are compared."""
        self._first = list(names)
        self._thread.start()

    def close(self) -> None:
        """Load no more; whoever waits gets Cancelled."""
        with self._changed:
            self._closed = True
            waiting = self._waiting(tuple(self._wanted))
            self._changed.notify_all()
        for lease in waiting:
            lease.model.set_exception(Cancelled("the service is stopping"))

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; False if it has not after `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def starting(self) -> tuple[str, ...]:
        """Of the models that are loaded first those that have yet to be."""
        with self._changed:
            return tuple(self._first)

    @property
    def problems(self) -> dict[str, str]:
        """Why models cannot be loaded, by name."""
        with self._changed:
            return dict(self._problems)

    @property
    def loaded_models(self) -> dict[str, LoadedModel]:
        """The loaded models by name."""
        with self._changed:
            return {name: LoadedModel(one.nbytes, one.users, one.used) for name, one in self._model_cache.items()}

    def get(self, name: str) -> T | None:
        """The model if it is loaded, without using it."""
        with self._changed:
            resident = self._model_cache.get(name)
            return None if resident is None else resident.model

    def is_awaited(self, name: str) -> bool:
        """Whether the model is being loaded, or waits for that."""
        with self._changed:
            return name == self._loading or name in self._wanted or name in self._first

    def lease(self, name: str) -> Lease[T]:
        """Use the model, as soon as it is loaded; it stays loaded until the lease ends."""
        lease: Lease[T] = Lease(lambda: self._return(name))
        with self._changed:
            if self._closed or name in self._problems:
                error = BrokenModel(self._problems[name]) if name in self._problems else Cancelled("stopping")
                lease.model.set_exception(error)
                return lease
            self._wanted.setdefault(name, []).append(lease)
            self._next_to_load()
            granted = self._granted()
            self._wake()
        _hand_out(granted)
        return lease

    def _return(self, name: str) -> None:
        with self._changed:
            resident = self._model_cache[name]
            resident.users -= 1
            resident.used = time.time()
            self._wake()

    def _wake(self) -> None:
        """The thread, if anybody waits for a model: otherwise there is nothing to load, or to make room for."""
        if self._wanted:
            self._changed.notify_all()

    def _loop(self) -> None:
        while (step := self._next()) is not None:
            for name in step.unloaded:
                log.info("%s was unloaded to make room", name)
                self._unloaded(name)
            if step.name is not None:
                self._bring(step.name)

    def _next(self) -> _Step | None:
        """What to do next, as soon as there is something; None at the end."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                step = self._step()
                granted = self._granted()
                if step is None and not granted:
                    self._changed.wait()
            _hand_out(granted)
            if step is not None:
                return step

    def _step(self) -> _Step | None:
        """Let go of what has to make room, and say which model is loaded then, if there is enough."""
        name = self._next_to_load()
        unloaded = [other for other, resident in self._model_cache.items() if resident.leaving and not resident.users]
        for other in unloaded:
            del self._model_cache[other]
        if name is None or any(resident.leaving for resident in self._model_cache.values()):
            return _Step(unloaded, None) if unloaded else None
        self._loading = name
        return _Step(unloaded, name)

    def _next_to_load(self) -> str | None:
        """Marks those that have to make room for it."""
        for name in [name for name, leases in self._wanted.items() if all(lease.model.cancelled() for lease in leases)]:
            del self._wanted[name]
        for resident in self._model_cache.values():
            resident.leaving = False
        absent = self._first or [name for name in self._wanted if name not in self._model_cache]
        if not absent:
            return None
        excess = sum(one.nbytes for one in self._model_cache.values()) + self._size(absent[0]) - self._limit
        for resident in sorted(self._model_cache.values(), key=lambda one: (one.users > 0, one.used)):
            if excess > 0:
                excess -= resident.nbytes
                resident.leaving = True
        return absent[0]

    def _size(self, name: str) -> int:
        return self._sizes.get(name) or self._guess(name)

    def _granted(self) -> list[tuple[Lease[T], T]]:
        """Those whose model is there, with it."""
        if self._first:
            return []
        there = {name: one for name, one in self._model_cache.items() if name in self._wanted and not one.leaving}
        granted = []
        for name, resident in there.items():
            leases = self._waiting((name,))
            resident.users += len(leases)
            resident.used = time.time()
            granted += [(lease, resident.model) for lease in leases]
        return granted

    def _waiting(self, names: Iterable[str]) -> list[Lease[T]]:
        """Those that wait for one of these and have not given up; they wait no longer."""
        leases = [lease for name in names for lease in self._wanted.pop(name, ())]
        return [lease for lease in leases if lease.model.set_running_or_notify_cancel()]

    def _bring(self, name: str) -> None:
        """Load a model for which there is room, as far as is known."""
        try:
            with self._turn:
                model = self._load(name)
        except Exception as error:  # noqa: BLE001 - raised again where the model is asked for
            self._refuse(name, error)
            return
        nbytes = model.nbytes
        granted = None
        with self._changed:
            self._sizes[name] = nbytes
            if nbytes + sum(one.nbytes for one in self._model_cache.values()) <= self._limit:
                self._model_cache[name] = _Resident(model, nbytes, time.time())
                self._over(name)
                # Before it might have to make room for what others wait for.
                granted = self._granted()
        if granted is not None:
            _hand_out(granted)
            return
        del model
        self._unloaded(name)
        if nbytes > self._limit:
            self._refuse(name, BrokenModel(too_large(name, nbytes, self._limit)))
        # Otherwise it is larger than was guessed, and is loaded again once there is room for what it takes.

    def _refuse(self, name: str, error: Exception) -> None:
        with self._changed:
            self._over(name)
            if not isinstance(error, CapacityError | Cancelled):
                self._problems[name] = str(error) if isinstance(error, StackSegError) else _named(error)
                log.error("%s cannot be served: %s", name, self._problems[name])
            waiting = self._waiting((name,))
        for lease in waiting:
            lease.model.set_exception(error)

    def _over(self, name: str) -> None:
        """Loading this one has ended, one way or the other."""
        self._loading = None
        self._first = [other for other in self._first if other != name]


class _Step(NamedTuple):
    """Models that were let go of, and one to load next, if any."""

    unloaded: list[str]
    name: str | None


def _hand_out(granted: list[tuple[Lease[T], T]]) -> None:
    for lease, model in granted:
        lease.model.set_result(model)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def too_large(name: str, nbytes: int, limit: int) -> str:
    """What is wrong with a model that takes more than all may."""
    return (
        f"The model {name} takes {nbytes / 2**20:.0f} MiB when loaded, and models.memory_bytes allows "
        f"{limit / 2**20:.0f} MiB for all; raise it."
    )
