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
def test_without_a_driver_there_are_no_gpus() -> None:
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
    """NVML with two GPUs; the questions named in `unsupported` raise what NVML raises for old or virtual GPUs."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *unsupported: str) -> None:
        self.unsupported = unsupported
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._answer(name.removeprefix("nvml"), *arguments)

    def _answer(self, question: str, *arguments: Any) -> Any:
        if question in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        match question:
            case "Init":
                self.open += 1
            case "Shutdown":
                self.open -= 1
            case "DeviceGetHandleByIndex":
                return arguments[0]
            case "DeviceGetName" | "DeviceGetUUID":
                return f"Fake {arguments[0]}"
        return ANSWERS.get(question)


def test_gpus_are_described_by_the_driver() -> None:
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


def test_what_a_gpu_does_not_support_is_none() -> None:
    driver = FakeDriver("DeviceGetName", "DeviceGetUUID", *(ANSWERS.keys() - {"DeviceGetCount"}))
    assert gpus.query_gpus(driver)[0] == gpus.GpuStatus(0, "unknown", None, None, None, None, 0, None, None, None)


@pytest.mark.parametrize(
    ("built", "driver", "reason"),
    [
        (None, FakeDriver(), "build for CPUs"),
        ("13.0", FakeDriver("Init"), "no NVIDIA driver"),
        ("13.0", FakeDriver(), "driver 580.65 is too old: it runs CUDA up to 12.4, and this torch is built for 13.0"),
        ("12.6", FakeDriver(), "driver 580.65 shows this process no GPU"),
        ("13.0", FakeDriver("SystemGetCudaDriverVersion_v2"), "driver 580.65 shows this process no GPU"),
    ],
    ids=["no CUDA", "no driver", "old driver", "no device", "unknown"],
)
def test_why_there_is_no_cuda_device_says_what_to_do(built: str | None, driver: FakeDriver, reason: str) -> None:
    assert reason in gpus.explain_no_cuda(built, driver)
    assert driver.open == 0


@pytest.mark.parametrize("driver", [FakeDriver("Init"), FakeDriver("DeviceGetCount")], ids=["start", "count"])
def test_a_driver_that_fails_means_no_gpus(driver: FakeDriver) -> None:
    assert gpus.query_gpus(driver) == ()
    assert driver.open == 0
