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
    """Cancel the block after `seconds`, and raise TimedOut.

    The message contains the explanation that `explain_timeout` returns or, if it returns None, general advice.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        explanation = explain_timeout() or "Send a smaller part of the volume."
        message = f"The request was not completed within {seconds:g} s. {explanation}"
        raise TimedOut(message) from None


async def run_while_connected(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await `coroutine`, and return its result. If the client disconnects, cancel `coroutine` and raise Cancelled.

    Call this function after the request body has been received. It never returns before the coroutine has ended.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    has_ended = is_cancelled = False

    def cancel_work(_disconnect_task: asyncio.Future[None]) -> None:
        # The event loop calls this function one iteration after the disconnect. By then, the coroutine may have ended.
        nonlocal is_cancelled
        if not has_ended:
            is_cancelled = task.cancel()

    disconnect_task.add_done_callback(cancel_work)
    try:
        return await coroutine
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
