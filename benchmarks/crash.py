"""Kill the service at random moments, with jobs in every state: nothing may be lost, and nothing be half-written.

python benchmarks/crash.py [--kills 50] [--models FOLDER] [--engine eager] [--seed 0] [--json FILE]

A client posts stacks small and large, slow uploads among them, cancels some jobs, and fetches results, until SIGKILL
ends the server: during its start, or up to three seconds after it is ready. After every kill the database is checked
and the next server started in the same folder. Each job that was answered with 202 must be there and end as it should;
each result must be the labels that the model gives for this stack in this process, voxel by voxel. Raises
AssertionError where that does not hold. Without --models a tiny model with random weights is made: it starts quickly.
With `--engine auto` the engine is chosen before the first kill, and all starts find the plan.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import tifffile
import torch
import yaml
from common import ROOT, make_model, make_tiff, wait_for, write_figures
from numpy.typing import NDArray

from service.core.config import Settings
from service.core.volume import Options, Volume
from service.inference.segmenter import Segmenter
from service.models.repository import read_repository

START_SECONDS = 120
LARGE, SMALL = (64, 192, 192), (16, 48, 48)
EAGER = {"kind": "eager"}
STATES = ("waiting", "running", "done", "cancelled")


class Stack:
    """A TIFF to post, and the classes that come back if nothing goes wrong."""

    def __init__(self, shape: tuple[int, int, int], seed: int, segmenter: Segmenter) -> None:
        self.content, pixels = make_tiff(shape, seed)
        self.expected: NDArray[Any] = segmenter.segment(Volume.from_array(pixels[None]), Options()).segmentation.pixels

    def slowly(self, seconds: float) -> Iterator[bytes]:
        """The content in 20 pieces, so that a kill may well come in between."""
        step = -(-len(self.content) // 20)
        for start in range(0, len(self.content), step):
            yield self.content[start : start + step]
            time.sleep(seconds / 20)


class Server:
    """`python -m service serve` on the same folder, again and again.

    `waiting` may wait in its queue; `sections` are added to its configuration.
    """

    def __init__(self, models: Path, folder: Path, waiting: int = 64, **sections: dict[str, Any]) -> None:
        self.jobs, self.scratch = folder / "jobs", folder / "scratch"
        self.scratch.mkdir(parents=True)
        self._config, self._log = folder / "config.yaml", folder / "log"
        content = {
            "models": {"folder": str(models)},
            "engine": EAGER,
            "device": {"name": "cpu", "threads": 1},
            "limits": {"waiting": waiting, "cache_bytes": 0},
            "jobs": {"folder": str(self.jobs), "attempts": 1000},
            "server": {"scratch_folder": str(self.scratch), "port": 0},
        }
        for name, keys in sections.items():
            content[name] = content.get(name, {}) | keys
        self._config.write_text(yaml.safe_dump(content), encoding="utf-8")

    def start(self) -> None:
        command = [sys.executable, "-m", "service", "serve", "--config", str(self._config)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def wait(self) -> None:
        """Wait until the killed process is gone; its children end as soon as they notice."""
        assert self.process.wait(60) == -9, f"the server ended by itself: {self._log.read_text()[-3000:]}"
        assert self.process.stdout is not None
        self.process.stdout.close()

    def client(self) -> httpx2.Client | None:
        """A client once the service is ready; None if it was killed before that."""
        assert self.process.stdout is not None
        address = self.process.stdout.readline().split()[-1:]
        if not address:
            return None
        client = httpx2.Client(base_url=address[0], timeout=30)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                if client.get("/health/ready").status_code == 200:
                    return client
            except httpx2.TransportError:
                client.close()
                return None
            time.sleep(0.05)
        raise AssertionError(f"not ready within {START_SECONDS} s: {self._log.read_text()[-3000:]}")

    @contextmanager
    def running(self) -> Iterator[httpx2.Client]:
        """A client of the service, which is ready, and killed in the end whatever happens."""
        self.start()
        try:
            client = self.client()
            assert client is not None, "the server ended before it was ready"
            with closing(client):
                yield client
        finally:
            self.process.kill()
            self.wait()

    def states(self) -> Counter[str]:
        """Check the database, and count the jobs on disk by state."""
        if not (self.jobs / "jobs.sqlite3").exists():
            return Counter()
        database = sqlite3.connect(self.jobs / "jobs.sqlite3")
        try:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            if not database.execute("SELECT name FROM sqlite_master WHERE name = 'jobs'").fetchall():
                return Counter()
            return Counter(dict(database.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state")))
        finally:
            database.close()


class Client:
    """User who posts, cancels and fetches jobs, and knows what to expect."""

    def __init__(self, stacks: list[Stack], rng: random.Random) -> None:
        self._stacks, self._rng = stacks, rng
        self.jobs: dict[str, Stack] = {}
        self.done: set[str] = set()
        self.cancelled: set[str] = set()
        self.unsure: set[str] = set()
        self.compared = 0

    def act(self, http: httpx2.Client) -> None:
        """Do anything that a user might do next."""
        pending = [job for job in self.jobs if job not in self.done | self.cancelled | self.unsure]
        dice = self._rng.random()
        if dice < 0.3 and len(pending) < 12:
            self._submit(http)
        elif dice < 0.37 and pending:
            self._cancel(http, self._rng.choice(pending))
        elif pending:
            self.check_job(http, self._rng.choice(pending))
        time.sleep(0.02)

    def check(self, http: httpx2.Client) -> None:
        """Check that every accepted job is there, in a state that it may be in."""
        for job in self.jobs:
            self.check_job(http, job, fetch=job not in self.done or self._rng.random() < 0.05)

    def check_job(self, http: httpx2.Client, job: str, *, fetch: bool = True) -> None:
        answer = http.get(f"/jobs/{job}")
        if answer.status_code == 404:
            assert job in self.unsure or job in self.cancelled, f"job {job} is lost"
            return
        state = answer.json()["state"]
        assert state in STATES, answer.text
        assert job not in self.done or state == "done", f"job {job} was done and now is {state}"
        assert job not in self.cancelled or state == "cancelled", f"job {job} was cancelled and now is {state}"
        assert state != "cancelled" or job in self.cancelled | self.unsure, f"nobody cancelled job {job}"
        if state == "done" and fetch:
            self._compare(http, job)
        if state == "done":
            self.done.add(job)

    def _submit(self, http: httpx2.Client) -> None:
        stack = self._rng.choice(self._stacks)
        body = stack.slowly(self._rng.uniform(0.1, 1)) if self._rng.random() < 0.3 else stack.content
        answer = http.post("/jobs", content=body, headers={"Content-Type": "image/tiff"})
        assert answer.status_code == 202, answer.text
        job = answer.json()["id"]
        assert job not in self.jobs, f"id {job} was given twice"
        self.jobs[job] = stack

    def _cancel(self, http: httpx2.Client, job: str) -> None:
        # Whether it is carried out is not known if the server dies before it answers.
        self.unsure.add(job)
        assert http.delete(f"/jobs/{job}").status_code == 204
        self.cancelled.add(job)

    def _compare(self, http: httpx2.Client, job: str) -> None:
        answer = http.get(f"/jobs/{job}/result")
        assert answer.status_code == 200, answer.text
        assert np.array_equal(tifffile.imread(io.BytesIO(answer.content)), self.jobs[job].expected), f"{job} is wrong"
        self.compared += 1


def run(kills: int, models: Path, folder: Path, seed: int = 0, engine: str = "eager") -> dict[str, Any]:
    """Kill so many times, then let everything finish; return figures. AssertionError where a promise is broken."""
    rng = random.Random(seed)
    chosen = {"kind": engine, "cache_folder": str(folder / "cache")}
    server, client = Server(models, folder, engine=chosen), Client(make_stacks(models, chosen), rng)
    starts: list[float] = []
    seen: Counter[str] = Counter()
    early = 0
    for turn in range(1, kills + 1):
        during_start = starts and rng.random() < 0.25
        began = time.monotonic()
        server.start()
        kill = server.process.kill
        timer = threading.Timer(rng.uniform(0.3, 1.0) * statistics.median(starts) if during_start else 600, kill)
        timer.start()
        http = server.client()
        if http is None:
            early += 1
        else:
            starts.append(time.monotonic() - began)
            timer.cancel()
            # The first time late enough that there is something to lose.
            timer = threading.Timer(rng.uniform(0.0 if len(starts) > 1 else 2.0, 3.0), kill)
            timer.start()
            with closing(http):
                until_killed(client, http)
        timer.join()
        server.wait()
        seen += server.states()
        print(f"killed {turn} times, {len(client.jobs)} jobs accepted", file=sys.stderr)
    return finish(server, client) | {
        "kills": kills,
        "kills_during_start": early,
        "jobs_at_kills": {state: seen[state] for state in STATES},
        "start_seconds_median": round(statistics.median(starts), 2),
        "start_seconds_most": round(max(starts), 2),
    }


def until_killed(client: Client, http: httpx2.Client) -> None:
    try:
        client.check(http)
        while True:
            client.act(http)
    except httpx2.TransportError:
        return


def finish(server: Server, client: Client) -> dict[str, Any]:
    """Let the last server finish all jobs, and check what lies on disk then."""
    server.start()
    http = server.client()
    assert http is not None
    with closing(http):
        assert wait_for(lambda: not server.states().keys() & {"waiting", "running"}, 300), (
            "the remaining jobs are not done"
        )
        client.check(http)
        known = {job["id"]: job["state"] for job in http.get("/jobs?limit=1000").json()["jobs"]}
    assert set(client.jobs) - client.unsure <= client.done
    with_result = {job for job, state in known.items() if state == "done"}
    expected = {(job,) for job in with_result} | {(job, "result") for job in with_result}

    def on_disk() -> set[tuple[str, ...]]:
        return {path.relative_to(server.jobs / "jobs").parts for path in (server.jobs / "jobs").rglob("*")}

    assert wait_for(lambda: on_disk() == expected), "files are left over"
    assert not list((server.jobs / "incoming").iterdir())
    assert len(list(server.scratch.iterdir())) == 1, "folders of dead servers are left over"
    server.process.kill()
    server.wait()
    return {
        "jobs_accepted": len(client.jobs),
        "jobs_done": len(client.done),
        "jobs_cancelled": len(client.unsure),
        "jobs_whose_answer_was_cut_off": len(known.keys() - client.jobs.keys()),
        "results_compared": client.compared,
    }


def make_stacks(models: Path, engine: dict[str, str]) -> list[Stack]:
    settings = Settings.model_validate({"engine": engine, "device": {"name": "cpu", "threads": 1}})
    (spec,) = read_repository(models).values()
    segmenter = Segmenter(spec, settings)
    segmenter.warm_up()
    return [Stack(shape, seed, segmenter) for seed, shape in enumerate((SMALL, SMALL, SMALL, LARGE))]


def measure(options: argparse.Namespace, run: Callable[[Path, Path], dict[str, Any]]) -> None:
    """Call `run(models, folder)` in a temporary folder, and print the figures that it returns."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    models = options.models or folder / "models"
    if options.models is None:
        make_model(models)
    figures = run(models, folder / "service")
    shutil.rmtree(folder)
    write_figures(figures | {"python": platform.python_version(), "torch": torch.__version__}, options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--models", type=Path, help="a repository with one semantic model")
    parser.add_argument("--engine", choices=["eager", "auto", "winograd"], default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    measure(options, lambda models, folder: run(options.kills, models, folder, options.seed, options.engine))


if __name__ == "__main__":
    main()
