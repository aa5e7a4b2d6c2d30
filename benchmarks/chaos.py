"""Random faults at a real server while clients work: nothing that was accepted is lost, and no label is wrong.

python benchmarks/chaos.py [--minutes 10] [--seed 0] [--faults NAME ...] [--hostile FOLDER] [--models FOLDER]

Eight well-behaved clients post stacks and wait or come back for their labels, inspect, and cancel. Three rude ones hang
up, send and read slowly, and post hostile files: those of `--hostile`, and good ones with random bytes changed.
Meanwhile one fault follows the other, in an order that `--seed` decides:

disk full        nothing more can be written where jobs and uploads lie, a tmpfs in a mount namespace of its own
reader killed    kill -9 of processes that read TIFFs, as the OOM killer does it
database locked  by another connection, for up to 25 s
clock jump       of the server's wall clock by up to two days: a small C library is preloaded
memory limit     RLIMIT_AS of the server, a little above what it uses
restart          kill -9 or SIGTERM, once or several times, also before the server is ready, then with or without TLS

The first two fifths of the time have all of them, the rest all but restarts, so that memory shows whether it grows. A
client retries what is answered with "come back later", and what a fault excuses (`faults.EXCUSES`) that happened at the
same time. At the end all jobs are awaited and deleted, and the server is stopped. Exits with status 1 where a promise
is broken, and says when, and during which faults.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx2
import torch
from clients import OVER, RudeUser, User
from common import ROOT, make_model, wait_for
from faults import FAULTS, KEYS, RUDE_KEY, STUCK_SECONDS, Journal, World
from processes import Sampler, resident

CLIENTS, RUDE_CLIENTS = 8, 3
DISK_BYTES = 256 * 2**20
PR_SET_CHILD_SUBREAPER = 36


def play(world: World, names: list[str], end: float) -> None:
    """Inject faults in rounds of random order until the end."""
    left: list[str] = []
    while time.monotonic() < end:
        # Before the first one, too: there should be jobs to lose.
        time.sleep(world.rng.uniform(0.5, 3))
        left = left or world.rng.sample(names, len(names))
        name = left.pop() if left else ""
        if name:
            with world.journal.fault(name):
                FAULTS[name](world)
            world.revive()


def run(options: argparse.Namespace, folder: Path) -> Journal:
    """Let clients and faults at a server in a folder for so long; return what happened."""
    world = World(options, folder)
    world.start()
    world.await_ready()
    journal = world.journal
    journal.began = began = time.monotonic()
    seeds = iter(range(1000 * options.seed, 1000 * (options.seed + 1)))
    users = [User(world, world.keys[KEYS[number % len(KEYS)]], next(seeds)) for number in range(CLIENTS)]
    users += [RudeUser(world, world.keys[RUDE_KEY], next(seeds)) for _ in range(RUDE_CLIENTS)]
    for user in users:
        user.start()
    steady = [name for name in options.faults if name != "restart"]
    play(world, options.faults, began + 60 * options.minutes * (0.4 if steady else 1))
    pid = world.server.process.pid
    with Sampler(lambda: resident(pid), 0.5) as usage:
        play(world, steady, began + 60 * options.minutes)
    journal.over.set()
    for user in users:
        user.join()
    if pid == world.server.process.pid:
        check_memory(journal, [size for _, size in usage.samples])
    finish(world)
    return journal


def check_memory(journal: Journal, samples: list[int]) -> None:
    """Compare the resident bytes in the second quarter of the time without restarts with those in the last."""
    if (quarter := len(samples) // 4) == 0:
        return
    early, late = (statistics.median(part) / 2**20 for part in (samples[quarter : 2 * quarter], samples[-quarter:]))
    journal.counts["MB resident early"], journal.counts["MB resident late"] = round(early), round(late)
    if late > 1.1 * early + 32:
        journal.blame("memory is flat", f"{early:.0f} MB became {late:.0f} MB")


def finish(world: World) -> None:
    """Wait for all jobs, delete them, stop the server, and check what is left."""
    journal, server = world.journal, world.server
    for name, key in world.keys.items():
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=server.address, verify=world.trust, headers=headers, timeout=30) as http:

            def states(http: httpx2.Client = http) -> dict[str, str]:
                return {job["id"]: job["state"] for job in http.get("/jobs?limit=1000").json()["jobs"]}

            if not wait_for(lambda states=states: set(states().values()) <= OVER, STUCK_SECONDS):
                journal.blame("no job is stuck", f"of {name}: {states()}")
            for job in states():
                http.delete(f"/jobs/{job}")
                http.delete(f"/jobs/{job}")
            if left := states():
                journal.blame("what is deleted is gone", f"of {name}: {left}")
            if name == KEYS[0] and (answer := http.get("/health/ready")).status_code != 200:
                journal.blame("the service is ready in the end", answer.text)

    def left() -> list[str]:
        places = [server.jobs.glob("jobs/*"), server.jobs.glob("incoming/*"), server.scratch.glob("*/requests/*")]
        return [str(path) for place in places for path in place]

    if not wait_for(lambda: not left()):
        journal.blame("no file is left", f"after all jobs were deleted: {left()}")
    world.stop(signal.SIGTERM)
    if left_over := [*map(str, server.scratch.iterdir()), *map(str, world.temporary.iterdir()), *left()]:
        journal.blame("no file is left", f"after the end: {left_over}")
    check_log(journal, server.log())


def check_log(journal: Journal, lines: list[str]) -> None:
    """Blame answers of 500, tracebacks, and lines that the service's log did not format."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            journal.blame("no traceback is logged", line)
            continue
        event = f"{record['time']} {record['message']}"
        if record.get("status") == 500:
            journal.blame("no answer is 500", event)
        if "exception" in record:
            journal.blame("no traceback is logged", f"{event}\n{record['exception'][-1500:]}")
        if record["level"] in {"warning", "error"}:
            journal.count(f"log: {re.sub('[0-9a-f]{32}', 'ID', record['message'])[:80]}")


