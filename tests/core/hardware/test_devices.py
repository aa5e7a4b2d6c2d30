from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from service.core import hardware
from service.core.errors import ConfigError
from service.core.hardware import host

NO_GPU = not torch.cuda.is_available()


@pytest.mark.parametrize("name", ["cpu", "auto"])
@pytest.mark.skipif(not NO_GPU, reason="describes a machine without a GPU")
def test_without_a_gpu_the_cpu_is_chosen(name: str) -> None:
    assert hardware.choose_device(name) == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
@pytest.mark.skipif(not NO_GPU, reason="describes a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device.name is {name}.*cpu or auto"):
        hardware.choose_device(name)


@pytest.mark.parametrize(
    ("capability", "fastest"),
    [
        ((6, 1), {torch.float32}),
        ((7, 0), {torch.float32, torch.float16}),
        ((7, 5), {torch.float32, torch.float16}),
        ((8, 0), {torch.float32, torch.float16, torch.bfloat16}),
        ((9, 0), {torch.float32, torch.float16, torch.bfloat16}),
    ],
)
def test_cuda_precisions_follow_the_compute_capability(capability: tuple[int, int], fastest: set[torch.dtype]) -> None:
    assert hardware.cuda_precisions(capability) == fastest


PASCAL = (6, 1)
VOLTA = (7, 0)
TURING = (7, 5)
AMPERE = (8, 0)
HOPPER = (9, 0)
FP16 = {torch.float16}
BOTH = {torch.float16, torch.bfloat16}


@pytest.mark.parametrize(
    ("capability", "cudnn_version", "faulty"),
    [
        (AMPERE, 90701, set()),
        (AMPERE, 90800, BOTH),
        (AMPERE, 91002, BOTH),
        (HOPPER, 91499, BOTH),
        (HOPPER, 91500, set()),
        (HOPPER, 91900, set()),
        (TURING, 91002, FP16),
        (VOLTA, 91002, set()),
        (PASCAL, 91002, set()),
        (HOPPER, None, BOTH),
        (VOLTA, None, FP16),
        (PASCAL, None, set()),
    ],
)
def test_16_bit_precisions_are_faulty_by_the_version_of_cudnn(
    capability: tuple[int, int], cudnn_version: int | None, faulty: set[torch.dtype]
) -> None:
    assert hardware.faulty_cuda_precisions(capability, cudnn_version).keys() == faulty


def test_the_cpu_has_no_faulty_precisions() -> None:
    assert hardware.faulty_precisions(torch.device("cpu")) == {}


def test_a_faulty_cudnn_is_named_with_what_to_install() -> None:
    found, missing = hardware.explain_faulty_cudnn(91002), hardware.explain_faulty_cudnn(None)
    assert found is not None
    assert found.startswith("cuDNN 9.10.2 is installed.")
    assert missing is not None
    assert missing.startswith("torch finds no cuDNN")
    assert "Install cuDNN 9.15 or later" in found
    assert "Install cuDNN 9.15 or later" in missing


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_the_cpu_computes_bf16_where_its_flags_say_so() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    native = hardware.native_precisions(torch.device("cpu"))
    assert torch.float32 in native
    assert (torch.bfloat16 in native) == ("avx512_bf16" in flags or "amx_tile" in flags)


def test_cpu_describes_this_machine() -> None:
    cpu = hardware.cpu()
    assert cpu.name
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    if cpu.memory_total is not None and cpu.memory_available is not None:
        assert 0 < cpu.memory_available <= cpu.memory_total
    assert set(cpu.features) <= set(hardware.FEATURES)
    assert hardware.device_name(torch.device("cpu")) == cpu.name


