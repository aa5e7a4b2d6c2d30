"""NVIDIA GPUs of this host, as its driver (NVML) describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml
import torch


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


def query_gpus(nvml: Any = pynvml) -> tuple[GpuStatus, ...]:
    """Query every NVIDIA GPU of the host through NVML; empty without a driver."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _query(nvml.nvmlSystemGetDriverVersion)
        return tuple(_query_gpu(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _query_gpu(nvml: Any, index: int, driver: str | None) -> GpuStatus:
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