PROMISES = (
    "no accepted job is lost",
    "no job is stuck",
    "every job ends as it should",
    "every label is that computed alone",
    "well-behaved requests are answered",
    "no answer is 500",
    "no traceback is logged",
    "the server ends only when told to",
    "the service is ready in the end",
    "the database is whole",
    "what is deleted is gone",
    "no file is left",
    "no process is orphaned",
    "memory is flat",
    "clients understand every answer",
)


def show(journal: Journal) -> None:
    """Print what happened, the promises, and each that is broken."""
    print("| event | count |\n|---|---|")
    for name, count in sorted(journal.counts.items()):
        print(f"| {name} | {count} |")
    broken = Counter(promise for promise, _ in journal.broken)
    print("\n| promise | broken |\n|---|---|")
    for promise in PROMISES:
        print(f"| {promise} | {broken[promise] or 'never'} |")
    for promise, text in journal.broken:
        print(f"\n{promise}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS), metavar="NAME")
    parser.add_argument("--hostile", type=Path, default=ROOT.parent / "shared/data/hostile")
    parser.add_argument("--models", type=Path, help="a repository with one semantic model; default: a tiny one")
    parser.add_argument("--log", type=Path, help="also write the server's log here")
    parser.add_argument("--engine", choices=["eager", "auto", "winograd"], default="eager")
    options = parser.parse_args()
    if "disk full" in options.faults and "CHAOS_DISK" not in os.environ:
        # A mount namespace of its own: nothing has to be unmounted, and who is not root may mount as well.
        mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.execvpe(
            "unshare", ["unshare", *mapped, "--mount", sys.executable, *sys.argv], os.environ | {"CHAOS_DISK": "1"}
        )
    torch.set_num_threads(1)
    # Orphans become children of this process, and are seen.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        options.models = options.models or make_model(folder / "models").parent
        if "disk full" in options.faults:
            (folder / "disk").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", folder / "disk"], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", folder / "disk"], check=True)
        journal = run(options, folder)
        if options.log is not None:
            shutil.copy(folder / "log", options.log)
    show(journal)
    return 1 if journal.broken else 0


if __name__ == "__main__":
    sys.exit(main())
