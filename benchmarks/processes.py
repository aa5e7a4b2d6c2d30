"""Resources of a process and its descendants, as Linux accounts for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Self, TypeVar

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

T = TypeVar("T")


class Sampler(threading.Thread, Generic[T]):
    """Thread that takes a sample every `interval` seconds while its block runs.

    samples  seconds since the beginning, and what `take` returned then
    """

    def __init__(self, take: Callable[[], T], interval: float) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, T]] = []
        self._take, self._interval = take, interval
        self._stopped = threading.Event()

    def run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(self._interval):
            self.samples.append((time.monotonic() - began, self._take()))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


def family(pid: int) -> list[int]:
    """Return the living processes among a process and those below it; none for one that is gone."""
    # Not from the lists of children in /proc/PID/task: each thread has its own and passes its children on as it ends.
    parents = {int(one.name): _parent(int(one.name)) for one in Path("/proc").glob("[0-9]*")}
    found = [pid] if pid in parents else []
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and all below it so far, including those that ended and were waited for."""
    return sum(_ticks(one) for one in family(pid)) / TICKS


def resident(pid: int) -> int:
    """Return the resident bytes of a process and all below it; shared pages count for each."""
    pages = (proc_text(one, "statm").split()[1:2] for one in family(pid))
    return PAGE * sum(int(number) for found in pages for number in found)


def threads(pid: int) -> int:
    """Count the threads of a process and all below it."""
    return sum(_entries(one, "task") for one in family(pid))


def descriptors(pid: int) -> int:
    """Count the files, sockets and pipes that a process and all below it hold open."""
    return sum(_entries(one, "fd") for one in family(pid))


def memory(pid: int, *names: str) -> int:
    """Return the sum of fields of /proc/PID/status, such as VmHWM, in bytes, of a process and all below it."""
    total = 0
    for one in family(pid):
        lines = (line.split() for line in proc_text(one, "status").splitlines())
        total += sum(int(size[0]) * 1024 for name, *size in lines if name.rstrip(":") in names)
    return total


def _parent(pid: int) -> int | None:
    return int(fields[1]) if (fields := _stat(pid)) else None


def _ticks(pid: int) -> int:
    # utime and stime of its own, then those of children that it has waited for.
    return sum(map(int, _stat(pid)[11:15]))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, behind the name in brackets."""
    return proc_text(pid, "stat").rpartition(")")[2].split()


def _entries(pid: int, folder: str) -> int:
    """Count the entries of a folder in /proc/PID; 0 for a process that is gone."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return 0


def proc_text(pid: int, file: str) -> str:
    """Read a file in /proc/PID; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
