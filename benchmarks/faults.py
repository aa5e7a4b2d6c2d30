"""The faults of the chaos test, the server that they are injected into, and the journal of events and violations."""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import socket
import sqlite3
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from common import START_SECONDS, wait_for
from processes import process_tree
from server import Server, make_stacks

from service.api.access.keys import hash_key

# Names of the API keys of well-behaved and of misbehaving clients.
KEYS = ("ada", "bo", "cy", "dee")
MISBEHAVING_KEY = "mallory"
# Jobs and requests must end within this time after the last fault.
STUCK_SECONDS = 60.0
# Effects of a fault are excused for this time after its end, because retries and restarts take a while.
AFTERMATH_SECONDS = 10.0
# Types of temporary problems, which are excused at any time.
RETRY_PROBLEMS = {"queue-full", "not-ready", "rate-limited"}
# Types of problems that each fault may cause for well-behaved clients.
EXCUSED_PROBLEMS = {
    "disk full": {"out-of-storage", "storage-unavailable"},
    "reader killed": {"reader-killed"},
    "database locked": {"storage-unavailable"},
    "clock jump": set[str](),
    # If memory runs out after the response has begun, the server can only close the connection.
    "memory limit": {"out-of-memory", "reader-killed", "connection"},
    "restart": {"connection", "interrupted"},
}
# C library that adds the seconds in the file CLOCK_OFFSET to the wall clock.
CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static const volatile long *offset;
__attribute__((constructor)) static void map_offset(void) {
  void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, open(getenv("CLOCK_OFFSET"), O_RDONLY), 0);
  if (page != MAP_FAILED) offset = page;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME && offset) now->tv_sec += *offset;
  return status;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


class Journal:
    """Counts of events, injected faults, and violations of the invariants; shared by all threads."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.violations: list[tuple[str, str]] = []
        self.stop_requested = threading.Event()
        self._faults: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def add_violation(self, invariant: str, details: str) -> None:
        """Record and print a violation, with the time and the recent faults."""
        now = time.monotonic()
        text = f"{now - self.began:.1f} s, {', '.join(sorted(self.faults_since(now))) or 'no fault'}: {details}"
        with self._lock:
            self.violations.append((invariant, text))
        print(f"VIOLATION: {invariant}: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def record_fault(self, name: str) -> Iterator[None]:
        """Record a fault that lasts as long as the block."""
        print(f"{time.monotonic() - self.began:6.1f} s {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        self._faults.append((name, began, float("inf")))
        yield
        self._faults[-1] = (name, began, time.monotonic())
        self.count(f"fault: {name}")

    def faults_since(self, moment: float) -> set[str]:
        """Return the faults whose effects lasted beyond `moment`."""
        return {name for name, _, ended in list(self._faults) if ended + AFTERMATH_SECONDS > moment}

    def is_excused(self, slug: str, began: float) -> bool:
        """Return whether this type of problem is temporary, or explained by a fault since `began`."""
        return slug in RETRY_PROBLEMS or any(slug in EXCUSED_PROBLEMS[name] for name in self.faults_since(began))

    def is_stuck(self, began: float) -> bool:
        """Return whether work that started at `began` should have ended, given the end of the last fault."""
        last_fault_end = max((ended for _, _, ended in list(self._faults)), default=0.0)
        return time.monotonic() - max(began, last_fault_end) > STUCK_SECONDS


class World:
    """The server under test with its folders, API keys and certificate, and the stacks that clients send."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.journal, self.rng = Journal(), random.Random(options.seed)
        self.storage, engine = folder / "disk", {"kind": options.engine, "cache_folder": str(folder / "cache")}
        self.temporary = self.storage / "tmp"
        self.temporary.mkdir(parents=True)
        stacks = make_stacks(options.models, engine)
        # The last two are large.
        self.stacks = [variant for stack in stacks for variant in (stack, stack.compress())]
        self.hostile = [path for path in sorted(options.hostile.rglob("*")) if path.is_file()]
        self.keys = {name: f"stackseg_{name}{'0' * 32}" for name in (*KEYS, MISBEHAVING_KEY)}
        self.clock, environment = make_clock(folder)
        self._certificate = make_certificate(folder)
        self.tls_context = ssl.create_default_context(cafile=str(self._certificate))
        self.server = Server(
            options.models,
            folder,
            self.storage,
            environment={"TMPDIR": str(self.temporary)} | environment,
            engine=engine,
            limits={"cache_bytes": 2**23},
            access={"keys": {name: hash_key(key) for name, key in self.keys.items()}},
            logging={"format": "json"},
        )

    def connect(self) -> socket.socket:
        """Open a connection to the server, with TLS if it uses TLS."""
        address = urlsplit(self.server.address)
        connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=30)
        return (
            self.tls_context.wrap_socket(connection, server_hostname=address.hostname)
            if address.scheme == "https"
            else connection
        )

    def start(self) -> None:
        """Start the server process, with or without TLS at random, without waiting until it is ready."""
        tls = ["--ssl-certfile", str(self._certificate), "--ssl-keyfile", str(self._certificate)]
        self.server.start(*(tls if self.rng.random() < 0.5 else []))

    def await_ready(self) -> None:
        """Wait until the server is ready. Raises SystemExit with the end of its log if it does not become ready."""
        if not self.server.wait_for_port():
            raise SystemExit(
                "\n".join(["The server did not start. Last lines of its log:", *self.server.read_log()[-20:]])
            )
        with httpx2.Client(base_url=self.server.address, verify=self.tls_context, timeout=30) as http:
            if not wait_for(lambda: http.get("/health/ready").status_code == 200, START_SECONDS):
                log = self.server.read_log()[-20:]
                raise SystemExit("\n".join(["The server did not become ready. Last lines of its log:", *log]))

    def stop(self, signal_number: signal.Signals) -> None:
        """Stop the server with a signal, and check its exit status, its child processes and its database."""
        self.server.process.send_signal(signal_number)
        expected = {-signal.SIGKILL} if signal_number == signal.SIGKILL else {0, -signal.SIGTERM}
        if (status := self.server.wait_for_exit()) not in expected:
            self.journal.add_violation(
                "the server exits only after a signal", f"status {status} after {signal_number.name}"
            )
        if not wait_for(lambda: not find_orphans(), 15):
            self.journal.add_violation("no process is orphaned", f"{find_orphans()}")
        if (self.server.jobs / "jobs.sqlite3").exists():
            with closing(sqlite3.connect(self.server.jobs / "jobs.sqlite3")) as database:
                errors = database.execute("PRAGMA integrity_check").fetchall()
            if errors != [("ok",)]:
                self.journal.add_violation("the database is intact", str(errors))

    def restart_if_exited(self) -> None:
        """Restart the server if it has exited unexpectedly, which is a violation."""
        if (status := self.server.process.poll()) is not None:
            self.journal.add_violation("the server exits only after a signal", f"it exited with status {status}")
            self.server.wait_for_exit()
            self.start()
            self.await_ready()


