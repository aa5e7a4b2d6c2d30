"""Load test with many concurrent clients, some of which misbehave.

python benchmarks/load.py [--seconds 1800] [--clients 16] [--models FOLDER]

Clients send small and large stacks, wait for labels or fetch them later, cancel jobs, disconnect during the upload or
while they wait, and send invalid requests. Every label volume must equal the labels that the model computes for the
stack in this process. No response may have status 500, and no file may be left behind. Meanwhile, another process
measures the latency of /health/live.

The resident memory, threads and open files of the server and its child processes are sampled every second. The result
has the median of each minute, or of each quarter of a run below four minutes, because current requests cause
fluctuations. `memory_growth` compares the last of these intervals with the second. The growth per minute in the second
half of the run distinguishes a leak from a process that has reached its final size. `idle` is the usage before the
first and after the last request, when all resources of requests should have been released.

Raises AssertionError if a check fails. Without --models, a tiny model with random weights is used.
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
from processes import Sampler, count_descriptors, count_threads, process_tree, resident_bytes
from server import EAGER_ENGINE, Server, Stack, make_stacks, measure

PROBE = Path(__file__).with_name("probe.py")
TIMEOUT_SECONDS = 120
# Readers of files are started when they are needed. Each is a pair of processes with 8 descriptors, and the server has
# 3 more for it.
READER_DESCRIPTORS = 11


class Client:
    """A client that sends valid and invalid requests in random order; `counts` has the number of each event."""

    def __init__(self, address: str, stacks: list[Stack], seed: int) -> None:
        self._stacks, self._rng = stacks, random.Random(seed)
        self._http = httpx2.Client(base_url=address, timeout=TIMEOUT_SECONDS)
        self.counts: Counter[str] = Counter()
        self._weighted_actions = [
            (self.wait_for_labels, 6),
            (self.fetch_labels_later, 5),
            (self.cancel, 2),
            (self.hang_up, 2),
            (self.send_invalid_request, 3),
            (self.inspect, 1),
        ]

    def run(self, end: float) -> Counter[str]:
        """Perform each action once, and then random actions until the time `end`; return the counts."""
        actions, weights = zip(*self._weighted_actions, strict=True)
        with self._http:
            for action in self._rng.sample(actions, len(actions)):
                action()
            while time.monotonic() < end:
                self._rng.choices(actions, weights)[0]()
        return self.counts

    def wait_for_labels(self) -> None:
        """Segment a stack with one request."""
        stack = self._choose_stack()
        response = self._post("/segment", stack.content)
        if response is not None:
            self._compare(response, stack, "labels waited for")

    def fetch_labels_later(self) -> None:
        """Segment a stack with a job."""
        stack = self._choose_stack()
        job = self._submit(stack)
        if job is None:
            return
        while (state := self._get(job)["state"]) in {"waiting", "running"}:
            time.sleep(0.1)
        assert state == "done", self._get(job)
        self._compare(self._http.get(f"{job}/result"), stack, "labels fetched later")
        assert self._http.delete(job).status_code == 204

    def cancel(self) -> None:
        job = self._submit(self._choose_stack())
        if job is None:
            return
        time.sleep(self._rng.uniform(0, 0.5))
        assert self._http.delete(job).status_code == 204
        response = self._http.get(job)
        # DELETE has removed the job if it was finished. Otherwise it was cancelled, and remains until a second DELETE.
        if response.status_code == 200:
            assert response.json()["state"] == "cancelled"
            assert self._http.delete(job).status_code == 204
        self.counts["jobs cancelled"] += 1

    def hang_up(self) -> None:
        """Disconnect during the upload or while the server computes."""
        stack = self._choose_stack()
        length = len(stack.content) if self._rng.random() < 0.7 else self._rng.randrange(len(stack.content))
        url = self._http.base_url
        head = f"POST /segment HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(stack.content)}\r\n\r\n"
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(head.encode() + stack.content[:length])
            time.sleep(self._rng.uniform(0, 0.5))
        self.counts["hung up"] += 1

    def send_invalid_request(self) -> None:
        """Send a file that is not a TIFF, an empty or truncated file, or an invalid parameter."""
        stack = self._choose_stack().content
        truncated = stack[: self._rng.randrange(8, len(stack) // 2)]
        body, query = self._rng.choice(
            [(b"nonsense", ""), (b"", ""), (truncated, ""), (stack, "?overlap=7"), (stack, "?model=x")]
        )
        response = self._http.post(f"{self._rng.choice(['/segment', '/jobs'])}{query}", content=body, headers=TIFF)
        assert 400 <= response.status_code < 500 or response.status_code == 503, response.text
        assert response.json()["type"].startswith("urn:stackseg:problem:")
        self.counts["nonsense refused"] += 1

    def inspect(self) -> None:
        response = self._post("/inspect", self._choose_stack().content)
        if response is not None:
            assert response.json()["problem"] is None
            self.counts["inspected"] += 1

    def _choose_stack(self) -> Stack:
        # The last one is the large one.
        return self._rng.choices(self._stacks, [10] * (len(self._stacks) - 1) + [2])[0]

    def _submit(self, stack: Stack) -> str | None:
        response = self._post("/jobs", stack.content, 202)
        return None if response is None else str(response.headers["location"])

    def _get(self, path: str) -> Any:
        response = self._http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def _post(self, path: str, content: bytes, status: int = 200) -> httpx2.Response | None:
        """Return the response, or None if the queue is full."""
        response = self._http.post(path, content=content, headers=TIFF)
        if response.status_code == 503:
            assert response.json()["type"] == "urn:stackseg:problem:queue-full", response.text
            self.counts["queue full"] += 1
            time.sleep(min(float(response.headers["retry-after"]), 0.5))
            return None
        assert response.status_code == status, response.text
        return response

    def _compare(self, response: httpx2.Response, stack: Stack, name: str) -> None:
        assert response.status_code == 200, response.text
        assert np.array_equal(tifffile.imread(io.BytesIO(response.content)), stack.expected), "The labels are wrong."
        self.counts[name] += 1


def run(seconds: float, clients: int, models: Path, folder: Path) -> dict[str, Any]:
    """Run the load test; return the results. Raises AssertionError if a check fails."""
    server = Server(models, folder, waiting=max(clients // 2, 1))
    stacks = make_stacks(models, EAGER_ENGINE)
    with server.run() as http:
        address = str(http.base_url)
        before = Usage.of_process(server.process.pid)
        idle = count_request_descriptors(server.process.pid)
        command = [sys.executable, PROBE, http.base_url.host, str(http.base_url.port), str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
            end = time.monotonic() + seconds
            with (
                Sampler(lambda: Usage.of_process(server.process.pid), min(seconds / 60, 1.0)) as usage,
                ThreadPoolExecutor(clients) as pool,
            ):
                futures = [pool.submit(Client(address, stacks, seed).run, end) for seed in range(clients)]
            counts = sum((future.result() for future in futures), Counter[str]())
            assert probe.stdout is not None
            health = json.loads(probe.stdout.read())
            assert wait_for(lambda: not http.get("/health").json()["waiting"], 60), "The queue is not empty after 60 s."
            # The files of the last request are deleted shortly after its response.
            time.sleep(2)
            metrics = http.get("/metrics").text
            assert 'status="500"' not in metrics, metrics
            assert http.get("/jobs?limit=1000").json()["jobs"] == []
            # A busy server notices disconnected clients late.
            assert wait_for(lambda: count_request_descriptors(server.process.pid) <= idle), "Files were left open."
            after = Usage.of_process(server.process.pid)

        def list_files() -> list[Path]:
            return [*server.scratch.glob("*/requests/*"), *server.jobs.glob("*/*")]

        assert wait_for(lambda: not list_files()), f"Files were left behind: {list_files()}"
    return {
        "seconds": seconds,
        "clients": clients,
        "happened": dict(sorted(counts.items())),
        "health_live_milliseconds": health,
        "idle": {"before": before._asdict(), "after": after._asdict()},
        **summarize(interval_medians(usage.samples, interval := min(seconds / 4, 60.0)), interval),
    }


def count_request_descriptors(pid: int) -> int:
    """Count the open files of a service, except those of its readers."""
    return count_descriptors(pid) - READER_DESCRIPTORS * (len(process_tree(pid)) // 2)


def summarize(medians: list[Usage], seconds: float) -> dict[str, Any]:
    """Return the median usage of each interval of `seconds`, and the growth of the memory."""
    resident = [usage.bytes for usage in medians]
    half = resident[len(resident) // 2 :]
    slope = statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else 0.0
    return {
        "memory_bytes": resident,
        "threads": [usage.threads for usage in medians],
        "descriptors": [usage.descriptors for usage in medians],
        "memory_growth": round(resident[-1] / resident[1] - 1, 3),
        "memory_growth_bytes_per_minute_in_the_second_half": round(slope * 60 / seconds),
    }


class Usage(NamedTuple):
    """Resource usage of a process and its descendants: resident bytes, threads, and open file descriptors."""

    bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of_process(cls, pid: int) -> Usage:
        """Measure the current usage."""
        return cls(resident_bytes(pid), count_threads(pid), count_descriptors(pid))


def interval_medians(samples: list[tuple[float, Usage]], seconds: float) -> list[Usage]:
    """Return the median of each complete interval of `seconds`."""
    intervals: dict[int, list[Usage]] = {}
    for moment, usage in samples:
        intervals.setdefault(int(moment / seconds), []).append(usage)
    complete = int(samples[-1][0] / seconds + 0.1)
    chosen = [intervals[number] for number in sorted(intervals) if number < complete]
    return [Usage(*(round(statistics.median(kind)) for kind in zip(*usages, strict=True))) for usages in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--models", type=Path, help="folder with one semantic segmentation model")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    measure(options, lambda models, folder: run(options.seconds, options.clients, models, folder))


if __name__ == "__main__":
    main()
