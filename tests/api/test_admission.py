from __future__ import annotations

import asyncio
import errno
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from service.api.direct_route import Direct, DirectDispatch
from service.api.request_body import TimeLimit, WorkFolder, while_connected, with_fields
from service.api.threads import FILES, followed, in_thread
from service.core.errors import BadParameter, Cancelled, OutOfStorage, TimedOut
from service.serving.parameters import Query


def connected(gone: asyncio.Event) -> Request:
    """A request whose client hangs up when `gone` is set."""

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_result_and_error_of_the_work_pass_through() -> None:
    async def fine() -> int:
        await asyncio.sleep(0)
        return 7

    async def broken() -> int:
        raise BadParameter("odd")

    async def main() -> None:
        request = connected(asyncio.Event())
        assert await while_connected(request, fine()) == 7
        with pytest.raises(BadParameter, match="odd"):
            await while_connected(request, broken())

    asyncio.run(main())


def test_work_ends_when_the_client_hangs_up_and_its_thread_is_waited_for() -> None:
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

    async def main() -> None:
        gone = asyncio.Event()
        leaving = asyncio.ensure_future(leave(gone))
        with pytest.raises(Cancelled):
            await while_connected(connected(gone), in_thread(slow))
        events.append("given up")
        await leaving

    asyncio.run(main())
    assert events == ["thread ended", "given up"]


def test_client_that_hangs_up_as_the_work_ends_disturbs_nothing_that_follows() -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def work() -> int:
            gone.set()
            # Until the listener has heard of it, but not until it has acted.
            await asyncio.sleep(0)
            return 7

        async def follow() -> int:
            result = await while_connected(connected(gone), work())
            await asyncio.sleep(0.01)
            return result

        for _ in range(3):
            gone.clear()
            following = asyncio.ensure_future(follow())
            assert await following == 7
            assert following.cancelling() == 0

    asyncio.run(main())


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
        work = asyncio.ensure_future(in_thread(slow, gone=gone))
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


def test_cancelling_the_caller_cancels_the_work() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        task = asyncio.ensure_future(while_connected(connected(asyncio.Event()), endless()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


def test_thread_that_has_not_begun_never_will() -> None:
    ran: list[int] = []
    release = threading.Event()

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            first = asyncio.ensure_future(in_thread(release.wait, pool))
            second = asyncio.ensure_future(in_thread(lambda: ran.append(1), pool))
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
        following = asyncio.ensure_future(followed(lambda: begun, FILES))
        await asyncio.sleep(0.05)
        assert not following.done()
        threading.Thread(target=begun.set_result, args=(7,)).start()
        assert await following == 7
        assert await followed(lambda: 8, FILES) == 8

    asyncio.run(main())


def test_what_was_begun_fails_like_any_work_and_says_if_it_was_cancelled() -> None:
    broken: Future[int] = Future()
    broken.set_exception(BadParameter("odd"))
    cancelled: Future[int] = Future()
    cancelled.cancel()

    async def main() -> None:
        with pytest.raises(BadParameter, match="odd"):
            await followed(lambda: broken, FILES)
        with pytest.raises(Cancelled):
            await followed(lambda: cancelled, FILES)

    asyncio.run(main())


def test_what_was_begun_is_not_waited_for_by_a_cancelled_caller() -> None:
    begun: Future[int] = Future()
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        following = asyncio.ensure_future(followed(lambda: begun, FILES))
        await asyncio.sleep(0.05)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        begun.set_result(7)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert complaints == []


def test_time_limit_cancels_what_takes_too_long() -> None:
    async def main() -> None:
        async with TimeLimit(10):
            await asyncio.sleep(0)
        with pytest.raises(TimedOut, match=r"0\.01 s"):
            async with TimeLimit(0.01):
                await asyncio.sleep(10)

    asyncio.run(main())


class Folders:
    """Of a runtime the one method that a work folder needs."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def new_folder(self) -> Any:
        return self.root / "request"


def test_work_folder_goes_in_the_end_whatever_happens(tmp_path: Any) -> None:
    async def use(error: Exception) -> None:
        async with WorkFolder(Folders(tmp_path)) as folder:
            folder.mkdir()
            (folder / "upload.tif").touch()
            raise error

    with pytest.raises(Cancelled):
        asyncio.run(use(Cancelled("gone")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutOfStorage):
        asyncio.run(use(OSError(errno.ENOSPC, "full")))
    assert list(tmp_path.iterdir()) == []


def test_fields_join_the_query() -> None:
    query = Query.model_validate({"overlap": "0.5"})
    assert with_fields(query, {}) is query
    both = with_fields(query, {"channel": "1", "time": ""})
    assert (both.overlap, both.selection.channel, both.time) == (0.5, 1, None)
    with pytest.raises(BadParameter, match="overlap"):
        with_fields(query, {"overlap": "0.5"})
    with pytest.raises(BadParameter, match="sw_batch_size"):
        with_fields(query, {"sw_batch_size": "many"})


def test_only_direct_endpoints_are_asked_at_once() -> None:
    async def here(_request: Request) -> Response:
        return PlainTextResponse("here")

    async def framework(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("framework")(scope, receive, send)

    direct, other = Direct("/direct", here, methods=["POST"]), APIRoute("/other", here, methods=["POST"])
    client = TestClient(DirectDispatch(framework, [direct, other]))
    assert client.post("/direct").text == "here"
    assert {client.get("/direct").text, client.post("/direct/").text, client.post("/other").text} == {"framework"}
