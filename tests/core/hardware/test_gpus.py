from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from service.core.hardware import gpus

NO_GPU = not torch.cuda.is_available()


@pytest.mark.skipif(not NO_GPU, reason="describes a machine without a GPU")
def test_no_gpus_are_found_without_a_driver() -> None:
    assert gpus.query_gpus() == ()


ANSWERS: dict[str, Any] = {
    "SystemGetDriverVersion": "580.65",
    "SystemGetCudaDriverVersion_v2": 12040,
    "DeviceGetCount": 2,
    "DeviceGetMemoryInfo": SimpleNamespace(total=80, used=30),
    "DeviceGetCudaComputeCapability": (9, 0),
    "DeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=7),
    "DeviceGetTemperature": 41,
    "DeviceGetPowerUsage": 123456,
}


class FakeDriver:
    """Fake NVML with two GPUs. Queries in `unsupported` raise the error that NVML raises for old or virtual GPUs."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *unsupported: str) -> None:
        self.unsupported = unsupported
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._answer(name.removeprefix("nvml"), *arguments)

    def _answer(self, query: str, *arguments: Any) -> Any:
        if query in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        match query:
            case "Init":
                self.open += 1
            case "Shutdown":
                self.open -= 1
            case "DeviceGetHandleByIndex":
                return arguments[0]
            case "DeviceGetName" | "DeviceGetUUID":
                return f"Fake {arguments[0]}"
        return ANSWERS.get(query)


def test_gpu_status_is_queried_from_the_driver() -> None:
    driver = FakeDriver()
    first, second = gpus.query_gpus(driver)
    assert second == gpus.GpuStatus(
        index=1,
        name="Fake 1",
        driver="580.65",
        compute_capability="9.0",
        memory_total=80,
        memory_used=30,
        reserved_bytes=0,
        utilisation_percent=0,
        temperature_celsius=41,
        power_watts=123.456,
    )
    assert first.name == "Fake 0"
    assert driver.open == 0


def test_unsupported_queries_return_none() -> None:
    driver = FakeDriver("DeviceGetName", "DeviceGetUUID", *(ANSWERS.keys() - {"DeviceGetCount"}))
    assert gpus.query_gpus(driver)[0] == gpus.GpuStatus(0, "unknown", None, None, None, None, 0, None, None, None)


@pytest.mark.parametrize(
    ("built", "driver", "reason"),
    [
        (None, FakeDriver(), "supports only CPUs"),
        ("13.0", FakeDriver("Init"), "no NVIDIA driver"),
        (
            "13.0",
            FakeDriver(),
            "driver 580.65 is too old: it supports CUDA up to 12.4, but PyTorch was built for CUDA 13.0",
        ),
        ("12.6", FakeDriver(), "driver 580.65 exposes no GPU to this process"),
        ("13.0", FakeDriver("SystemGetCudaDriverVersion_v2"), "driver 580.65 exposes no GPU to this process"),
    ],
    ids=["no CUDA", "no driver", "old driver", "no device", "unknown"],
)
def test_missing_cuda_device_is_explained(built: str | None, driver: FakeDriver, reason: str) -> None:
    assert reason in gpus.explain_no_cuda(built, driver)
    assert driver.open == 0


@pytest.mark.parametrize("driver", [FakeDriver("Init"), FakeDriver("DeviceGetCount")], ids=["start", "count"])
def test_no_gpus_are_found_if_the_driver_fails(driver: FakeDriver) -> None:
    assert gpus.query_gpus(driver) == ()
    assert driver.open == 0
