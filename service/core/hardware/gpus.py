"""State of the NVIDIA GPUs on this host, queried from the driver through NVML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml
import torch


@dataclass(frozen=True)
class GpuStatus:
    """State of one GPU. Memory is in bytes; values that the driver does not report are None.

    reserved_bytes  memory that PyTorch has reserved in this process, whether in use or cached
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


def explain_no_cuda(torch_cuda_version: str | None = torch.version.cuda, nvml: Any = pynvml) -> str:
    """Explain why PyTorch finds no CUDA device, and what to do.

    torch_cuda_version  CUDA version that PyTorch was built for; None for a build without CUDA
    nvml                the `pynvml` module; tests replace it
    """
    if torch_cuda_version is None:
        return (
            "this build of PyTorch supports only CPUs; install a build for CUDA, or build the container image with the"
            " build argument VARIANT=gpu"
        )
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return (
            "no NVIDIA driver was found; install it, and give containers access to the GPU (NVIDIA Container Toolkit,"
            " --gpus all)"
        )
    try:
        driver_version, driver_cuda_version = (
            _query_nvml(nvml.nvmlSystemGetDriverVersion),
            _query_nvml(nvml.nvmlSystemGetCudaDriverVersion_v2) or 0,
        )
    finally:
        nvml.nvmlShutdown()
    supported_version = f"{driver_cuda_version // 1000}.{driver_cuda_version % 1000 // 10}"
    # A driver supports all minor versions of its major CUDA version.
    if driver_cuda_version and driver_cuda_version // 1000 < int(torch_cuda_version.partition(".")[0]):
        return (
            f"the NVIDIA driver {driver_version} is too old: it supports CUDA up to {supported_version}, but PyTorch"
            f" was built for CUDA {torch_cuda_version}; update the driver, or install a build of PyTorch for an older"
            " CUDA version (build argument CUDA of the container image)"
        )
    return (
        f"the NVIDIA driver {driver_version} exposes no GPU to this process; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    )


def query_gpus(nvml: Any = pynvml) -> tuple[GpuStatus, ...]:
    """Query every NVIDIA GPU on this host through NVML; return an empty tuple if there is no driver."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _query_nvml(nvml.nvmlSystemGetDriverVersion)
        return tuple(_query_gpu(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _query_gpu(nvml: Any, index: int, driver: str | None) -> GpuStatus:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _query_nvml(nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _query_nvml(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    utilization = _query_nvml(nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _query_nvml(nvml.nvmlDeviceGetPowerUsage, handle)
    return GpuStatus(
        index=index,
        name=_query_nvml(nvml.nvmlDeviceGetName, handle) or "unknown",
        driver=driver,
        compute_capability=".".join(map(str, capability)) if capability else None,
        memory_total=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        reserved_bytes=_count_reserved_bytes(_query_nvml(nvml.nvmlDeviceGetUUID, handle)),
        utilisation_percent=int(utilization.gpu) if utilization else None,
        temperature_celsius=_query_nvml(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_watts=milliwatts / 1000 if milliwatts is not None else None,
    )


def _query_nvml(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML query, or None if this GPU does not support the query."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _count_reserved_bytes(uuid: str | None) -> int:
    """Return how many bytes PyTorch has reserved on the GPU with this UUID.

    GPUs are matched by UUID because NVML's indices ignore CUDA_VISIBLE_DEVICES.
    """
    if uuid is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) in uuid:
            return torch.cuda.memory_reserved(index)
    return 0
