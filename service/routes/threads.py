"""Blocking work off the event loop, such that nothing it uses is taken away before it has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

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
    future = executor.submit(work)
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if gone is not None:
            gone.set()
        future.cancel()
        # A client that hangs up cancels, and so does the time limit that ends meanwhile.
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([waiting])
        if not waiting.cancelled():
            # Looked at, since asyncio complains of errors that nobody has seen.
            waiting.exception()
        raise