def find_orphans() -> list[int]:
    """Reap exited child processes, and return the processes that a stopped server has left running."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return process_tree(os.getpid())[1:]


def restart(world: World) -> None:
    """Stop and start the server once or several times, sometimes before it is ready."""
    for _ in range(world.rng.choice([1, 1, 2, 4]) - 1):
        world.stop(world.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        world.start()
        time.sleep(world.rng.uniform(0.3, 4))
    world.stop(world.rng.choice([signal.SIGKILL, signal.SIGTERM]))
    world.start()
    world.await_ready()


def fill_disk(world: World) -> None:
    """Keep the disk full for a few seconds."""
    filler = world.storage / "filler"
    with filler.open("ab", buffering=0) as file:
        end = time.monotonic() + world.rng.uniform(1, 8)
        while time.monotonic() < end:
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            time.sleep(0.05)
    filler.unlink()


def kill_readers(world: World) -> None:
    """Kill most reader processes, sometimes for two seconds, so that retries are killed as well."""
    end = time.monotonic() + world.rng.choice([0, 0, 2])
    while True:
        for reader in process_tree(world.server.process.pid)[1:]:
            if world.rng.random() < 0.7:
                with suppress(ProcessLookupError):
                    os.kill(reader, signal.SIGKILL)
        if time.monotonic() > end:
            return
        time.sleep(world.rng.uniform(0, 0.1))


def lock_database(world: World) -> None:
    """Hold an exclusive lock on the database of jobs for up to 25 seconds."""
    with closing(sqlite3.connect(world.server.jobs / "jobs.sqlite3", timeout=30, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(world.rng.choice([2, 8, 25]))
        database.execute("ROLLBACK")


def jump_clock(world: World) -> None:
    """Shift the server's wall clock by up to two days."""
    if world.clock is not None:
        with world.clock.open("r+b") as file:
            file.write(struct.pack("q", world.rng.randrange(-2 * 86400, 2 * 86400)))
        time.sleep(1)


def limit_memory(world: World) -> None:
    """Limit the server's address space to at most 64 MiB above its current size for a few seconds."""
    pid = world.server.process.pid
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + world.rng.randrange(2**26)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, hard))
    time.sleep(world.rng.uniform(2, 6))
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))


FAULTS: dict[str, Callable[[World], None]] = {
    "disk full": fill_disk,
    "reader killed": kill_readers,
    "database locked": lock_database,
    "clock jump": jump_clock,
    "memory limit": limit_memory,
    "restart": restart,
}


def make_clock(folder: Path) -> tuple[Path | None, dict[str, str]]:
    """Compile the library that shifts the wall clock; return the file with the offset, and the environment variables.

    Returns None instead of the file if there is no C compiler.
    """
    clock, source, library = folder / "clock", folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK_SOURCE, encoding="utf-8")
    clock.write_bytes(struct.pack("q", 0))
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    except (OSError, subprocess.CalledProcessError):
        print("No C compiler was found: the fault `clock jump` is skipped.", file=sys.stderr)
        return None, {}
    return clock, {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}


def make_certificate(folder: Path) -> Path:
    """Create a self-signed certificate for 127.0.0.1, with its private key in the same file."""
    certificate = folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "30"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(certificate), "-out", str(certificate)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return certificate
