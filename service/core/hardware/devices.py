"""Devices: which one to use, what it computes natively, its threads, memory and health."""

from __future__ import annotations

import ctypes
import errno
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch

from service.core.errors import ConfigError, DeviceLost, OutOfMemory, StackSegError
from service.core.hardware import host
from service.core.hardware.gpus import explain_no_cuda, query_gpus

log = logging.getLogger(__name__)

# How often a device is asked whether it works, and the seconds in between.
PROBES, PROBE_SECONDS = 3, 0.5

# Torch's number for the memory that belongs to no graph.
SHARED_POOL = (0, 0)

# Bytes of pools of graphs that are not allocated between replays, by device.
_idle_pools: dict[torch.device, int] = {}

# Versions of cuDNN whose 3D convolutions in BF16 are wrong on large inputs (pytorch#163539). For BF16 and FP16 in
# contiguous memory torch replaces them by code that is several times slower (pytorch#166122) and needs more memory
# (pytorch#166643).
FAULTY_CUDNN = range(90800, 91500)

# Of torch's CPU allocator, oneDNN (whose primitives were made before, in the warm-up), Python's threads, CUDA beyond
# torch's allocator, and its libraries (cuDNN, cuBLAS).
_EXHAUSTED = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "can't start new thread",
    "CUDA error: out of memory",
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)


