"""Threads that several clients share, so that no client keeps all of them from the others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def begin_threads(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have all begun. Raises what `begin_all` raises."""
    pool = ThreadPoolExecutor(threads, name)
    begin_all(pool, threads)
    return pool


def begin_all(pool: ThreadPoolExecutor, threads: int) -> None:
    """Begin all threads of a pool that has no work: one that memory does not allow for later would leave work undone.

    Raises RuntimeError where memory does not allow for them.
    """
    begun = threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(begun.wait)
    except BaseException:
        begun.abort()
        raise


class FairThreadPool:
    """A few threads, whose work is begun in turn between clients, not first come first served.

    The last idle thread begins work only of a client that has none in the others, so that a client alone never occupies
    all of several threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._limit = threads
        self._threads = begin_threads(threads, name)
        self._lock = threading.Lock()
        # In the order of turns: a client whose work has begun goes to the end.
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._running: Counter[str] = Counter()

    def of(self, client: str) -> Executor:
        """Return an executor for the work of one client."""
        return _ClientExecutor(self, client)

    def busy(self, client: str) -> bool:
        """Whether further work of this client has to wait."""
        with self._lock:
            return not self._may_begin(client)

    @property
    def waiting(self) -> int:
        """The number of calls that have not begun, those that were cancelled meanwhile included."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Schedule a call."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
            self._begin_waiting()
        return future

    def shutdown(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        with self._lock:
            abandoned = [future for calls in self._waiting.values() for future, _ in calls]
            self._waiting.clear()
        for future in abandoned:
            future.cancel()
        self._threads.shutdown()

    def _begin_waiting(self) -> None:
        """Begin what may begin; called with the lock."""
        while (client := next(filter(self._may_begin, self._waiting), None)) is not None:
            calls = self._waiting.pop(client)
            future, work = calls.popleft()
            if calls:
                self._waiting[client] = calls
            if future.set_running_or_notify_cancel():
                self._running[client] += 1
                self._threads.submit(self._run, client, future, work)

    def _may_begin(self, client: str) -> bool:
        idle = self._limit - self._running.total()
        return idle > 1 or (idle == 1 and not self._running[client])

    def _run(self, client: str, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the future has it
            self._end(client)
            future.set_exception(error)
            # The error's traceback has this frame, which would otherwise keep the error.
            del future, work
        else:
            self._end(client)
            future.set_result(result)

    def _end(self, client: str) -> None:
        with self._lock:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
            self._begin_waiting()


class _ClientExecutor(Executor):
    """The threads of a pool for the work of one client."""

    def __init__(self, pool: FairThreadPool, client: str) -> None:
        self._pool, self._client = pool, client

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call."""
        return self._pool.submit(self._client, lambda: fn(*args, **kwargs))
