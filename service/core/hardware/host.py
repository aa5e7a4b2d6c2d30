"""The processor, cores and memory that are available to this process on its host or in its container.

This module does not import torch.
"""

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

# Folder with the resource limits of the container (control groups, version 2). Outside a container it has no limits.
CGROUP = Path("/sys/fs/cgroup")

MEMINFO = "/proc/meminfo"
# Volumes up to this size are processed in a single thread.
SINGLE_THREAD_BYTES = 2**20
# Bytes to read of a system file. /proc/meminfo and the memory files of a control group are smaller.
MAX_FILE_BYTES = 2**14

# Instruction sets that determine the speed of networks.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


@dataclass(frozen=True)
class CpuStatus:
    """State of the processor and the memory of the host. Memory is in bytes; unknown values are None.

    cores     number of cores that this process may use
    features  instruction sets of `FEATURES` that the processor supports
    """

    name: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    features: tuple[str, ...]


def query_cpu() -> CpuStatus:
    """Query the processor and the memory of this host."""
    return CpuStatus(
        name=read_cpuinfo("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_total=read_meminfo("MemTotal"),
        memory_available=available_memory(),
        features=tuple(flag for flag in FEATURES if flag in read_cpuinfo("flags").split()),
    )


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process may use: its CPU affinity, or the container's quota if smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not quota.isdigit():
        return cores
    return min(cores, max(1, round(int(quota) / int(period))))


def available_memory(cgroup: Path = CGROUP) -> int | None:
    """Return the available memory of the host, or of the container if less, in bytes; None if both are unknown."""
    on_host = read_meminfo("MemAvailable")
    maximum, current, statistics = _memory_files(cgroup)
    limit = _read_through_open_descriptor(maximum).strip()
    used = _read_through_open_descriptor(current).strip() if limit.isdigit() else b""
    if not used.isdigit():
        return on_host
    # Cached file pages count as used memory, but the kernel evicts them when memory is needed.
    fields = dict(line.split(b" ", 1) for line in _read_through_open_descriptor(statistics).splitlines())
    reclaimable = int(fields.get(b"inactive_file", 0)) + int(fields.get(b"active_file", 0))
    in_container = max(0, int(limit) - int(used) + reclaimable)
    return in_container if on_host is None else min(on_host, in_container)


def read_cpuinfo(key: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "" if it is missing."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def read_meminfo(name: str) -> int | None:
    """Return a field of /proc/meminfo in bytes; None if it is missing."""
    match = re.search(rb"^%b: *([0-9]+) kB$" % name.encode(), _read_through_open_descriptor(MEMINFO), re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


@cache
def _memory_files(cgroup: Path) -> tuple[str, str, str]:
    return str(cgroup / "memory.max"), str(cgroup / "memory.current"), str(cgroup / "memory.stat")


def _read_through_open_descriptor(path: str) -> bytes:
    """Read a system file of up to `MAX_FILE_BYTES` through a descriptor that stays open; return b"" if it is missing.

    Memory is checked several times per request. Opening the file or releasing the GIL would take longer than reading.
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
        # Text mode would create a buffer and a decoder, which takes longer than reading a small file.
        with path.open("rb", buffering=0) as file:
            return file.readall().decode("ascii", "replace")
    except OSError:
        return ""


# Determined at import, because a sandboxed process can no longer read the limits when it parses a file.
CORES = usable_cores()


def run_in_threads(process: Callable[[T], None], parts: Sequence[T], nbytes: int, max_threads: int = CORES) -> None:
    """Process the parts of a volume in threads, one per core.

    nbytes       size of the volume; small volumes are processed in the calling thread
    max_threads  maximum number of threads
    """
    if min(len(parts), max_threads) == 1 or nbytes <= SINGLE_THREAD_BYTES:
        # Switching threads takes longer than processing such small parts.
        for part in parts:
            process(part)
        return
    with ThreadPoolExecutor(min(CORES, max_threads)) as pool:
        for _ in pool.map(process, parts):
            pass
