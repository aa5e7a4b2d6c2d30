"""Blocking work off the event loop, such that nothing it uses is taken away before it has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from service.core.errors import Cancelled

T = TypeVar("T")

# For what touches the service's own disk: writing uploads and results, deleting folders.
FILES = ThreadPoolExecutor(8, "files")

# For files that requests name: their folders may lie on a server that does not answer, which must not stop the others.
NAMED_FILES = ThreadPoolExecutor(4, "named")


async def in_thread(work: Callable[[], T], executor: Executor = FILES, gone: threading.Event | None = None) -> T:
    """What `work` returns or raises.

    When the caller is cancelled, work that has not begun never will; work that has begun is waited for, however often
    the caller is cancelled, since it may still read or write the request's folder. It may look at `gone`, set then.
    """
    result: T = await followed(work, executor, gone)
    return result


async def followed(begin: Callable[[], Any], executor: Executor, gone: threading.Event | None = None) -> Any:
    """The same, and where `begin` returns a future, what comes of that, which raises Cancelled where it was cancelled.

    The loop is woken once, at the end of it all. When the caller is cancelled, what was begun is not waited for.
    """
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    beginning = executor.submit(begin)
    beginning.add_done_callback(partial(_follow, outcome))
    try:
        return await outcome
    except asyncio.CancelledError:
        _look_at(outcome)
        if gone is not None:
            gone.set()
        if not beginning.cancel():
            await _ended(beginning)
        raise


def _follow(outcome: asyncio.Future[Any], beginning: Future[Any]) -> None:
    """In the thread in which the beginning has ended."""
    if not beginning.cancelled() and beginning.exception() is None:
        begun = beginning.result()
        if isinstance(begun, Future):
            begun.add_done_callback(partial(_tell, outcome))
            return
    _tell(outcome, beginning)


def _tell(outcome: asyncio.Future[Any], over: Future[Any]) -> None:
    """In any thread: the loop learns what came of it, unless nobody waits any more."""
    if not outcome.done():
        outcome.get_loop().call_soon_threadsafe(_settle, outcome, over)


def _settle(outcome: asyncio.Future[Any], over: Future[Any]) -> None:
    if outcome.done():
        return
    if over.cancelled():
        outcome.set_exception(Cancelled("given up before it began"))
    elif (error := over.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(over.result())


async def _ended(work: Future[Any]) -> None:
    """Until it has, however often the caller is cancelled: a client hangs up, and a time limit ends meanwhile."""
    ended = asyncio.wrap_future(work)
    while not ended.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([ended])
    _look_at(ended)


def _look_at(future: asyncio.Future[Any]) -> None:
    """Asyncio complains of errors that nobody has seen."""
    if future.done() and not future.cancelled():
        future.exception()
