from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.requests import Request

from service.api.http.waiting import run_while_connected, time_limit
from service.core.errors import BadParameter, Cancelled, TimedOut
from service.serving.storage.threads import run_in_thread

pytestmark = pytest.mark.anyio


def connected(gone: asyncio.Event) -> Request:
    """A request whose client hangs up when `gone` is set."""

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_result_and_error_of_the_work_pass_through() -> None:
    async def fine() -> int:
        await asyncio.sleep(0)
        return 7

    async def broken() -> int:
        raise BadParameter("odd")

    request = connected(asyncio.Event())
    assert await run_while_connected(request, fine()) == 7
    with pytest.raises(BadParameter, match="odd"):
        await run_while_connected(request, broken())


async def test_work_ends_when_the_client_hangs_up_and_its_thread_is_waited_for() -> None:
    events: list[str] = []
    begun, release = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        release.wait(20)
        events.append("thread ended")

    async def leave(gone: asyncio.Event) -> None:
        await asyncio.to_thread(begun.wait, 20)
        gone.set()
        # Long enough to be given up meanwhile, if nobody waited for the thread.
        await asyncio.sleep(0.2)
        release.set()

    gone = asyncio.Event()
    leaving = asyncio.ensure_future(leave(gone))
    with pytest.raises(Cancelled):
        await run_while_connected(connected(gone), run_in_thread(slow))
    events.append("given up")
    await leaving
    assert events == ["thread ended", "given up"]


async def test_client_that_hangs_up_as_the_work_ends_disturbs_nothing_that_follows() -> None:
    gone = asyncio.Event()

    async def work() -> int:
        gone.set()
        # Until the listener has heard of it, but not until it has acted.
        await asyncio.sleep(0)
        return 7

    async def finish() -> int:
        result = await run_while_connected(connected(gone), work())
        await asyncio.sleep(0.01)
        return result

    for _ in range(3):
        gone.clear()
        following = asyncio.ensure_future(finish())
        assert await following == 7
        assert following.cancelling() == 0


async def test_cancelling_the_caller_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.ensure_future(run_while_connected(connected(asyncio.Event()), endless()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_time_limit_cancels_what_takes_too_long() -> None:
    async with time_limit(10):
        await asyncio.sleep(0)
    with pytest.raises(TimedOut, match=r"0\.01 s"):
        async with time_limit(0.01):
            await asyncio.sleep(10)
