"""Devices: which one to use, what it computes natively, and how it is doing."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pynvml
import torch

from service.core.errors import ConfigError

# Limits of the container that this process runs in (control groups, version 2); the files are missing outside of one.
CGROUP = Path("/sys/fs/cgroup")

MEMINFO = "/proc/meminfo"
# More than there is in that, or in what a container is told of its memory.
MOST_BYTES = 2**14

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as the driver sees it; None where the driver does not say. Memory in bytes, power in watts.

    reserved_bytes  held by this process, in use or cached for later
    """

    index: int
    name: str
    driver: str | None
    compute_capability: str | None
    memory_total: int | None
    memory_used: int | None
    reserved_bytes: int
    utilisation_percent: int | None
    temperature_celsius: int | None
    power_watts: float | None


@dataclass(frozen=True)
class CpuStatus:
    """The processor. `cores`: that this process may use; `features`: instruction sets that decide about speed."""

    name: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    features: tuple[str, ...]


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` -> device. Raises ConfigError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(f"device.name is {name}, but no CUDA device can be used; set it to cpu or auto.")
    device = torch.device("cuda:0" if name in {"auto", "cuda"} else name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device.name is {name}, but there are only {torch.cuda.device_count()} CUDA devices.")
    return device


def gpu_names() -> tuple[str, ...]:
    """Every CUDA device of this process. Raises ConfigError where there is none."""
    names = tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    if not names:
        raise ConfigError("device.serve is all, but no CUDA device can be used; leave it empty.")
    return names


def native_precisions(device: torch.device) -> frozenset[torch.dtype]:
    """Floating dtypes for which the device has matrix units or full-rate arithmetic, float32 always among them."""
    if device.type == "cuda":
        return cuda_precisions(torch.cuda.get_device_capability(device))
    # torch offers no public query for these instruction sets; the private one answers False where it knows nothing.
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return frozenset({torch.float32, torch.bfloat16} if bf16 else {torch.float32})


def cuda_precisions(capability: tuple[int, int]) -> frozenset[torch.dtype]:
    """The same, by CUDA compute capability: FP16 tensor cores from 7.0 (Volta), BF16 from 8.0 (Ampere)."""
    dtypes = {torch.float32}
    if capability >= (7, 0):
        dtypes.add(torch.float16)
    if capability >= (8, 0):
        dtypes.add(torch.bfloat16)
    return frozenset(dtypes)


def gpus(nvml: Any = pynvml) -> tuple[GpuStatus, ...]:
    """Every NVIDIA GPU of the host; empty without a driver. `nvml` is the driver's library, as pynvml presents it."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _ask(nvml.nvmlSystemGetDriverVersion)
        return tuple(_gpu(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def cpu() -> CpuStatus:
    """The processor of this host and its memory."""
    return CpuStatus(
        name=_cpu_field("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_total=_meminfo("MemTotal"),
        memory_available=available_memory(),
        features=tuple(flag for flag in FEATURES if flag in _cpu_field("flags").split()),
    )


def processor() -> str:
    """What the processor is and can do: the same text where code that was compiled for one runs on the other."""
    return f"{cpu().name} {' '.join(sorted(_cpu_field('flags').split()))}"


def device_name(device: torch.device) -> str:
    """What the maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu().name


def works(device: torch.device) -> bool:
    """Whether the device still computes. Once a CUDA context has failed, nothing in the process does."""
    try:
        return bool(torch.ones(1, device=device).add_(1).item() == 2)
    except RuntimeError:
        return False


def use_threads(count: int) -> None:
    """Let the calling thread compute with so many threads on a CPU; 0: with one for each usable core."""
    torch.set_num_threads(count or usable_cores())
    # A thread that has not asked yet takes the number that any thread has set last.
    torch.get_num_threads()


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may keep busy: those of its affinity, or fewer where a container's share is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not quota.isdigit():
        return cores
    return min(cores, max(1, round(int(quota) / int(period))))


def available_memory(cgroup: Path = CGROUP) -> int | None:
    """Bytes that can still be taken, from the host or from what a container is limited to; None where nobody says."""
    # Asked several times for every request.
    on_host = _meminfo("MemAvailable")
    maximum, current, statistics = _memory_files(cgroup)
    limit = _read_again(maximum).strip()
    used = _read_again(current).strip() if limit.isdigit() else b""
    if not used.isdigit():
        return on_host
    # Pages of files count as used, but are dropped as soon as somebody needs the room.
    fields = dict(line.split(b" ", 1) for line in _read_again(statistics).splitlines())
    reclaimable = int(fields.get(b"inactive_file", 0)) + int(fields.get(b"active_file", 0))
    in_container = max(0, int(limit) - int(used) + reclaimable)
    return in_container if on_host is None else min(on_host, in_container)


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process may still take on the device, None where nobody says."""
    if device.type != "cuda":
        return available_memory()
    free, _total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def return_freed(device: torch.device) -> None:
    """Let others have the memory that this process has freed, and torch or the C library would keep for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_pages()


def return_pages() -> None:
    """Let others have the host's memory that this process has freed, and the C library would keep for later."""
    # Only glibc has it, and only glibc keeps so much.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _gpu(nvml: Any, index: int, driver: str | None) -> GpuStatus:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    utilisation = _ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return GpuStatus(
        index=index,
        name=_ask(nvml.nvmlDeviceGetName, handle) or "unknown",
        driver=driver,
        compute_capability=".".join(map(str, capability)) if capability else None,
        memory_total=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        reserved_bytes=_reserved(_ask(nvml.nvmlDeviceGetUUID, handle)),
        utilisation_percent=int(utilisation.gpu) if utilisation else None,
        temperature_celsius=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_watts=milliwatts / 1000 if milliwatts is not None else None,
    )


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer, or None where this GPU does not support the question."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _reserved(uuid: str | None) -> int:
    """Bytes that torch holds on the GPU with this UUID; NVML's numbering ignores CUDA_VISIBLE_DEVICES, UUIDs do not."""
    if uuid is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) in uuid:
            return torch.cuda.memory_reserved(index)
    return 0


def _cpu_field(key: str) -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _meminfo(name: str) -> int | None:
    """Bytes by that name in /proc/meminfo; None on systems without it."""
    found = re.search(rb"^%b: *([0-9]+) kB$" % name.encode(), _read_again(MEMINFO), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


@cache
def _memory_files(cgroup: Path) -> tuple[str, str, str]:
    return str(cgroup / "memory.max"), str(cgroup / "memory.current"), str(cgroup / "memory.stat")


def _read_again(path: str) -> bytes:
    """What a file of the system says now, up to `MOST_BYTES`; nothing where it was not there at first.

    It stays open, and is read without letting others run Python: each of that takes a busy service longer than reading.
    """
    file = _kept_open(path)
    if file is None:
        return b""
    told = ctypes.create_string_buffer(MOST_BYTES)
    size = _pread()(file, told, MOST_BYTES, 0)
    return ctypes.string_at(told, max(size, 0))


@cache
def _kept_open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


@cache
def _pread() -> Callable[..., int]:
    """The one of the C library, for what takes microseconds."""
    pread = ctypes.PyDLL(None).pread
    pread.argtypes, pread.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64), ctypes.c_ssize_t
    return pread


def _read(path: Path) -> str:
    try:
        # Without a buffer and a decoder of its own, which take longer to make than so little takes to read.
        with path.open("rb", buffering=0) as file:
            return file.readall().decode("ascii", "replace")
    except OSError:
        return ""
