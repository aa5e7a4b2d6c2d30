"""Blocking work in threads, off the event loop, awaited to its end so that nothing it uses disappears meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from service.core.errors import Cancelled
from service.serving.storage.fair_threads import begin_all

T = TypeVar("T")

# For the service's own disk: writing uploads and results, deleting folders.
FILE_THREAD_COUNT = 8
FILE_THREADS = ThreadPoolExecutor(FILE_THREAD_COUNT, "files")

# For files that requests name. Their folders may lie on a server that does not answer, which must not block the others.
HOST_FILE_THREAD_COUNT = 4
HOST_FILE_THREADS = ThreadPoolExecutor(HOST_FILE_THREAD_COUNT, "named")

_beginning = threading.Lock()
_begun = False


def begin_file_threads() -> None:
    """Begin the threads of this module, before there is work for them. Raises what `begin_all` raises."""
    global _begun  # noqa: PLW0603 - they are of the process, not of an application
    with _beginning:
        if not _begun:
            begin_all(FILE_THREADS, FILE_THREAD_COUNT)
            begin_all(HOST_FILE_THREADS, HOST_FILE_THREAD_COUNT)
            _begun = True


async def run_in_thread(
    work: Callable[[], T], executor: Executor = FILE_THREADS, cancelled: threading.Event | None = None
) -> T:
    """Return what `work` returns in a thread, or raise what it raises.

    When the caller is cancelled, work that has not begun never begins. Work that has begun is awaited, however often
    the caller is cancelled, since it may still use the request's folder; it can poll `cancelled`, which is set then.
    """
    result: T = await run_and_follow(work, executor, cancelled)
    return result


async def run_and_follow(begin: Callable[[], Any], executor: Executor, cancelled: threading.Event | None = None) -> Any:
    """Run `begin` like `run_in_thread`; where it returns a future, return the result of that instead.

    The event loop is woken once, at the end. A cancelled caller awaits `begin`, but not the future that it returned.
    Raises Cancelled where that future was cancelled.
    """
    result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    beginning = executor.submit(begin)
    beginning.add_done_callback(partial(_follow, result))
    try:
        return await result
    except asyncio.CancelledError:
        _retrieve_error(result)
        if cancelled is not None:
            cancelled.set()
        if not beginning.cancel():
            await _wait_until_done(beginning)
        raise


def _follow(result: asyncio.Future[Any], beginning: Future[Any]) -> None:
    """Copy the end of the beginning, or of the future that it returned; called in the thread where it ended."""
    if not beginning.cancelled() and beginning.exception() is None:
        returned = beginning.result()
        if isinstance(returned, Future):
            returned.add_done_callback(partial(_copy_from_thread, result))
            return
    _copy_from_thread(result, beginning)


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
