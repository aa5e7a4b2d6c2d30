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


def make_request(disconnected: asyncio.Event) -> Request:
    """Return a request whose client disconnects when `disconnected` is set."""

    async def receive() -> Any:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_result_and_error_of_the_work_are_passed_on() -> None:
    async def succeed() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> int:
        raise BadParameter("odd")

    request = make_request(asyncio.Event())
    assert await run_while_connected(request, succeed()) == 7
    with pytest.raises(BadParameter, match="odd"):
        await run_while_connected(request, fail())


async def test_disconnect_cancels_the_work_after_its_thread_has_ended() -> None:
    events: list[str] = []
    begun, release = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        release.wait(20)
        events.append("thread ended")

    async def disconnect(disconnected: asyncio.Event) -> None:
        await asyncio.to_thread(begun.wait, 20)
        disconnected.set()
        # If the thread were not awaited, this would be long enough for the work to be abandoned.
        await asyncio.sleep(0.2)
        release.set()

    disconnected = asyncio.Event()
    disconnecting = asyncio.ensure_future(disconnect(disconnected))
    with pytest.raises(Cancelled):
        await run_while_connected(make_request(disconnected), run_in_thread(slow))
    events.append("work cancelled")
    await disconnecting
    assert events == ["thread ended", "work cancelled"]


async def test_disconnect_at_the_end_of_the_work_does_not_affect_later_work() -> None:
    disconnected = asyncio.Event()

    async def work() -> int:
        disconnected.set()
        # Let the listener notice the disconnect, but not act on it yet.
        await asyncio.sleep(0)
        return 7

    async def finish() -> int:
        result = await run_while_connected(make_request(disconnected), work())
        await asyncio.sleep(0.01)
        return result

    for _ in range(3):
        disconnected.clear()
        task = asyncio.ensure_future(finish())
        assert await task == 7
        assert task.cancelling() == 0


async def test_cancelling_the_caller_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.ensure_future(run_while_connected(make_request(asyncio.Event()), endless()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_time_limit_cancels_slow_work() -> None:
    async with time_limit(10):
        await asyncio.sleep(0)
    with pytest.raises(TimedOut, match=r"0\.01 s"):
        async with time_limit(0.01):
            await asyncio.sleep(10)
