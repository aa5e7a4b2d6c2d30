"""Context managers and functions that end a request after a time limit or when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from starlette.requests import Request

from service.core.errors import Cancelled, TimedOut

T = TypeVar("T")


@asynccontextmanager
async def time_limit(seconds: float, explain_timeout: Callable[[], str | None] = lambda: None) -> AsyncIterator[None]:
    """Cancel the block after `seconds`, and raise TimedOut with the reason that `explain_timeout` returns, if any."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        advice = explain_timeout() or "Send a smaller part of the volume."
        message = f"The request was not completed within {seconds:g} s. {advice}"
        raise TimedOut(message) from None


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and return its result. If the client disconnects, cancel `work` and raise Cancelled.

    Call this function after the request body has been received. It never returns before `work` has ended.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    has_ended = is_cancelled = False

    def cancel_work(_disconnect_task: asyncio.Future[None]) -> None:
        # The event loop calls this function one iteration after the disconnect. The work may have ended in between.
        nonlocal is_cancelled
        if not has_ended:
            is_cancelled = task.cancel()

    disconnect_task.add_done_callback(cancel_work)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_cancelled or task.uncancel() > 0:
            raise
    finally:
        has_ended = True
        disconnect_task.cancel()
    raise Cancelled("The client disconnected.")


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
