"""The processor, cores and memory that are available to this process on its host or in its container.

This module does not import torch.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

T = TypeVar("T")

# Folder with the resource limits of the container (control groups). In version 1, each resource has a folder of its
# own. Outside containers, the folder contains no limits.
CGROUP_FOLDER = Path("/sys/fs/cgroup")

MEMINFO_PATH = "/proc/meminfo"
# Maximum size of a volume that is processed in a single thread, in bytes.
MAX_SINGLE_THREAD_BYTES = 2**20
# Number of bytes to read from a system file. /proc/meminfo and the memory files of a control group are smaller.
READ_BUFFER_BYTES = 2**14

# Instruction sets that determine the speed of networks.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


@dataclass(frozen=True)
class HostStatus:
    """State of the host's processor and memory. Memory is in bytes; unknown values are None.

    cores         number of cores that this process may use
    memory_total  memory of the host, or the limit of the container if it is smaller
    features      the members of `INSTRUCTION_SETS` that the processor supports
    """

    name: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    features: tuple[str, ...]


def query_host() -> HostStatus:
    """Query the processor and the memory of the host."""
    return HostStatus(
        name=read_cpuinfo("model name") or platform.processor() or platform.machine(),
        cores=count_usable_cores(),
        memory_total=query_total_memory(),
        memory_available=query_available_memory(),
        features=tuple(flag for flag in INSTRUCTION_SETS if flag in read_cpuinfo("flags").split()),
    )


def count_usable_cores(cgroup: Path = CGROUP_FOLDER) -> int:
    """Return the number of cores that this process may use, according to its CPU affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _read_cpu_quota(cgroup)
    if not quota.isdigit():
        return cores
    return min(cores, max(1, round(int(quota) / int(period))))


def _read_cpu_quota(cgroup: Path) -> tuple[str, str]:
    """Return the CPU time that the container may use per period, and the period; no number if there is no quota."""
    quota, _, period = _read_system_file(cgroup / "cpu.max").partition(" ")
    if quota:
        return quota, period
    quota, period = (_read_system_file(cgroup / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return quota, period


def query_total_memory(cgroup: Path = CGROUP_FOLDER) -> int | None:
    """Return the memory of the host or the limit of the container, whichever is smaller, in bytes; None if unknown."""
    host_bytes = read_meminfo("MemTotal")
    limit = _read_through_open_descriptor(_find_memory_files(cgroup).limit).strip()
    return min(host_bytes, int(limit)) if host_bytes is not None and limit.isdigit() else host_bytes


def query_available_memory(cgroup: Path = CGROUP_FOLDER) -> int | None:
    """Return the available memory of the host or the container, whichever is smaller, in bytes; None if unknown."""
    host_bytes = read_meminfo("MemAvailable")
    files = _find_memory_files(cgroup)
    limit = _read_through_open_descriptor(files.limit).strip()
    usage = _read_through_open_descriptor(files.usage).strip() if limit.isdigit() else b""
    if not usage.isdigit():
        return host_bytes
    # Cached file pages count as used memory, but the kernel evicts them when memory is needed.
    fields = dict(line.split(b" ", 1) for line in _read_through_open_descriptor(files.statistics).splitlines())
    reclaimable_bytes = sum(int(fields.get(name, 0)) for name in files.reclaimable_fields)
    container_bytes = max(0, int(limit) - int(usage) + reclaimable_bytes)
    return container_bytes if host_bytes is None else min(host_bytes, container_bytes)


def read_cpuinfo(key: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "" if it is missing."""
    for line in _read_system_file(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def read_meminfo(name: str) -> int | None:
    """Return a field of /proc/meminfo in bytes; None if it is missing."""
    match = re.search(rb"^%b: *([0-9]+) kB$" % name.encode(), _read_through_open_descriptor(MEMINFO_PATH), re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


class _MemoryFiles(NamedTuple):
    """Paths of the files of a control group, and the statistics that count the file pages of its processes."""

    limit: str
    usage: str
    statistics: str
    reclaimable_fields: tuple[bytes, bytes]


@cache
def _find_memory_files(cgroup: Path) -> _MemoryFiles:
    """Return the files of version 1 if they exist. Without a limit, version 1 contains one that no host reaches."""
    folder = cgroup / "memory"
    if (folder / "memory.limit_in_bytes").exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        fields = (b"total_inactive_file", b"total_active_file")
    else:
        folder, names = cgroup, ("memory.max", "memory.current", "memory.stat")
        fields = (b"inactive_file", b"active_file")
    limit, usage, statistics = (str(folder / name) for name in names)
    return _MemoryFiles(limit, usage, statistics, fields)


def _read_through_open_descriptor(path: str) -> bytes:
    """Read a system file through a descriptor that stays open; return b"" if the file is missing.

    Memory is checked several times per request, and opening a file or releasing the GIL takes longer than reading the
    file.
    """
    file = _open_once(path)
    if file is None:
        return b""
    content = ctypes.create_string_buffer(READ_BUFFER_BYTES)
    size = _load_pread_with_gil()(file, content, READ_BUFFER_BYTES, 0)
    return ctypes.string_at(content, max(size, 0))


@cache
def _open_once(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


@cache
def _load_pread_with_gil() -> Callable[..., int]:
    """Return the C library's `pread`, called without releasing the GIL."""
    pread = ctypes.PyDLL(None).pread
    pread.argtypes, pread.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64), ctypes.c_ssize_t
    return pread


def _read_system_file(path: Path) -> str:
    try:
        # Text mode creates a buffer and a decoder, which takes longer than reading a small file.
        with path.open("rb", buffering=0) as file:
            return file.readall().decode("ascii", "replace")
    except OSError:
        return ""


# Determined at import time, because a sandboxed process can no longer read the limits when it parses a file.
CORE_COUNT = count_usable_cores()


def skip_finalization() -> None:
    """Let the process exit without finalizing the interpreter, which aborts if a daemon thread runs native code.

    Call this function while the exception that ends the process is handled. It determines the exit status.
    """
    error = sys.exc_info()[1]
    status = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "code", 1)

    def exit_process() -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(exit_process)


def run_in_threads(
    process_part: Callable[[T], None], parts: Sequence[T], nbytes: int, max_threads: int = CORE_COUNT
) -> None:
    """Process the parts of a volume in threads, with at most one thread per core.

    process_part  function that processes one part
    nbytes        size of the volume; small volumes are processed in the calling thread
    max_threads   maximum number of threads
    """
    if min(len(parts), max_threads) == 1 or nbytes <= MAX_SINGLE_THREAD_BYTES:
        # Switching threads takes longer than processing such small parts.
        for part in parts:
            process_part(part)
        return
    with ThreadPoolExecutor(min(CORE_COUNT, max_threads)) as pool:
        for _ in pool.map(process_part, parts):
            pass
