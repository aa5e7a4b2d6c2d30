from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import Request

from service.api.http.threads import FILE_THREADS, follow, run_in_thread, run_while_connected, time_limit
from service.core.errors import BadParameter, Cancelled, TimedOut
from service.serving.devices.queue.job import Job

pytestmark = pytest.mark.anyio


async def test_thread_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    events: list[str] = []
    begun, release, gone = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        release.wait(20)
        events.append(f"thread ended, told: {gone.is_set()}")
        raise BadParameter("seen by nobody")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: events.append(context["message"]))
    work = asyncio.ensure_future(run_in_thread(slow, cancelled=gone))
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(3):
        work.cancel()
        await asyncio.sleep(0.01)
    assert not work.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    events.append("given up")
    del work
    gc.collect()
    assert events == ["thread ended, told: True", "given up"]


async def test_thread_that_has_not_begun_never_will() -> None:
    ran: list[int] = []
    release = threading.Event()

    with ThreadPoolExecutor(1) as pool:
        first = asyncio.ensure_future(run_in_thread(release.wait, pool))
        second = asyncio.ensure_future(run_in_thread(lambda: ran.append(1), pool))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await first
    assert ran == []


async def test_what_a_thread_has_begun_is_followed_to_its_end() -> None:
    begun: Future[int] = Future()

    following = asyncio.ensure_future(follow(FILE_THREADS.submit(lambda: begun)))
    await asyncio.sleep(0.05)
    assert not following.done()
    threading.Thread(target=begun.set_result, args=(7,)).start()
    assert await following == 7
    assert await follow(FILE_THREADS.submit(lambda: 8)) == 8


async def test_what_was_begun_fails_like_any_work_and_says_if_it_was_cancelled() -> None:
    broken: Future[int] = Future()
    broken.set_exception(BadParameter("odd"))
    cancelled: Future[int] = Future()
    cancelled.cancel()

    with pytest.raises(BadParameter, match="odd"):
        await follow(FILE_THREADS.submit(lambda: broken))
    with pytest.raises(Cancelled):
        await follow(FILE_THREADS.submit(lambda: cancelled))


async def test_a_job_that_runs_is_cancelled_and_not_waited_for() -> None:
    job: Job[int] = Job("bands", lambda _job: 7)
    job.future.set_running_or_notify_cancel()
    complaints: list[str] = []

    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    following = asyncio.ensure_future(follow(FILE_THREADS.submit(lambda: job)))
    await asyncio.sleep(0.05)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert job.cancelled()
    job.future.set_result(7)
    await asyncio.sleep(0.01)
    assert complaints == []


async def test_a_step_that_another_one_began_is_waited_for() -> None:
    begun, release = threading.Event(), threading.Event()
    ended: list[str] = []

    def second() -> int:
        begun.set()
        release.wait(20)
        ended.append("second")
        return 7

    following = asyncio.ensure_future(follow(FILE_THREADS.submit(lambda: FILE_THREADS.submit(second))))
    await asyncio.to_thread(begun.wait, 20)
    following.cancel()
    await asyncio.sleep(0.01)
    assert not following.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert ended == ["second"]


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
