"""Torch devices: selection, supported precisions, threads, memory and health checks."""

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

# Number of failed health checks after which a device is considered lost.
MAX_HEALTH_CHECKS = 3
# Seconds between two health checks.
HEALTH_CHECK_INTERVAL_SECONDS = 0.5

# PyTorch's id for the memory pool of allocations outside CUDA graphs.
SHARED_POOL_ID = (0, 0)

# Number of bytes in the memory pools of CUDA graphs that are unused between replays, by device.
_idle_pool_bytes: dict[torch.device, int] = {}

# Versions of cuDNN whose 3D convolutions in BF16 give wrong results for large inputs (pytorch#163539). With these
# versions, PyTorch runs convolutions in BF16 and FP16 in the contiguous memory format with other kernels, which are
# several times slower (pytorch#166122) and need more memory (pytorch#166643).
FAULTY_CUDNN_VERSIONS = range(90800, 91500)

# Fragments of error messages that indicate that memory is exhausted: from PyTorch's CPU allocator, oneDNN (the same
# primitives were created during the warm-up, so creating them can fail only for lack of memory), Python's threads, CUDA
# allocations outside PyTorch's allocator, and the CUDA libraries (cuDNN, cuBLAS).
_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "can't start new thread",
    "CUDA error: out of memory",
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)


class Driver(Protocol):
    """Health and memory queries for a device. This module implements the protocol; fakes in tests inject faults."""

    def uses_host_memory(self, device: torch.device) -> bool: ...

    def is_working(self, device: torch.device) -> bool: ...

    def query_free_bytes(self, device: torch.device) -> int | None: ...

    def query_total_bytes(self, device: torch.device) -> int | None: ...

    def release_memory(self, device: torch.device) -> None: ...


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError if the GPU is not available."""
    is_cuda_available = torch.cuda.is_available()
    if name == "auto" and not is_cuda_available:
        _warn_of_unused_gpus()
    if name == "cpu" or (name == "auto" and not is_cuda_available):
        return torch.device("cpu")
    if not is_cuda_available:
        reason = explain_no_cuda()
        raise ConfigError(
            f"device.name is {name}, but no CUDA device is available: {reason}. Alternatively, set device.name to"
            " cpu or auto."
        )
    device = torch.device("cuda:0" if name in {"auto", "cuda"} else name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device.name is {name}, but the number of CUDA devices is {torch.cuda.device_count()}.")
    return device


@cache
def _warn_of_unused_gpus() -> None:
    """Log once that PyTorch cannot use the GPUs on this host, and that the CPU is used instead."""
    if unused_gpus := query_gpus():
        log.warning("%s is not used: %s", unused_gpus[0].name, explain_no_cuda())


def list_gpus() -> tuple[str, ...]:
    """List the CUDA devices of this process as `cuda:N`. Raises ConfigError if there are none."""
    names = tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    if not names:
        raise ConfigError("device.serve is all, but no CUDA device is available. Leave device.serve empty.")
    return names


def list_native_precisions(device: torch.device) -> frozenset[torch.dtype]:
    """Return the floating-point dtypes that the device supports at full speed or in matrix units, including float32.

    Dtypes in `list_faulty_precisions` are excluded.
    """
    if device.type == "cuda":
        return list_cuda_precisions(torch.cuda.get_device_capability(device)) - list_faulty_precisions(device).keys()
    # PyTorch has no public query for AVX512-BF16 and AMX. The private functions return False for unknown processors.
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return frozenset({torch.float32, torch.bfloat16} if has_bf16 else {torch.float32})


def list_cuda_precisions(capability: tuple[int, int]) -> frozenset[torch.dtype]:
    """Return the floating-point dtypes of a CUDA compute capability: FP16 from 7.0 (Volta), BF16 from 8.0 (Ampere)."""
    dtypes = {torch.float32}
    if capability >= (7, 0):
        dtypes.add(torch.float16)
    if capability >= (8, 0):
        dtypes.add(torch.bfloat16)
    return frozenset(dtypes)


def list_faulty_precisions(device: torch.device) -> dict[torch.dtype, str]:
    """Return the supported dtypes for which cuDNN gives wrong results or is slow, with the reason for each."""
    if device.type != "cuda":
        return {}
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return list_faulty_cuda_precisions(torch.cuda.get_device_capability(device), version)


def list_faulty_cuda_precisions(capability: tuple[int, int], cudnn_version: int | None) -> dict[torch.dtype, str]:
    """Return the faulty dtypes for a CUDA compute capability and a version of cuDNN (None: no cuDNN).

    FP16 is never excluded on Volta, because no newer cuDNN fixes it: the last version that supports Volta is 9.10.
    """
    reason = explain_faulty_cudnn(cudnn_version)
    if reason is None or (cudnn_version is not None and capability < (7, 5)):
        return {}
    return dict.fromkeys(list_cuda_precisions(capability) - {torch.float32}, reason)


def explain_faulty_cudnn(version: int | None) -> str | None:
    """Describe the problem of a version of cuDNN with BF16 and FP16, and what to install; None if there is no problem.

    version  version number, such as 91000 for 9.10.0; None if cuDNN is not installed
    """
    advice = (
        "Install cuDNN 9.15 or later (on PyPI: nvidia-cudnn-cu12 for CUDA 12, nvidia-cudnn-cu13 for CUDA 13), or"
        " PyTorch 2.11 or later for CUDA 13, which includes it."
    )
    if version is None:
        return f"PyTorch cannot find cuDNN. Without it, 3D convolutions in BF16 and FP16 are slow. {advice}"
    if version not in FAULTY_CUDNN_VERSIONS:
        return None
    version_name = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return (
        f"cuDNN {version_name} is installed. In cuDNN 9.8 to 9.14, 3D convolutions in BF16 can give wrong results for"
        f" large inputs, and convolutions in BF16 and FP16 can be several times slower and need more memory. {advice}"
    )


def get_device_name(device: torch.device) -> str:
    """Return the product name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else host.query_host().name


