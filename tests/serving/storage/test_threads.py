from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from fakes import wait_until

from service.core.errors import BadParameter, Cancelled
from service.serving.storage.threads import FairThreadPool, run_in_thread, wait_for

# Uses a pool once while the process cannot start more threads, and once after the limit is lifted.
MEMORY_LIMIT_SCRIPT = """
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
    """Calls of clients in a pool. Each call waits at a gate."""

    def __init__(self, pool: FairThreadPool) -> None:
        self._pool = pool
        self.started: list[str] = []
        self._gates: dict[Future[str], threading.Event] = {}

    def add(self, client: str) -> Future[str]:
        gate = threading.Event()

        def call() -> str:
            self.started.append(client)
            gate.wait(20)
            return client

        future = self._pool.submit(client, call)
        self._gates[future] = gate
        return future

    def open(self, *calls: Future[str]) -> None:
        """Open the gates of the given calls, or of all calls."""
        for call in calls or self._gates:
            self._gates[call].set()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[FairThreadPool]:
    """A pool with one thread, or with as many threads as the fixture's parameter."""
    fair_pool = FairThreadPool(getattr(request, "param", 1), "fair")
    yield fair_pool
    fair_pool.shutdown()


@pytest.fixture
def calls(pool: FairThreadPool) -> Iterator[Calls]:
    gated_calls = Calls(pool)
    yield gated_calls
    gated_calls.open()


def test_executor_returns_results_and_raises_errors(pool: FairThreadPool) -> None:
    assert pool.for_client("a").submit(divmod, 7, 2).result(20) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.for_client("a").submit(divmod, 7, 0).result(20)
    assert not pool.is_busy("a")


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_last_idle_thread_is_reserved_for_other_clients(pool: FairThreadPool, calls: Calls) -> None:
    for _ in range(5):
        calls.add("greedy")
    wait_until(lambda: calls.started == ["greedy"] * 2)
    assert (pool.is_busy("greedy"), pool.is_busy("modest")) == (True, False)
    modest = calls.add("modest")
    wait_until(lambda: calls.started[2:] == ["modest"])
    assert (pool.is_busy("modest"), pool.is_busy("third")) == (True, True)
    calls.open(modest)
    assert modest.result(20) == "modest"
    assert not pool.is_busy("third")
    assert calls.started.count("greedy") == 2


def test_clients_take_turns(calls: Calls) -> None:
    for client in "aaaabcb":
        calls.add(client)
    calls.open()
    wait_until(lambda: len(calls.started) == 7)
    assert "".join(calls.started) == "aabcaba"


def test_cancelled_calls_and_calls_waiting_at_shutdown_never_begin(pool: FairThreadPool, calls: Calls) -> None:
    first, second, third, last = (calls.add("a") for _ in range(4))
    assert second.cancel()
    assert not first.cancel()
    calls.open(first)
    wait_until(lambda: calls.started == ["a", "a"])
    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    with pytest.raises(CancelledError):
        last.result(20)
    calls.open()
    assert (first.result(20), third.result(20)) == ("a", "a")
    ending.join(20)
    assert (ending.is_alive(), calls.started) == (False, ["a", "a"])


def test_pool_works_if_no_more_threads_can_be_started() -> None:
    process = subprocess.run(
        [sys.executable, "-c", MEMORY_LIMIT_SCRIPT], check=False, capture_output=True, text=True, timeout=60
    )
    assert process.stdout.split() == ["short", "first", "second"], process.stderr


def test_running_work_is_awaited_even_if_the_caller_is_cancelled_repeatedly() -> None:
    events: list[str] = []
    started, release, cancelled = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        release.wait(20)
        events.append(f"thread ended, cancelled: {cancelled.is_set()}")
        raise BadParameter("never retrieved")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: events.append(context["message"]))
        work = asyncio.ensure_future(run_in_thread(slow, cancelled=cancelled))
        await asyncio.to_thread(started.wait, 20)
        for _ in range(3):
            work.cancel()
            await asyncio.sleep(0.01)
        assert not work.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        events.append("caller cancelled")
        del work
        gc.collect()

    asyncio.run(main())
    assert events == ["thread ended, cancelled: True", "caller cancelled"]


def test_waiting_work_of_a_cancelled_caller_never_begins() -> None:
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


def test_error_of_an_abandoned_future_is_not_logged() -> None:
    abandoned: Future[int] = Future()
    logged_errors: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged_errors.append(context["message"]))
        waiting = asyncio.ensure_future(wait_for(abandoned))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        abandoned.set_exception(BadParameter("never retrieved"))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    gc.collect()
    assert logged_errors == []


def test_cancelled_future_raises_cancelled() -> None:
    """The error differs from asyncio.CancelledError, because the waiting task itself was not cancelled."""
    cancelled: Future[int] = Future()
    cancelled.cancel()
    with pytest.raises(Cancelled):
        asyncio.run(wait_for(cancelled))
