from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from service.api.http.threads import FILE_THREADS, run_and_follow, run_in_thread
from service.core.errors import BadParameter, Cancelled


def test_thread_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    events: list[str] = []
    begun, release, gone = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        release.wait(20)
        events.append(f"thread ended, told: {gone.is_set()}")
        raise BadParameter("seen by nobody")

    async def main() -> None:
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

    asyncio.run(main())
    assert events == ["thread ended, told: True", "given up"]


def test_thread_that_has_not_begun_never_will() -> None:
    ran: list[int] = []
    release = threading.Event()

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            first = asyncio.ensure_future(run_in_thread(release.wait, pool))
            second = asyncio.ensure_future(run_in_thread(lambda: ran.append(1), pool))
            await asyncio.sleep(0.05)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            release.set()
            await first

    asyncio.run(main())
    assert ran == []


def test_what_a_thread_has_begun_is_followed_to_its_end() -> None:
    begun: Future[int] = Future()

    async def main() -> None:
        following = asyncio.ensure_future(run_and_follow(lambda: begun, FILE_THREADS))
        await asyncio.sleep(0.05)
        assert not following.done()
        threading.Thread(target=begun.set_result, args=(7,)).start()
        assert await following == 7
        assert await run_and_follow(lambda: 8, FILE_THREADS) == 8

    asyncio.run(main())


def test_what_was_begun_fails_like_any_work_and_says_if_it_was_cancelled() -> None:
    broken: Future[int] = Future()
    broken.set_exception(BadParameter("odd"))
    cancelled: Future[int] = Future()
    cancelled.cancel()

    async def main() -> None:
        with pytest.raises(BadParameter, match="odd"):
            await run_and_follow(lambda: broken, FILE_THREADS)
        with pytest.raises(Cancelled):
            await run_and_follow(lambda: cancelled, FILE_THREADS)

    asyncio.run(main())


def test_what_was_begun_is_not_waited_for_by_a_cancelled_caller() -> None:
    begun: Future[int] = Future()
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        following = asyncio.ensure_future(run_and_follow(lambda: begun, FILE_THREADS))
        await asyncio.sleep(0.05)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        begun.set_result(7)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert complaints == []
