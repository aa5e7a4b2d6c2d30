"""Inject random faults into a real server under load, and check that no job is lost and no label is wrong.

python benchmarks/chaos.py [--minutes 10] [--seed 0] [--faults NAME ...] [--hostile FOLDER] [--models FOLDER]

Eight well-behaved clients segment stacks, submit and cancel jobs, fetch results, and inspect files. Three misbehaving
clients disconnect early, send and read slowly, and upload hostile files: the files of `--hostile`, and valid files with
random bytes changed. Meanwhile, faults are injected one at a time, in an order that depends on `--seed`:

disk full        the disk of jobs and uploads is full (a tmpfs in a separate mount namespace)
reader killed    processes that read TIFFs are killed with SIGKILL, as by the OOM killer
database locked  another connection locks the database of jobs for up to 25 s
clock jump       the server's wall clock jumps by up to two days (a preloaded C library)
memory limit     RLIMIT_AS of the server is set slightly above its current use
restart          the server is stopped with SIGKILL or SIGTERM, once or several times, sometimes before it is ready, and
                 restarted with or without TLS

During the first two fifths of the time, all faults are injected. After that, restarts are left out, so that memory
growth can be measured. Clients retry requests that are refused temporarily, and requests that fail because of a fault
(`faults.EXCUSED_PROBLEMS`). At the end, the script waits for all jobs, deletes them, and stops the server. Violated
invariants are printed with the time and the current faults; the exit status is then 1.
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
from clients import FINAL_STATES, Client, MisbehavingClient
from common import ROOT, make_model, wait_for
from faults import FAULTS, KEYS, MISBEHAVING_KEY, STUCK_SECONDS, Journal, World
from processes import Sampler, resident_bytes

CLIENTS = 8
MISBEHAVING_CLIENTS = 3
DISK_BYTES = 256 * 2**20
PR_SET_CHILD_SUBREAPER = 36


def inject_faults(world: World, names: list[str], end: float) -> None:
    """Inject each fault once per round, in random order, until the time `end`."""
    pending: list[str] = []
    while time.monotonic() < end:
        # Also wait before the first fault, so that the server has jobs.
        time.sleep(world.rng.uniform(0.5, 3))
        pending = pending or world.rng.sample(names, len(names))
        name = pending.pop() if pending else ""
        if name:
            with world.journal.record_fault(name):
                FAULTS[name](world)
            world.restart_if_exited()


def run(options: argparse.Namespace, folder: Path) -> Journal:
    """Run a server in `folder` with clients and faults; return the journal."""
    world = World(options, folder)
    world.start()
    world.await_ready()
    journal = world.journal
    journal.began = began = time.monotonic()
    seeds = iter(range(1000 * options.seed, 1000 * (options.seed + 1)))
    clients = [Client(world, world.keys[KEYS[number % len(KEYS)]], next(seeds)) for number in range(CLIENTS)]
    clients += [MisbehavingClient(world, world.keys[MISBEHAVING_KEY], next(seeds)) for _ in range(MISBEHAVING_CLIENTS)]
    for client in clients:
        client.start()
    steady = [name for name in options.faults if name != "restart"]
    inject_faults(world, options.faults, began + 60 * options.minutes * (0.4 if steady else 1))
    pid = world.server.process.pid
    with Sampler(lambda: resident_bytes(pid), 0.5) as usage:
        inject_faults(world, steady, began + 60 * options.minutes)
    journal.stop_requested.set()
    for client in clients:
        client.join()
    if pid == world.server.process.pid:
        check_memory(journal, [size for _, size in usage.samples])
    finish(world)
    return journal


def check_memory(journal: Journal, samples: list[int]) -> None:
    """Compare the resident memory in the second and the last quarter of the samples."""
    if (quarter := len(samples) // 4) == 0:
        return
    early, late = (statistics.median(part) / 2**20 for part in (samples[quarter : 2 * quarter], samples[-quarter:]))
    journal.counts["MB resident early"], journal.counts["MB resident late"] = round(early), round(late)
    if late > 1.1 * early + 32:
        journal.add_violation("memory does not grow", f"resident memory grew from {early:.0f} MB to {late:.0f} MB")


def finish(world: World) -> None:
    """Wait for all jobs, delete them, stop the server, and check that no files or processes remain."""
    journal, server = world.journal, world.server
    for name, key in world.keys.items():
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=server.address, verify=world.tls_context, headers=headers, timeout=30) as http:

            def states(http: httpx2.Client = http) -> dict[str, str]:
                return {job["id"]: job["state"] for job in http.get("/jobs?limit=1000").json()["jobs"]}

            if not wait_for(lambda states=states: set(states().values()) <= FINAL_STATES, STUCK_SECONDS):
                journal.add_violation("no job is stuck", f"jobs of {name}: {states()}")
            for job in states():
                http.delete(f"/jobs/{job}")
                http.delete(f"/jobs/{job}")
            if remaining := states():
                journal.add_violation("deleted jobs are gone", f"jobs of {name}: {remaining}")
            if name == KEYS[0] and (response := http.get("/health/ready")).status_code != 200:
                journal.add_violation("the service is ready at the end", response.text)

    def list_files() -> list[str]:
        folders = [server.jobs.glob("jobs/*"), server.jobs.glob("incoming/*"), server.scratch.glob("*/requests/*")]
        return [str(path) for folder in folders for path in folder]

    if not wait_for(lambda: not list_files()):
        journal.add_violation("no file is left behind", f"after all jobs were deleted: {list_files()}")
    world.stop(signal.SIGTERM)
    if leftovers := [*map(str, server.scratch.iterdir()), *map(str, world.temporary.iterdir()), *list_files()]:
        journal.add_violation("no file is left behind", f"after the server stopped: {leftovers}")
    check_log(journal, server.read_log())


def check_log(journal: Journal, lines: list[str]) -> None:
    """Record responses with status 500, tracebacks, and lines that are not JSON as violations."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            journal.add_violation("no traceback is logged", line)
            continue
        event = f"{record['time']} {record['message']}"
        if record.get("status") == 500:
            journal.add_violation("no response has status 500", event)
        if "exception" in record:
            journal.add_violation("no traceback is logged", f"{event}\n{record['exception'][-1500:]}")
        if record["level"] in {"warning", "error"}:
            journal.count(f"log: {re.sub('[0-9a-f]{32}', 'ID', record['message'])[:80]}")


