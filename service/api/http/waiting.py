"""Limits on the duration of a request: its time limit, and the disconnection of its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from starlette.requests import Request

from service.core.errors import Cancelled, TimedOut

T = TypeVar("T")


@asynccontextmanager
async def time_limit(seconds: float, explain: Callable[[], str | None] = lambda: None) -> AsyncIterator[None]:
    """Cancel the block after `seconds` and raise TimedOut. Its message includes the text from `explain`, if any."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        advice = explain() or "Send a smaller part of the volume."
        message = f"The request was not finished within {seconds:g} s. {advice}"
        raise TimedOut(message) from None


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. If the client disconnects, cancel `work` and raise Cancelled.

    The request body must have been received before. The function never returns before `work` has ended.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    listening = asyncio.ensure_future(_wait_for_disconnect(request))
    ended = cancelled = False

    def cancel(_listening: asyncio.Future[None]) -> None:
        # Called one iteration of the event loop after the client disconnected. The work may have ended since.
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
    raise Cancelled("The client disconnected.")


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
