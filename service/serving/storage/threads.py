"""Thread pools for file access, including a pool with fair scheduling, and helpers for awaiting blocking work.

If `run_in_thread` is canceled, it still awaits work that is running, because the work may still use files.
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

# Threads that write uploads and results to the service's own disk, and delete folders.
FILE_THREAD_COUNT = 8
FILE_THREADS = ThreadPoolExecutor(FILE_THREAD_COUNT, "files")

_start_lock = threading.Lock()


def start_file_threads() -> None:
    """Start `FILE_THREADS` before work is submitted. Raises the errors of `start_all_threads`."""
    with _start_lock:
        _start_file_threads_once()


@cache
def _start_file_threads_once() -> None:
    start_all_threads(FILE_THREADS, FILE_THREAD_COUNT)


def start_threads(thread_count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have all been started. Raises the errors of `start_all_threads`."""
    pool = ThreadPoolExecutor(thread_count, name)
    start_all_threads(pool, thread_count)
    return pool


def start_all_threads(pool: ThreadPoolExecutor, thread_count: int) -> None:
    """Start all threads of an idle pool. If a thread failed to start later for lack of memory, its work would be lost.

    Raises RuntimeError if there is not enough memory for the threads.
    """
    start_barrier = threading.Barrier(thread_count)
    try:
        for _ in range(thread_count):
            pool.submit(start_barrier.wait)
    except BaseException:
        start_barrier.abort()
        raise


class FairThreadPool:
    """A thread pool that serves clients in round-robin order, not in order of arrival.

    The last idle thread is used only for a client that does not occupy another thread. A single client can therefore
    never occupy all threads of a pool with more than one thread.
    """

    def __init__(self, thread_count: int, name: str) -> None:
        self._thread_count = thread_count
        self._pool = start_threads(thread_count, name)
        self._lock = threading.Lock()
        # Waiting calls by client, in round-robin order. A client moves to the end when one of its calls begins.
        self._waiting_calls: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._running_counts: Counter[str] = Counter()

    def for_client(self, client: str) -> Executor:
        """Return an executor that submits the calls of one client."""
        return _ClientExecutor(self, client)

    def is_busy(self, client: str) -> bool:
        """Return whether another call of this client would have to wait."""
        with self._lock:
            return not self._can_begin(client)

    @property
    def waiting_count(self) -> int:
        """Number of calls that have not begun, including canceled calls."""
        with self._lock:
            return sum(map(len, self._waiting_calls.values()))

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Schedule a call for a client."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting_calls.setdefault(client, deque()).append((future, work))
            self._begin_waiting_calls()
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not begun, and wait for the other calls."""
        with self._lock:
            cancelled_futures = [future for calls in self._waiting_calls.values() for future, _ in calls]
            self._waiting_calls.clear()
        for future in cancelled_futures:
            future.cancel()
        self._pool.shutdown()

    def _begin_waiting_calls(self) -> None:
        """Begin all calls that can begin. Call this with the lock held."""
        while (client := next(filter(self._can_begin, self._waiting_calls), None)) is not None:
            calls = self._waiting_calls.pop(client)
            future, work = calls.popleft()
            if calls:
                self._waiting_calls[client] = calls
            if future.set_running_or_notify_cancel():
                self._running_counts[client] += 1
                self._pool.submit(self._run, client, future, work)

    def _can_begin(self, client: str) -> bool:
        idle_count = self._thread_count - self._running_counts.total()
        return idle_count > 1 or (idle_count == 1 and not self._running_counts[client])

    def _run(self, client: str, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - reported by the future
            self._end_call(client)
            future.set_exception(error)
            # The traceback of the error refers to this frame. Delete the locals to break the reference cycle.
            del future, work
        else:
            self._end_call(client)
            future.set_result(result)

    def _end_call(self, client: str) -> None:
        with self._lock:
            self._running_counts[client] -= 1
            if not self._running_counts[client]:
                del self._running_counts[client]
            self._begin_waiting_calls()


class _ClientExecutor(Executor):
    """An executor that submits the calls of one client to a fair pool."""

    def __init__(self, pool: FairThreadPool, client: str) -> None:
        self._pool, self._client = pool, client

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call."""
        return self._pool.submit(self._client, lambda: fn(*args, **kwargs))


async def run_in_thread(
    work: Callable[[], T], executor: Executor = FILE_THREADS, cancelled: threading.Event | None = None
) -> T:
    """Run `work` in a thread, and return its result or raise its error.

    If the caller is canceled, work that has not begun is dropped. Work that has begun is awaited, even if the caller
    is canceled repeatedly, because the work may still use the request's folder. In this case, `cancelled` is set, so
    that the work can poll it.
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
    """Return the result of a future that is completed by a thread. Raises Cancelled if the future was canceled.

    If the caller is canceled, the future is neither canceled nor awaited.
    """
    result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda finished_future: _copy_from_thread(result, finished_future))
    try:
        return await result
    except asyncio.CancelledError:
        _retrieve_error(result)
        raise


def _copy_from_thread(result: asyncio.Future[Any], finished_future: Future[Any]) -> None:
    """Let the event loop copy the outcome of a finished future, unless the result is no longer awaited."""
    if not result.done():
        result.get_loop().call_soon_threadsafe(_copy_outcome, result, finished_future)


def _copy_outcome(result: asyncio.Future[Any], finished_future: Future[Any]) -> None:
    if result.done():
        return
    if finished_future.cancelled():
        result.set_exception(Cancelled("The request was canceled before it began."))
    elif (error := finished_future.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(finished_future.result())


async def _wait_until_done(thread_future: Future[Any]) -> None:
    """Wait for work even if the caller is canceled repeatedly, for example by a disconnect and a time limit."""
    future = asyncio.wrap_future(thread_future)
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    _retrieve_error(future)


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future, because asyncio logs errors that are never retrieved."""
    if future.done() and not future.cancelled():
        future.exception()