@pytest.mark.skipif(not NO_GPU, reason="describes a machine without a GPU")
def test_without_a_driver_there_are_no_gpus() -> None:
    assert hardware.gpus() == ()


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
    first, second = hardware.gpus(driver)
    assert second == hardware.GpuStatus(
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
    driver = FakeDriver(
        "SystemGetDriverVersion",
        "DeviceGetName",
        "DeviceGetUUID",
        "DeviceGetMemoryInfo",
        "DeviceGetCudaComputeCapability",
        "DeviceGetUtilizationRates",
        "DeviceGetTemperature",
        "DeviceGetPowerUsage",
    )
    assert hardware.gpus(driver)[0] == hardware.GpuStatus(0, "unknown", None, None, None, None, 0, None, None, None)


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
    assert reason in hardware.explain_no_cuda(built, driver)
    assert driver.open == 0


@pytest.mark.parametrize("driver", [FakeDriver("Init"), FakeDriver("DeviceGetCount")], ids=["start", "count"])
def test_a_driver_that_fails_means_no_gpus(driver: FakeDriver) -> None:
    assert hardware.gpus(driver) == ()
    assert driver.open == 0


class CudaMemory:
    """A fake of `torch.cuda` that tells of memory: 100 bytes free, 60 cached, of which graphs keep some."""

    def __init__(self) -> None:
        pools = ((6, (0, 0), 50, 20), (6, (0, 1), 40, 10), (6, (3, 0), 20, 20), (7, (0, 2), 30, 0))
        self.segments = [
            {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}
            for device, pool, total, allocated in pools
        ]

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return 100, 1000

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        here = [each for each in self.segments if each["device"] == device.index]
        sums = {"reserved": "total_size", "allocated": "allocated_size"}
        return {f"{name}_bytes": {"all": {"current": sum(each[key] for each in here)}} for name, key in sums.items()}


def test_memory_that_graphs_keep_between_replays_is_not_free() -> None:
    cuda, device = CudaMemory(), torch.device("cuda", 6)
    assert hardware.free_bytes(device, cuda) == 100 + 60, "before any was recorded"
    assert hardware.count_pools(device, cuda) == 60
    assert hardware.free_bytes(device, cuda) == 100 + 30
    assert hardware.count_pools(torch.device("cuda", 7), cuda) == 30
    cuda.segments = cuda.segments[:1]
    assert hardware.count_pools(device, cuda) == 0
    assert hardware.free_bytes(device, cuda) == 100 + 30
    assert hardware.count_pools(torch.device("cpu")) == 0


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU")
def test_a_real_gpu_reports_what_this_process_holds() -> None:
    held = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert max(status.reserved_bytes for status in hardware.gpus()) >= held.numel()
    assert hardware.choose_device("auto").type == "cuda"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what was freed")
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "no"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_runs_out_in_many_words(error: BaseException) -> None:
    assert hardware.is_out_of_memory(error)


def test_any_allocation_that_is_mentioned_is_not_exhausted_memory() -> None:
    assert not hardware.is_out_of_memory(RuntimeError("allocation"))
    assert not hardware.is_out_of_memory(OSError(errno.EACCES, "Cannot allocate memory"))


class Probed:
    """A device that fails with these errors, one after the other, before it answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, _device: torch.device) -> bool:
        if self.errors:
            raise self.errors.pop(0)
        return True


def test_a_device_is_lost_only_if_it_fails_again_and_again() -> None:
    device = torch.device("cpu")
    capturing = RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing stream")
    assert hardware.is_working(device)
    assert hardware.is_working(device, Probed(capturing, capturing), pause=0)
    assert not hardware.is_working(device, Probed(*[capturing] * 3), pause=0)
    assert hardware.is_working(device, Probed(*[torch.OutOfMemoryError("no")] * 3), pause=0)


def test_memory_that_was_freed_is_returned() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [bytearray(2000) for _ in range(50_000)]
    last = blocks[-1]
    del blocks
    before = resident()
    hardware.release_memory(torch.device("cpu"))
    assert before - resident() > 50_000_000
    assert len(last) == 2000


def test_a_thread_keeps_its_number_of_threads_whatever_others_set_later():
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(hardware.use_threads, 2).result()
        other.submit(hardware.use_threads, 1).result()
        assert one.submit(torch.get_num_threads).result() == 2
        assert other.submit(torch.get_num_threads).result() == 1
        one.submit(hardware.use_threads, 0).result()
        assert one.submit(torch.get_num_threads).result() == host.usable_cores()
        one.submit(hardware.use_threads, before).result()
