"""Many clients at once, some of them rude: python benchmarks/load.py [--seconds 1800] [--clients 16] [--models FOLDER].

Clients post stacks small and large, wait or come back for their answers, cancel, hang up while they send and while they
wait, and post what is no stack. Every label volume must be the one that the model gives for this stack alone in this
process, voxel by voxel; nothing may be answered with 500; in the end no file may be left. Meanwhile another process
asks /health/live. Memory is the resident set of the server and its child processes, sampled every second, and so are
their threads and open files; as what runs at the moment makes them rise and fall, the median of every minute (a quarter
of the time where that is shorter) is told. Memory grows from the minute after the first to the last; what it still
gained per minute in the second half of the time tells a leak from a process that has found its size. Idle is before the
first request and after the last, when all that belongs to requests should be gone.
Raises AssertionError where something is wrong. Without --models a tiny model with random weights is made.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import tifffile
from common import TIFF, wait_for
from processes import Sampler, descriptors, resident, threads
from server import EAGER, Server, Stack, make_stacks, measure

PROBE = Path(__file__).with_name("probe.py")
LONGEST_SECONDS = 120


class User:
    """One client with good and bad habits; `counts` has the number of events by name."""

    def __init__(self, address: str, stacks: list[Stack], seed: int) -> None:
        self._stacks, self._rng = stacks, random.Random(seed)
        self._http = httpx2.Client(base_url=address, timeout=LONGEST_SECONDS)
        self.counts: Counter[str] = Counter()
        self._habits = [
            (self.wait_for_labels, 6),
            (self.come_back_for_labels, 5),
            (self.cancel, 2),
            (self.hang_up, 2),
            (self.post_nonsense, 3),
            (self.inspect, 1),
        ]

    def run(self, end: float) -> Counter[str]:
        """Do everything once, however long that takes, and then more until the end."""
        habits, weights = zip(*self._habits, strict=True)
        with self._http:
            for habit in self._rng.sample(habits, len(habits)):
                habit()
            while time.monotonic() < end:
                self._rng.choices(habits, weights)[0]()
        return self.counts

    def wait_for_labels(self) -> None:
        stack = self._stack()
        answer = self._post("/segment", stack.content)
        if answer is not None:
            self._compare(answer, stack, "labels waited for")

    def come_back_for_labels(self) -> None:
        stack = self._stack()
        job = self._submit(stack)
        if job is None:
            return
        while (state := self._get(job)["state"]) in {"waiting", "running"}:
            time.sleep(0.1)
        assert state == "done", self._get(job)
        self._compare(self._http.get(f"{job}/result"), stack, "labels fetched later")
        assert self._http.delete(job).status_code == 204

    def cancel(self) -> None:
        job = self._submit(self._stack())
        if job is None:
            return
        time.sleep(self._rng.uniform(0, 0.5))
        assert self._http.delete(job).status_code == 204
        answer = self._http.get(job)
        # It may have been done, and then was forgotten; what was cancelled is forgotten by asking once more.
        if answer.status_code == 200:
            assert answer.json()["state"] == "cancelled"
            assert self._http.delete(job).status_code == 204
        self.counts["jobs cancelled"] += 1

    def hang_up(self) -> None:
        stack = self._stack()
        sent = len(stack.content) if self._rng.random() < 0.7 else self._rng.randrange(len(stack.content))
        url = self._http.base_url
        head = f"POST /segment HTTP/1.1\r\nHost: x\r\nContent-Length: {len(stack.content)}\r\n\r\n"
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(head.encode() + stack.content[:sent])
            time.sleep(self._rng.uniform(0, 0.5))
        self.counts["hung up"] += 1

    def post_nonsense(self) -> None:
        stack = self._stack().content
        cut = stack[: self._rng.randrange(8, len(stack) // 2)]
        body, query = self._rng.choice(
            [(b"nonsense", ""), (b"", ""), (cut, ""), (stack, "?overlap=7"), (stack, "?model=x")]
        )
        answer = self._http.post(f"{self._rng.choice(['/segment', '/jobs'])}{query}", content=body, headers=TIFF)
        assert 400 <= answer.status_code < 500 or answer.status_code == 503, answer.text
        assert answer.json()["type"].startswith("urn:stackseg:problem:")
        self.counts["nonsense refused"] += 1

    def inspect(self) -> None:
        answer = self._post("/inspect", self._stack().content)
        if answer is not None:
            assert answer.json()["problem"] is None
            self.counts["inspected"] += 1

    def _stack(self) -> Stack:
        # The last one is the large one.
        return self._rng.choices(self._stacks, [10] * (len(self._stacks) - 1) + [2])[0]

    def _submit(self, stack: Stack) -> str | None:
        answer = self._post("/jobs", stack.content, 202)
        return None if answer is None else str(answer.headers["location"])

    def _get(self, path: str) -> Any:
        answer = self._http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _post(self, path: str, content: bytes, status: int = 200) -> httpx2.Response | None:
        """The answer; None where the queue is full."""
        answer = self._http.post(path, content=content, headers=TIFF)
        if answer.status_code == 503:
            assert answer.json()["type"] == "urn:stackseg:problem:queue-full", answer.text
            self.counts["told to come back"] += 1
            time.sleep(min(float(answer.headers["retry-after"]), 0.5))
            return None
        assert answer.status_code == status, answer.text
        return answer

    def _compare(self, answer: httpx2.Response, stack: Stack, name: str) -> None:
        assert answer.status_code == 200, answer.text
        assert np.array_equal(tifffile.imread(io.BytesIO(answer.content)), stack.expected), "wrong labels"
        self.counts[name] += 1


def run(seconds: float, clients: int, models: Path, folder: Path) -> dict[str, Any]:
    """Let clients at a server for so long; gives the figures. Raises AssertionError where something is wrong."""
    server = Server(models, folder, waiting=max(clients // 2, 1))
    stacks = make_stacks(models, EAGER)
    with server.running() as http:
        address = str(http.base_url)
        before = Usage.by(server.process.pid)
        command = [sys.executable, PROBE, http.base_url.host, str(http.base_url.port), str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
            end = time.monotonic() + seconds
            with (
                Sampler(lambda: Usage.by(server.process.pid), min(seconds / 60, 1.0)) as usage,
                ThreadPoolExecutor(clients) as pool,
            ):
                users = [pool.submit(User(address, stacks, seed).run, end) for seed in range(clients)]
            told = sum((user.result() for user in users), Counter[str]())
            assert probe.stdout is not None
            health = json.loads(probe.stdout.read())
            assert wait_for(lambda: not http.get("/health").json()["waiting"], 60), "the queue does not empty"
            # The last request's files are gone some time after it.
            time.sleep(2)
            metrics = http.get("/metrics").text
            assert 'status="500"' not in metrics, metrics
            assert http.get("/jobs?limit=1000").json()["jobs"] == []
            # A busy server hears late of who has hung up.
            wait_for(lambda: Usage.by(server.process.pid).descriptors <= before.descriptors)
            after = Usage.by(server.process.pid)

        def left() -> list[Path]:
            return [*server.scratch.glob("*/requests/*"), *server.jobs.glob("*/*")]

        assert wait_for(lambda: not left()), f"files are left over: {left()}"
    return {
        "seconds": seconds,
        "clients": clients,
        "happened": dict(sorted(told.items())),
        "health_live_milliseconds": health,
        "idle": {"before": before._asdict(), "after": after._asdict()},
        **summarise(medians_of(usage.samples, stretch := min(seconds / 4, 60.0)), stretch),
    }


def summarise(medians: list[Usage], seconds: float) -> dict[str, Any]:
    """Return the usage of every stretch of so many seconds, and how memory grew over them."""
    resident = [taken.bytes for taken in medians]
    half = resident[len(resident) // 2 :]
    slope = statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else 0.0
    return {
        "memory_bytes": resident,
        "threads": [taken.threads for taken in medians],
        "descriptors": [taken.descriptors for taken in medians],
        "memory_growth": round(resident[-1] / resident[1] - 1, 3),
        "memory_growth_bytes_per_minute_in_the_second_half": round(slope * 60 / seconds),
    }


class Usage(NamedTuple):
    """Usage of a process and all below it: resident bytes, threads, open files."""

    bytes: int
    threads: int
    descriptors: int

    @classmethod
    def by(cls, pid: int) -> Usage:
        return cls(resident(pid), threads(pid), descriptors(pid))


def medians_of(samples: list[tuple[float, Usage]], seconds: float) -> list[Usage]:
    """Return the median of every stretch of so many seconds, but for a shorter one at the end."""
    stretches: dict[int, list[Usage]] = {}
    for moment, taken in samples:
        stretches.setdefault(int(moment / seconds), []).append(taken)
    whole = int(samples[-1][0] / seconds + 0.1)
    chosen = [stretches[number] for number in sorted(stretches) if number < whole]
    return [Usage(*(round(statistics.median(kind)) for kind in zip(*taken, strict=True))) for taken in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--models", type=Path, help="a repository with one semantic model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    measure(options, lambda models, folder: run(options.seconds, options.clients, models, folder))


if __name__ == "__main__":
    main()
