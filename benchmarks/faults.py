"""A server to which faults happen, the faults, and the journal of what they and the clients met."""

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
from processes import family
from server import Server, make_stacks

from service.api.access.keys import hash_key

KEYS, RUDE_KEY = ("ada", "bo", "cy", "dee"), "mallory"
# A job or a request that is not over so long after the last fault is stuck.
STUCK_SECONDS = 60.0
# For which a fault may show after its end: what it ended is retried, recorded, started again.
AFTERMATH_SECONDS = 10.0
# Answers that ask to come back, whatever happens.
LATER = {"queue-full", "not-ready", "rate-limited"}
# The types of problems that a fault may cause to requests and jobs of well-behaved clients.
EXCUSES = {
    "disk full": {"out-of-storage", "storage-unavailable"},
    "reader killed": {"reader-killed"},
    "database locked": {"storage-unavailable"},
    "clock jump": set[str](),
    # An answer that has begun can only be cut off.
    "memory limit": {"out-of-memory", "reader-killed", "connection"},
    "restart": {"connection", "interrupted"},
}
CLOCK = r"""
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
    """What was injected, done and broken, and when; shared by all threads."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.broken: list[tuple[str, str]] = []
        self.over = threading.Event()
        self._faults: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def blame(self, promise: str, found: str) -> None:
        """Note a broken promise, with the moment and the faults around it."""
        now = time.monotonic()
        text = f"{now - self.began:.1f} s, {', '.join(sorted(self.faults_since(now))) or 'no fault'}: {found}"
        with self._lock:
            self.broken.append((promise, text))
        print(f"BROKEN: {promise}: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        print(f"{time.monotonic() - self.began:6.1f} s {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        self._faults.append((name, began, float("inf")))
        yield
        self._faults[-1] = (name, began, time.monotonic())
        self.count(f"fault: {name}")

    def faults_since(self, moment: float) -> set[str]:
        return {name for name, _, ended in list(self._faults) if ended + AFTERMATH_SECONDS > moment}

    def excuses(self, slug: str, began: float) -> bool:
        """Whether a fault since `began` excuses this type of problem."""
        return slug in LATER or any(slug in EXCUSES[name] for name in self.faults_since(began))

    def is_stuck(self, began: float) -> bool:
        """Whether something that began then should be over, since no fault has held it up lately."""
        held_up = max((ended for _, _, ended in list(self._faults)), default=0.0)
        return time.monotonic() - max(began, held_up) > STUCK_SECONDS


class World:
    """The server, what it is made of, and what clients need to know of it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.journal, self.rng = Journal(), random.Random(options.seed)
        self.storage, chosen = folder / "disk", {"kind": options.engine, "cache_folder": str(folder / "cache")}
        self.temporary = self.storage / "tmp"
        self.temporary.mkdir(parents=True)
        alone = make_stacks(options.models, chosen)
        # The last two are large.
        self.stacks = [kind for stack in alone for kind in (stack, stack.deflated())]
        self.hostile = [path for path in sorted(options.hostile.rglob("*")) if path.is_file()]
        self.keys = {name: f"stackseg_{name}{'0' * 32}" for name in (*KEYS, RUDE_KEY)}
        self.clock, environment = make_clock(folder)
        self._certificate = make_certificate(folder)
        self.trust = ssl.create_default_context(cafile=str(self._certificate))
        self.server = Server(
            options.models,
            folder,
            self.storage,
            environment={"TMPDIR": str(self.temporary)} | environment,
            engine=chosen,
            limits={"cache_bytes": 2**23},
            access={"keys": {name: hash_key(key) for name, key in self.keys.items()}},
            logging={"format": "json"},
        )

    def connect(self) -> socket.socket:
        """Open a connection to the server, with TLS where it speaks that."""
        address = urlsplit(self.server.address)
        connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=30)
        return (
            self.trust.wrap_socket(connection, server_hostname=address.hostname)
            if address.scheme == "https"
            else connection
        )

    def start(self) -> None:
        """Start the server with or without TLS, and return when its port is open; it may not be ready."""
        tls = ["--ssl-certfile", str(self._certificate), "--ssl-keyfile", str(self._certificate)]
        self.server.start(*(tls if self.rng.random() < 0.5 else []))

    def await_ready(self) -> None:
        if not self.server.listening():
            raise SystemExit("\n".join(["The server does not start:", *self.server.log()[-20:]]))
        with httpx2.Client(base_url=self.server.address, verify=self.trust, timeout=30) as http:
            if not wait_for(lambda: http.get("/health/ready").status_code == 200, START_SECONDS):
                raise SystemExit("\n".join(["The server is not ready:", *self.server.log()[-20:]]))

    def stop(self, number: signal.Signals) -> None:
        """End the server by a signal, and check how it ends and what it leaves."""
        self.server.process.send_signal(number)
        expected = {-signal.SIGKILL} if number == signal.SIGKILL else {0, -signal.SIGTERM}
        if (status := self.server.ended()) not in expected:
            self.journal.blame("the server ends only when told to", f"status {status} after {number.name}")
        if not wait_for(lambda: not orphans(), 15):
            self.journal.blame("no process is orphaned", f"{orphans()}")
        if (self.server.jobs / "jobs.sqlite3").exists():
            with closing(sqlite3.connect(self.server.jobs / "jobs.sqlite3")) as database:
                found = database.execute("PRAGMA integrity_check").fetchall()
            if found != [("ok",)]:
                self.journal.blame("the database is whole", str(found))

    def revive(self) -> None:
        """Start the server again where it has ended by itself."""
        if (status := self.server.process.poll()) is not None:
            self.journal.blame("the server ends only when told to", f"it ended by itself with status {status}")
            self.server.ended()
            self.start()
            self.await_ready()


def orphans() -> list[int]:
    """Return the processes that a server left to this one; those that have ended are waited for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return family(os.getpid())[1:]


def restart(world: World) -> None:
    for _ in range(world.rng.choice([1, 1, 2, 4]) - 1):
        world.stop(world.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        world.start()
        time.sleep(world.rng.uniform(0.3, 4))
    world.stop(world.rng.choice([signal.SIGKILL, signal.SIGTERM]))
    world.start()
    world.await_ready()


def fill_disk(world: World) -> None:
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
    """Kill one or all, at times again and again, so that what is retried is hit as well."""
    end = time.monotonic() + world.rng.choice([0, 0, 2])
    while True:
        for reader in family(world.server.process.pid)[1:]:
            if world.rng.random() < 0.7:
                with suppress(ProcessLookupError):
                    os.kill(reader, signal.SIGKILL)
        if time.monotonic() > end:
            return
        time.sleep(world.rng.uniform(0, 0.1))


def lock_database(world: World) -> None:
    with closing(sqlite3.connect(world.server.jobs / "jobs.sqlite3", timeout=30, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        time.sleep(world.rng.choice([2, 8, 25]))
        database.execute("ROLLBACK")


def jump_clock(world: World) -> None:
    if world.clock is not None:
        with world.clock.open("r+b") as file:
            file.write(struct.pack("q", world.rng.randrange(-2 * 86400, 2 * 86400)))
        time.sleep(1)


def limit_memory(world: World) -> None:
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
    """Compile a library that moves the wall clock by the seconds in a file; return that file, and the environment."""
    clock, source, library = folder / "clock", folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK, encoding="utf-8")
    clock.write_bytes(struct.pack("q", 0))
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    except (OSError, subprocess.CalledProcessError):
        print("There is no C compiler: the clock does not jump.", file=sys.stderr)
        return None, {}
    return clock, {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}


def make_certificate(folder: Path) -> Path:
    """Make a self-signed certificate for 127.0.0.1, with its key in the same file."""
    certificate = folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "30"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(certificate), "-out", str(certificate)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return certificate