class Driver(Protocol):
    """Questions to a device beside what it computes. This module answers them; tests inject faults."""

    def is_on_host(self, device: torch.device) -> bool: ...

    def is_working(self, device: torch.device) -> bool: ...

    def free_bytes(self, device: torch.device) -> int | None: ...

    def total_bytes(self, device: torch.device) -> int | None: ...

    def release_memory(self, device: torch.device) -> None: ...


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "auto" and not available:
        _warn_of_unused_gpus()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        reason = explain_no_cuda()
        raise ConfigError(f"device.name is {name}, but no CUDA device can be used: {reason}; or set it to cpu or auto.")
    device = torch.device("cuda:0" if name in {"auto", "cuda"} else name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device.name is {name}, but there are only {torch.cuda.device_count()} CUDA devices.")
    return device


@cache
def _warn_of_unused_gpus() -> None:
    """Log once that there are GPUs which torch cannot use, where the CPU takes their place."""
    if found := query_gpus():
        log.warning("%s is not used: %s", found[0].name, explain_no_cuda())


def gpu_names() -> tuple[str, ...]:
    """List the CUDA devices of this process as `cuda:N`. Raises ConfigError where there is none."""
    names = tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    if not names:
        raise ConfigError("device.serve is all, but no CUDA device can be used; leave it empty.")
    return names


def native_precisions(device: torch.device) -> frozenset[torch.dtype]:
    """Return the floating dtypes that the device computes at full rate or in matrix units, float32 included.

    Those that `faulty_precisions` returns are left out.
    """
    if device.type == "cuda":
        return cuda_precisions(torch.cuda.get_device_capability(device)) - faulty_precisions(device).keys()
    # torch offers no public query for these instruction sets; the private one answers False where it knows nothing.
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return frozenset({torch.float32, torch.bfloat16} if bf16 else {torch.float32})


def cuda_precisions(capability: tuple[int, int]) -> frozenset[torch.dtype]:
    """Return the floating dtypes by CUDA compute capability: FP16 from 7.0 (Volta), BF16 from 8.0 (Ampere)."""
    dtypes = {torch.float32}
    if capability >= (7, 0):
        dtypes.add(torch.float16)
    if capability >= (8, 0):
        dtypes.add(torch.bfloat16)
    return frozenset(dtypes)


def faulty_precisions(device: torch.device) -> dict[torch.dtype, str]:
    """Return the dtypes that the device has units for, but the installed cuDNN computes wrongly or slowly, and why."""
    if device.type != "cuda":
        return {}
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return faulty_cuda_precisions(torch.cuda.get_device_capability(device), version)


def faulty_cuda_precisions(capability: tuple[int, int], cudnn_version: int | None) -> dict[torch.dtype, str]:
    """Return `faulty_precisions` by CUDA compute capability and version of cuDNN.

    Volta keeps FP16 with any cuDNN, as there is nothing to install: cuDNN supports Volta up to 9.10 only.
    """
    reason = explain_faulty_cudnn(cudnn_version)
    if reason is None or (cudnn_version is not None and capability < (7, 5)):
        return {}
    return dict.fromkeys(cuda_precisions(capability) - {torch.float32}, reason)


def explain_faulty_cudnn(version: int | None) -> str | None:
    """Return what is wrong with BF16 and FP16 in this version of cuDNN (None: there is no cuDNN), and what to install.

    None if nothing is wrong.
    """
    advice = "Install cuDNN 9.15 or later, which torch 2.11 and later for CUDA 13 bring (on PyPI: nvidia-cudnn-cu12)."
    if version is None:
        return f"torch finds no cuDNN, and 3D convolutions in BF16 and FP16 are slow without it. {advice}"
    if version not in FAULTY_CUDNN:
        return None
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return (
        f"cuDNN {number} is installed. In cuDNN 9.8 to 9.14, 3D convolutions in BF16 can be wrong on large inputs, and"
        f" those in BF16 and FP16 can be several times slower and need more memory. {advice}"
    )


def device_name(device: torch.device) -> str:
    """Return the name that the maker gives the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else host.query_cpu().name


def is_on_host(device: torch.device) -> bool:
    """Whether the device's memory is the host's."""
    return device.type == "cpu"


def _compute(device: torch.device) -> bool:
    return bool(torch.ones(1, device=device).add_(1).item() == 2)


def is_working(
    device: torch.device, compute: Callable[[torch.device], bool] = _compute, pause: float = PROBE_SECONDS
) -> bool:
    """Whether the device still computes. A CUDA context that has failed once fails for the rest of the process.

    An error may also be that of another thread, whose recording of a graph forbids some calls: `compute` is called up
    to `PROBES` times, with seconds of `pause` between. A device without any free memory answers, and so works.
    """
    for probe in range(PROBES):
        if probe:
            time.sleep(pause)
        try:
            return compute(device)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, or the room for threads; some libraries raise a plain RuntimeError for that."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _EXHAUSTED)


def translate_error(error: BaseException) -> BaseException:
    """Return OutOfMemory for a foreign error of exhausted memory, any other error as it is."""
    if isinstance(error, StackSegError) or not is_out_of_memory(error):
        return error
    return OutOfMemory("The service is short of memory; try again later, or send a smaller part of the volume.")


def find_loss(device: torch.device, error: BaseException, driver: Driver) -> DeviceLost | None:
    """Return DeviceLost where the device does not work any more after an `error`, None where it does."""
    if isinstance(error, StackSegError) or driver.is_on_host(device) or is_out_of_memory(error):
        return error if isinstance(error, DeviceLost) else None
    if driver.is_working(device):
        return None
    return DeviceLost(f"{device} has failed and must be started anew with the service.")


def use_threads(count: int) -> None:
    """Set how many CPU threads torch uses for the calling thread; 0: one for each usable core."""
    torch.set_num_threads(count or host.usable_cores())
    # Asking fixes the number for this thread; one that never asked takes what any thread set last.
    torch.get_num_threads()


def free_bytes(device: torch.device, cuda: Any = torch.cuda) -> int | None:
    """Return the bytes that this process may still take on the device, cached ones included; None where unknown.

    What graphs keep between their replays is not free.
    """
    if device.type != "cuda":
        return host.available_memory()
    free, _total = cuda.mem_get_info(device)
    # Other functions take a millisecond for each number, as they collect all of them by name.
    stats = cuda.memory_stats_as_nested_dict(device)
    reserved, allocated = (stats[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    return int(free + reserved - allocated - _idle_pools.get(device, 0))


def count_pools(device: torch.device, cuda: Any = torch.cuda) -> int:
    """Return the bytes of the memory pools of all graphs on a device, 0 on a CPU, and note how much of it is idle.

    It takes milliseconds. Call it after graphs were recorded or dropped, as `free_bytes` relies on the latest count.
    """
    if device.type != "cuda":
        return 0
    segments = [
        segment
        for segment in cuda.memory_snapshot()
        if segment["device"] == (device.index or 0) and tuple(segment["segment_pool_id"]) != SHARED_POOL
    ]
    _idle_pools[device] = sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
    return sum(segment["total_size"] for segment in segments)


def total_bytes(device: torch.device) -> int | None:
    """Return the bytes of the device's memory; None where unknown."""
    if device.type != "cuda":
        return host.read_meminfo("MemTotal")
    return torch.cuda.get_device_properties(device).total_memory


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Limit what this process may take of a GPU's memory; of the host's it does nothing."""
    total = total_bytes(device)
    if device.type == "cuda" and total is not None:
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)


def release_memory(device: torch.device) -> None:
    """Return freed memory to the system that torch or the C library would keep for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        count_pools(device)
    return_pages()


def return_pages() -> None:
    """Let others have the host's memory that this process has freed, and the C library would keep for later."""
    # Only glibc has it, and only glibc keeps so much.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
