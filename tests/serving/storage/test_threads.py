from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager

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


@contextmanager
def pool_of(threads: int) -> Iterator[FairThreadPool]:
    pool = FairThreadPool(threads, "fair")
    try:
        yield pool
    finally:
        pool.shutdown()


class Calls:
    """Calls that wait at a gate each, by client."""

    def __init__(self, pool: FairThreadPool) -> None:
        self._pool = pool
        self.begun: list[str] = []
        self.gates: list[tuple[str, threading.Event]] = []

    def add(self, client: str) -> Future[str]:
        gate = threading.Event()
        self.gates.append((client, gate))

        def call() -> str:
            self.begun.append(client)
            gate.wait(20)
            return client

        return self._pool.submit(client, call)

    def open(self, client: str | None = None) -> None:
        """Open the first gate of this client, or all."""
        for number, (owner, gate) in enumerate(self.gates):
            if client in {None, owner}:
                gate.set()
                if client is not None:
                    del self.gates[number]
                    return


def test_results_and_errors_are_those_of_the_call() -> None:
    with pool_of(2) as pool:
        assert pool.of("a").submit(divmod, 7, 2).result(20) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            pool.of("a").submit(divmod, 7, 0).result(20)
        assert not pool.busy("a")


def test_the_last_thread_is_for_a_client_that_has_none() -> None:
    with pool_of(3) as pool:
        calls = Calls(pool)
        for _ in range(5):
            calls.add("greedy")
        until(lambda: calls.begun == ["greedy"] * 2)
        assert pool.busy("greedy")
        assert not pool.busy("modest")
        modest = calls.add("modest")
        until(lambda: calls.begun[2:] == ["modest"])
        assert pool.busy("modest")
        assert pool.busy("third")
        calls.open("modest")
        assert modest.result(20) == "modest"
        assert not pool.busy("third")
        calls.open()
    assert calls.begun.count("greedy") == 2


def test_clients_take_turns_however_much_one_has_asked_for() -> None:
    with pool_of(1) as pool:
        calls = Calls(pool)
        for client in "aaaabcb":
            calls.add(client)
        calls.open()
        until(lambda: len(calls.begun) == 7)
        assert "".join(calls.begun) == "aabcaba"


def test_cancelled_calls_never_begin() -> None:
    with pool_of(1) as pool:
        calls = Calls(pool)
        first, second, third = (calls.add("a") for _ in range(3))
        assert second.cancel()
        assert not first.cancel()
        calls.open()
        assert third.result(20) == "a"
        assert calls.begun == ["a", "a"]


def test_end_cancels_what_has_not_begun() -> None:
    pool = FairThreadPool(1, "fair")
    calls = Calls(pool)
    first, second = calls.add("a"), calls.add("b")
    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    with pytest.raises(CancelledError):
        second.result(20)
    calls.open()
    assert first.result(20) == "a"
    ending.join(20)
    assert not ending.is_alive()


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
