"""Resource usage of a process and its descendants, from /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Self, TypeVar

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

T = TypeVar("T")


class Sampler(threading.Thread, Generic[T]):
    """A thread that calls `take` every `interval` seconds while its `with` block runs.

    samples  pairs of the seconds since the start and the result of `take`
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


def process_tree(pid: int) -> list[int]:
    """Return the IDs of a process and of its descendants; an empty list if the process does not exist."""
    # The lists of children in /proc/PID/task are not reliable: each thread has one, and passes it on when it ends.
    parents = {int(process.name): _read_parent(int(process.name)) for process in Path("/proc").glob("[0-9]*")}
    processes = [pid] if pid in parents else []
    for process in processes:
        processes += [child for child, parent in parents.items() if parent == process]
    return processes


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including child processes that were reaped."""
    return sum(_count_ticks(process) for process in process_tree(pid)) / TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants. Shared pages are counted once per process."""
    pages = (read_proc_file(process, "statm").split()[1:2] for process in process_tree(pid))
    return PAGE_BYTES * sum(int(number) for fields in pages for number in fields)


def count_threads(pid: int) -> int:
    """Count the threads of a process and its descendants."""
    return sum(_count_entries(process, "task") for process in process_tree(pid))


def count_descriptors(pid: int) -> int:
    """Count the open files, sockets and pipes of a process and its descendants."""
    return sum(_count_entries(process, "fd") for process in process_tree(pid))


def memory_bytes(pid: int, *names: str) -> int:
    """Return the sum of fields of /proc/PID/status, such as VmHWM, of a process and its descendants, in bytes."""
    total = 0
    for process in process_tree(pid):
        lines = (line.split() for line in read_proc_file(process, "status").splitlines())
        total += sum(int(size[0]) * 1024 for name, *size in lines if name.rstrip(":") in names)
    return total


def _read_parent(pid: int) -> int | None:
    return int(fields[1]) if (fields := _read_stat(pid)) else None


def _count_ticks(pid: int) -> int:
    # utime and stime of the process, then of the child processes that it has waited for.
    return sum(map(int, _read_stat(pid)[11:15]))


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process name in parentheses."""
    return read_proc_file(pid, "stat").rpartition(")")[2].split()


def _count_entries(pid: int, folder: str) -> int:
    """Count the entries of a folder in /proc/PID; 0 if the process no longer exists."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return 0


def read_proc_file(pid: int, file: str) -> str:
    """Read a file in /proc/PID; an empty string if the process no longer exists."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
