"""Blocking work of a request, in threads: ended by its time limit, or when its client disconnects.

Work is awaited to its end, so that nothing it uses disappears meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, TypeVar, cast

from starlette.requests import Request

from service.core.errors import Cancelled, TimedOut
from service.serving.devices.queue.job import Job
from service.serving.storage.fair_threads import begin_all

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


async def run_in_thread(
    work: Callable[[], T], executor: Executor = FILE_THREADS, cancelled: threading.Event | None = None
) -> T:
    """Return what `work` returns in a thread, or raise what it raises.

    When the caller is cancelled, work that has not begun never begins. Work that has begun is awaited, however often
    the caller is cancelled, since it may still use the request's folder; it can poll `cancelled`, which is set then.
    """
    result: T = await follow(executor.submit(work), cancelled)
    return result


async def follow(first: Future[Any], cancelled: threading.Event | None = None) -> Any:
    """Return what a chain of steps ends with, or raise what a step raises.

    A step is a call in a thread, or the job of a device. It returns the next step, or the result of all. The event loop
    is woken once, at the end. When the caller is cancelled, a call that has begun is awaited, since it may still use
    the request's folder; a job is cancelled, and left behind: a device that hangs keeps no request.
    Raises Cancelled if a step was cancelled before it began.
    """
    chain = _Chain(first)
    try:
        return await chain.result
    except asyncio.CancelledError:
        _retrieve_error(chain.result)
        if cancelled is not None:
            cancelled.set()
        await chain.cancel()
        raise


class _Chain:
    """The step that a chain is at, and its result."""

    def __init__(self, first: Future[Any]) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._step: Future[Any] | Job[Any] = first
        first.add_done_callback(self._advance)

    def _advance(self, step: Future[Any]) -> None:
        """Go on to the step that this one returned, or end; called in the thread where it ended."""
        following = None if step.cancelled() or step.exception() is not None else step.result()
        if isinstance(following, Job):
            self._step = following
            following.future.add_done_callback(self._advance)
        elif isinstance(following, Future):
            self._step = following
            following.add_done_callback(self._advance)
        else:
            _copy_from_thread(self.result, step)

    async def cancel(self) -> None:
        """Cancel the step that has not begun, or wait for the calls in threads that have."""
        while isinstance(step := self._step, Future):
            if step.cancel():
                return
            await _wait_until_done(step)
            if step is self._step:
                return
        step.cancel()


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


@asynccontextmanager
async def time_limit(seconds: float, explain: Callable[[], str | None] = lambda: None) -> AsyncIterator[None]:
    """Cancel the block after `seconds` and raise TimedOut, with what `explain` then knows of the cause."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        advice = explain() or "Send a smaller part of the volume."
        message = f"The request was not finished within {seconds:g} s. {advice}"
        raise TimedOut(message) from None


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise Cancelled when the client disconnects.

    The body must have been received. Never returns before `work` has ended.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    listening = asyncio.ensure_future(_wait_for_disconnect(request))
    ended = cancelled = False

    def cancel(_listening: asyncio.Future[None]) -> None:
        # Called one turn of the loop after the client disconnected: the work may have ended since.
        nonlocal cancelled
        if not ended:
            cancelled = task.cancel()

    listening.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if not cancelled or task.uncancel() > 0:
            raise
    finally:
        ended = True
        listening.cancel()
    raise Cancelled("The client hung up.")


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
