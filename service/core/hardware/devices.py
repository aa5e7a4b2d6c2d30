"""Devices: which one to use, what it computes natively, its memory, load and health."""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pynvml
import torch

from service.core.errors import ConfigError, DeviceLost, StackSegError
from service.core.hardware import host

log = logging.getLogger(__name__)

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")


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


@dataclass(frozen=True)
class GpuStatus:
    """State of one GPU, None where the driver does not tell. Memory in bytes, power in watts.

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
    """State of the processor and its memory in bytes.

    cores     number that this process may use
    features  instruction sets that decide about speed, those of `FEATURES` that it has
    """

    name: str
    cores: int
    memory_total: int | None
    memory_available: int | None
    features: tuple[str, ...]


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


def explain_no_cuda(built: str | None = torch.version.cuda, nvml: Any = pynvml) -> str:
    """Return why torch, built for CUDA version `built` (None: for CPUs only), sees no CUDA device, and what to do."""
    if built is None:
        return "this torch is a build for CPUs; install one for CUDA, in an image with the build argument VARIANT=gpu"
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return (
            "there is no NVIDIA driver here; install it, and give a container its GPU (the NVIDIA container toolkit,"
            " --gpus all)"
        )
    try:
        driver, number = _query(nvml.nvmlSystemGetDriverVersion), _query(nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
    finally:
        nvml.nvmlShutdown()
    supported = f"{number // 1000}.{number % 1000 // 10}"
    # A driver runs every minor version of its major one.
    if number and number // 1000 < int(built.partition(".")[0]):
        return (
            f"the NVIDIA driver {driver} is too old: it runs CUDA up to {supported}, and this torch is built for"
            f" {built}; update the driver, or install a torch for an older CUDA (build argument CUDA of the image)"
        )
    return f"the NVIDIA driver {driver} shows this process no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"


@cache
def _warn_of_unused_gpus() -> None:
    """Log once that there are GPUs which torch cannot use, where the CPU takes their place."""
    if found := gpus():
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


def gpus(nvml: Any = pynvml) -> tuple[GpuStatus, ...]:
    """Query every NVIDIA GPU of the host through NVML; empty without a driver."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _query(nvml.nvmlSystemGetDriverVersion)
        return tuple(_gpu(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def cpu() -> CpuStatus:
    """Query the processor of this host and its memory."""
    return CpuStatus(
        name=host.cpu_field("model name") or platform.processor() or platform.machine(),
        cores=host.usable_cores(),
        memory_total=host.read_meminfo("MemTotal"),
        memory_available=host.available_memory(),
        features=tuple(flag for flag in FEATURES if flag in host.cpu_field("flags").split()),
    )


def device_name(device: torch.device) -> str:
    """Return the name that the maker gives the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu().name


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


def find_loss(device: torch.device, error: BaseException, driver: Driver) -> DeviceLost | None:
    """Return DeviceLost where the device does not work any more after an `error`, None where it does."""
    if isinstance(error, StackSegError) or driver.is_on_host(device) or is_out_of_memory(error):
        return error if isinstance(error, DeviceLost) else None
    if driver.is_working(device):
        return None
    return DeviceLost(f"{device} has failed and must be started anew with the service.")


def mark_end(device: torch.device) -> Callable[[], object]:
    """Mark the end of the work on the device's current stream; what is returned sleeps until that is done."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


class CudaTimer:
    """Seconds that a CUDA device takes for parts of the work of its current stream.

    The host's time is left out as long as each part is one launch, such as the replay of a graph.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._parts: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the work that is launched in the meantime."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._cuda.current_stream(self._device)
        start.record(stream)
        yield
        end.record(stream)
        self._parts.append((start, end))

    @property
    def seconds(self) -> float:
        """Sum of all parts, once the device has finished them."""
        milliseconds: float = sum(start.elapsed_time(end) for start, end in self._parts)
        return milliseconds / 1000


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


def _gpu(nvml: Any, index: int, driver: str | None) -> GpuStatus:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _query(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    utilisation = _query(nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _query(nvml.nvmlDeviceGetPowerUsage, handle)
    return GpuStatus(
        index=index,
        name=_query(nvml.nvmlDeviceGetName, handle) or "unknown",
        driver=driver,
        compute_capability=".".join(map(str, capability)) if capability else None,
        memory_total=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        reserved_bytes=_reserved(_query(nvml.nvmlDeviceGetUUID, handle)),
        utilisation_percent=int(utilisation.gpu) if utilisation else None,
        temperature_celsius=_query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_watts=milliwatts / 1000 if milliwatts is not None else None,
    )


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer, or None where this GPU does not support the query."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _reserved(uuid: str | None) -> int:
    """Return the bytes that torch holds on the GPU with this UUID; indices of NVML ignore CUDA_VISIBLE_DEVICES."""
    if uuid is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) in uuid:
            return torch.cuda.memory_reserved(index)
    return 0
