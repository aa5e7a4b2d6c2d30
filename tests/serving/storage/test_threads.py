from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from fakes import until

from service.core.errors import BadParameter, Cancelled
from service.serving.storage.threads import FairThreadPool, run_in_thread, wait_for

# Uses a pool once while the process may begin no more threads, and once later.
SHORT_OF_MEMORY = """
import resource, threading
from pathlib import Path
from service.serving.storage.threads import FairThreadPool

pool = FairThreadPool(1, "fair")
pages = int(Path("/proc/self/statm").read_text().split()[0])
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, hard))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("short")
print(pool.submit("a", lambda: "first").result(20))
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(pool.submit("b", lambda: "second").result(20))
"""


class Calls:
    """Calls in a pool that wait at a gate each, by client."""

    def __init__(self, pool: FairThreadPool) -> None:
        self._pool = pool
        self.begun: list[str] = []
        self._gates: dict[Future[str], threading.Event] = {}

    def add(self, client: str) -> Future[str]:
        gate = threading.Event()

        def call() -> str:
            self.begun.append(client)
            gate.wait(20)
            return client

        future = self._pool.submit(client, call)
        self._gates[future] = gate
        return future

    def open(self, *calls: Future[str]) -> None:
        """Open the gates of these calls, or all."""
        for call in calls or self._gates:
            self._gates[call].set()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[FairThreadPool]:
    """A pool of one thread, or of as many as the parameter says."""
    made = FairThreadPool(getattr(request, "param", 1), "fair")
    yield made
    made.shutdown()


@pytest.fixture
def calls(pool: FairThreadPool) -> Iterator[Calls]:
    made = Calls(pool)
    yield made
    made.open()


def test_results_and_errors_are_those_of_the_call(pool: FairThreadPool) -> None:
    assert pool.of("a").submit(divmod, 7, 2).result(20) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.of("a").submit(divmod, 7, 0).result(20)
    assert not pool.busy("a")


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_the_last_thread_is_for_a_client_that_has_none(pool: FairThreadPool, calls: Calls) -> None:
    for _ in range(5):
        calls.add("greedy")
    until(lambda: calls.begun == ["greedy"] * 2)
    assert (pool.busy("greedy"), pool.busy("modest")) == (True, False)
    modest = calls.add("modest")
    until(lambda: calls.begun[2:] == ["modest"])
    assert (pool.busy("modest"), pool.busy("third")) == (True, True)
    calls.open(modest)
    assert modest.result(20) == "modest"
    assert not pool.busy("third")
    assert calls.begun.count("greedy") == 2


def test_clients_take_turns_however_much_one_has_asked_for(calls: Calls) -> None:
    for client in "aaaabcb":
        calls.add(client)
    calls.open()
    until(lambda: len(calls.begun) == 7)
    assert "".join(calls.begun) == "aabcaba"


def test_calls_that_are_cancelled_never_begin_nor_do_those_that_wait_at_the_end(
    pool: FairThreadPool, calls: Calls
) -> None:
    first, second, third, last = (calls.add("a") for _ in range(4))
    assert second.cancel()
    assert not first.cancel()
    calls.open(first)
    until(lambda: calls.begun == ["a", "a"])
    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    with pytest.raises(CancelledError):
        last.result(20)
    calls.open()
    assert (first.result(20), third.result(20)) == ("a", "a")
    ending.join(20)
    assert (ending.is_alive(), calls.begun) == (False, ["a", "a"])


def test_pool_works_where_memory_does_not_allow_for_more_threads() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.split() == ["short", "first", "second"], ended.stderr


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


def test_a_future_that_was_left_behind_complains_of_nothing() -> None:
    left: Future[int] = Future()
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        waiting = asyncio.ensure_future(wait_for(left))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        left.set_exception(BadParameter("seen by nobody"))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    gc.collect()
    assert complaints == []


def test_a_cancelled_future_is_an_error_of_its_own() -> None:
    """The task that waits for it was not cancelled."""
    cancelled: Future[int] = Future()
    cancelled.cancel()
    with pytest.raises(Cancelled):
        asyncio.run(wait_for(cancelled))
