"""Threads for files: pools, one that clients share fairly, and how the event loop waits for blocking work.

Work is awaited to its end, so that nothing it uses disappears meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, ParamSpec, TypeVar

from service.core.errors import Cancelled

P = ParamSpec("P")
T = TypeVar("T")

# For the service's own disk: writing uploads and results, deleting folders.
FILE_THREAD_COUNT = 8
FILE_THREADS = ThreadPoolExecutor(FILE_THREAD_COUNT, "files")

# For files that requests name. Their folders may lie on a server that does not answer, which must not block the others.
HOST_FILE_THREAD_COUNT = 4
HOST_FILE_THREADS = ThreadPoolExecutor(HOST_FILE_THREAD_COUNT, "named")

_beginning = threading.Lock()


def begin_file_threads() -> None:
    """Begin the threads of this module, before there is work for them. Raises what `begin_all` raises."""
    with _beginning:
        _begin_file_threads()


@cache
def _begin_file_threads() -> None:
    begin_all(FILE_THREADS, FILE_THREAD_COUNT)
    begin_all(HOST_FILE_THREADS, HOST_FILE_THREAD_COUNT)


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


async def run_in_thread(
    work: Callable[[], T], executor: Executor = FILE_THREADS, cancelled: threading.Event | None = None
) -> T:
    """Return what `work` returns in a thread, or raise what it raises.

    When the caller is cancelled, work that has not begun never begins. Work that has begun is awaited, however often
    the caller is cancelled, since it may still use the request's folder; it can poll `cancelled`, which is set then.
    """
    future = executor.submit(work)
    try:
        return await wait_for(future)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.set()
        if not future.cancel():
            await _wait_until_done(future)
        raise


async def wait_for(future: Future[T]) -> T:
    """Return the result of a future that a thread sets. Raises Cancelled if it was cancelled.

    A caller that is cancelled leaves the future behind.
    """
    result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: _copy_from_thread(result, done))
    try:
        return await result
    except asyncio.CancelledError:
        _retrieve_error(result)
        raise


def _copy_from_thread(result: asyncio.Future[Any], done: Future[Any]) -> None:
    """Have the event loop copy the end of `done`, unless nobody waits for the result any more."""
    if not result.done():
        result.get_loop().call_soon_threadsafe(_copy, result, done)


def _copy(result: asyncio.Future[Any], done: Future[Any]) -> None:
    if result.done():
        return
    if done.cancelled():
        result.set_exception(Cancelled("given up before it began"))
    elif (error := done.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


async def _wait_until_done(work: Future[Any]) -> None:
    """Wait for work however often the caller is cancelled: a client hangs up, and a time limit ends meanwhile."""
    done = asyncio.wrap_future(work)
    while not done.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([done])
    _retrieve_error(done)


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future as seen: asyncio logs errors that nobody has retrieved."""
    if future.done() and not future.cancelled():
        future.exception()
