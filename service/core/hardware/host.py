"""The processor, and the cores and memory that the host or its container has for this process. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Limits of the container that this process runs in (control groups, version 2); the files are missing outside of one.
CGROUP = Path("/sys/fs/cgroup")

MEMINFO = "/proc/meminfo"
# Volumes up to this size are processed by one thread.
SINGLE_THREAD_BYTES = 2**20
# Larger than /proc/meminfo and the memory files of a control group.
MAX_FILE_BYTES = 2**14

# Instruction sets that decide about the speed of networks.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


@dataclass(frozen=True)
class CpuStatus:
    """State of the processor and its memory in bytes.

    cores     number that this process may use
    features  instruction sets that decide about speed, those of `FEATURES` that it has
    """

    name: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    features: tuple[str, ...]


def query_cpu() -> CpuStatus:
    """Query the processor of this host and its memory."""
    return CpuStatus(
        name=cpu_field("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_total=read_meminfo("MemTotal"),
        memory_available=available_memory(),
        features=tuple(flag for flag in FEATURES if flag in cpu_field("flags").split()),
    )


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Count the cores that this process may use: those of its affinity, or the container's quota if that is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not quota.isdigit():
        return cores
    return min(cores, max(1, round(int(quota) / int(period))))


def available_memory(cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that the host, or the container's limit, has left; None where neither is known."""
    on_host = read_meminfo("MemAvailable")
    maximum, current, statistics = _memory_files(cgroup)
    limit = _reread(maximum).strip()
    used = _reread(current).strip() if limit.isdigit() else b""
    if not used.isdigit():
        return on_host
    # Cached file pages count as used, but the kernel drops them when memory is needed.
    fields = dict(line.split(b" ", 1) for line in _reread(statistics).splitlines())
    reclaimable = int(fields.get(b"inactive_file", 0)) + int(fields.get(b"active_file", 0))
    in_container = max(0, int(limit) - int(used) + reclaimable)
    return in_container if on_host is None else min(on_host, in_container)


def cpu_field(key: str) -> str:
    """Return an entry of /proc/cpuinfo for the first processor; "" on systems without that file."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def read_meminfo(name: str) -> int | None:
    """Return an entry of /proc/meminfo in bytes; None on systems without that file."""
    found = re.search(rb"^%b: *([0-9]+) kB$" % name.encode(), _reread(MEMINFO), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


@cache
def _memory_files(cgroup: Path) -> tuple[str, str, str]:
    return str(cgroup / "memory.max"), str(cgroup / "memory.current"), str(cgroup / "memory.stat")


def _reread(path: str) -> bytes:
    """Read a system file of up to `MAX_FILE_BYTES` through a descriptor that stays open; b"" where it was missing.

    Memory is checked several times per request, and opening the file, or giving up the GIL, costs more than reading.
    """
    file = _open_once(path)
    if file is None:
        return b""
    content = ctypes.create_string_buffer(MAX_FILE_BYTES)
    size = _pread_with_gil()(file, content, MAX_FILE_BYTES, 0)
    return ctypes.string_at(content, max(size, 0))


@cache
def _open_once(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


@cache
def _pread_with_gil() -> Callable[..., int]:
    """Return the C library's `pread`, called without releasing the GIL."""
    pread = ctypes.PyDLL(None).pread
    pread.argtypes, pread.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64), ctypes.c_ssize_t
    return pread


def _read(path: Path) -> str:
    try:
        # Text mode would build a buffer and a decoder, which takes longer than reading so little.
        with path.open("rb", buffering=0) as file:
            return file.readall().decode("ascii", "replace")
    except OSError:
        return ""


# Counted before any file is parsed: a process that is confined then cannot count any more.
CORES = usable_cores()


def run_in_threads(process: Callable[[T], None], parts: Sequence[T], nbytes: int, most: int = CORES) -> None:
    """Process the parts of a volume of this size, in as many threads as there are cores, or at `most`."""
    if min(len(parts), most) == 1 or nbytes <= SINGLE_THREAD_BYTES:
        # Handing over the GIL takes longer than processing such small parts.
        for part in parts:
            process(part)
        return
    with ThreadPoolExecutor(min(CORES, most)) as pool:
        for _ in pool.map(process, parts):
            pass