INVARIANTS = (
    "no accepted job is lost",
    "no job is stuck",
    "every job ends in the expected state",
    "labels equal those computed alone",
    "valid requests succeed",
    "no response has status 500",
    "no traceback is logged",
    "the server exits only after a signal",
    "the service is ready at the end",
    "the database is intact",
    "deleted jobs are gone",
    "no file is left behind",
    "no process is orphaned",
    "memory does not grow",
    "clients understand every response",
)


def print_journal(journal: Journal) -> None:
    """Print the number of each event, the violations of each invariant, and the details of each violation."""
    print("| event | count |\n|---|---|")
    for name, count in sorted(journal.counts.items()):
        print(f"| {name} | {count} |")
    violations = Counter(invariant for invariant, _ in journal.violations)
    print("\n| invariant | violations |\n|---|---|")
    for invariant in INVARIANTS:
        print(f"| {invariant} | {violations[invariant] or 'none'} |")
    for invariant, text in journal.violations:
        print(f"\n{invariant}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS), metavar="NAME")
    parser.add_argument("--hostile", type=Path, default=ROOT.parent / "shared/data/hostile")
    parser.add_argument(
        "--models",
        type=Path,
        help="folder with one semantic segmentation model; default: a tiny one",
    )
    parser.add_argument("--log", type=Path, help="copy the server's log to this file")
    parser.add_argument("--engine", choices=["eager", "auto", "winograd"], default="eager")
    options = parser.parse_args()
    if "disk full" in options.faults and "CHAOS_DISK" not in os.environ:
        # In a separate mount namespace, the tmpfs disappears with the process, and users other than root can mount it.
        user_mapping = [] if os.geteuid() == 0 else ["--map-root-user"]
        os.execvpe(
            "unshare",
            ["unshare", *user_mapping, "--mount", sys.executable, *sys.argv],
            os.environ | {"CHAOS_DISK": "1"},
        )
    torch.set_num_threads(1)
    # Orphaned processes become children of this process, so that `find_orphans` finds them.
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
    print_journal(journal)
    return 1 if journal.violations else 0


if __name__ == "__main__":
    sys.exit(main())