def uses_host_memory(device: torch.device) -> bool:
    """Return whether the device uses the memory of the host."""
    return device.type == "cpu"


def _can_compute(device: torch.device) -> bool:
    return bool(torch.ones(1, device=device).add_(1).item() == 2)


def is_working(
    device: torch.device,
    can_compute: Callable[[torch.device], bool] = _can_compute,
    pause_seconds: float = HEALTH_CHECK_INTERVAL_SECONDS,
) -> bool:
    """Return whether the device still works. Once a CUDA context has failed, all calls fail until the process ends.

    An error can also have a temporary cause: while another thread captures a CUDA graph, some calls are not allowed.
    Therefore, `can_compute` is called up to `MAX_HEALTH_CHECKS` times, `pause_seconds` apart. A device that is out of
    memory counts as working.
    """
    for check_index in range(MAX_HEALTH_CHECKS):
        if check_index:
            time.sleep(pause_seconds)
        try:
            return can_compute(device)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is exhausted or no thread can be started.

    Some libraries raise a plain RuntimeError in this case, so the message is searched.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        fragment in str(error) for fragment in _OUT_OF_MEMORY_MESSAGES
    )


def translate_error(error: BaseException) -> BaseException:
    """Convert an out-of-memory error of a library to OutOfMemory; return any other error unchanged."""
    if isinstance(error, StackSegError) or not is_out_of_memory(error):
        return error
    return OutOfMemory(
        "The service does not have enough memory. Try again later, or send a smaller part of the volume."
    )


def find_device_loss(device: torch.device, error: BaseException, driver: Driver) -> DeviceLost | None:
    """Check the device after an error: return DeviceLost if the device has stopped working, else None."""
    if isinstance(error, StackSegError) or driver.uses_host_memory(device) or is_out_of_memory(error):
        return error if isinstance(error, DeviceLost) else None
    if driver.is_working(device):
        return None
    return DeviceLost(f"{device} has failed. The service has to be restarted to use it again.")


def set_torch_threads(count: int) -> None:
    """Set the number of CPU threads that PyTorch uses for calls from this thread; 0: one per usable core."""
    torch.set_num_threads(count or host.count_usable_cores())
    # Reading the number makes it permanent for this thread. Otherwise, this thread would use the number that was last
    # set by any thread.
    torch.get_num_threads()


def query_free_bytes(device: torch.device, cuda: Any = torch.cuda) -> int | None:
    """Return how many bytes this process can still allocate on the device, including PyTorch's cache; None if unknown.

    Memory that CUDA graphs reserve between replays does not count as free.
    """
    if device.type != "cuda":
        return host.query_available_memory()
    free_bytes, _total_bytes = cuda.mem_get_info(device)
    # Each function for a single statistic takes a millisecond, because it collects all statistics.
    stats = cuda.memory_stats_as_nested_dict(device)
    reserved_bytes, allocated_bytes = (stats[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    return int(free_bytes + reserved_bytes - allocated_bytes - _idle_pool_bytes.get(device, 0))


def measure_graph_pools(device: torch.device, cuda: Any = torch.cuda) -> int:
    """Return the total size of the memory pools of all CUDA graphs on a device in bytes; 0 on a CPU.

    This function also records how many of the bytes are unused, which `query_free_bytes` needs. Call it after graphs
    have been captured or deleted. It takes several milliseconds.
    """
    if device.type != "cuda":
        return 0
    segments = [
        segment
        for segment in cuda.memory_snapshot()
        if segment["device"] == (device.index or 0) and tuple(segment["segment_pool_id"]) != SHARED_POOL_ID
    ]
    _idle_pool_bytes[device] = sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
    return sum(segment["total_size"] for segment in segments)


def query_total_bytes(device: torch.device) -> int | None:
    """Return the total memory of the device in bytes; None if unknown."""
    if device.type != "cuda":
        return host.query_total_memory()
    return torch.cuda.get_device_properties(device).total_memory


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Limit the GPU memory that this process may allocate. Do nothing for the CPU."""
    total_bytes = query_total_bytes(device)
    if device.type == "cuda" and total_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total_bytes, 1.0), device)


def release_memory(device: torch.device) -> None:
    """Return memory cached by PyTorch and the C library to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        measure_graph_pools(device)
    trim_malloc()


def trim_malloc() -> None:
    """Return freed memory cached by the C library to the operating system."""
    # Only glibc has `malloc_trim`, and only glibc caches enough memory for this to matter.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
