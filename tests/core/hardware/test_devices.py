from __future__ import annotations

import errno
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from service.core.errors import ConfigError
from service.core.hardware import devices, gpus, host

NO_GPU = not torch.cuda.is_available()


@pytest.mark.skipif(not NO_GPU, reason="describes a machine without a GPU")
def test_without_a_gpu_auto_selects_the_cpu_and_gpu_names_are_rejected() -> None:
    assert devices.choose_device("cpu") == devices.choose_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(ConfigError, match=f"device.name is {name}.*cpu or auto"):
            devices.choose_device(name)


PASCAL, VOLTA, TURING, AMPERE, HOPPER = (6, 1), (7, 0), (7, 5), (8, 0), (9, 0)
FP16 = {torch.float16}
BOTH = {torch.float16, torch.bfloat16}


@pytest.mark.parametrize(
    ("capability", "fastest"), [(PASCAL, set()), (VOLTA, FP16), (TURING, FP16), (AMPERE, BOTH), (HOPPER, BOTH)]
)
def test_cuda_precisions_follow_the_compute_capability(capability: tuple[int, int], fastest: set[torch.dtype]) -> None:
    assert devices.list_cuda_precisions(capability) == fastest | {torch.float32}


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
def test_faulty_precisions_depend_on_the_cudnn_version(
    capability: tuple[int, int], cudnn_version: int | None, faulty: set[torch.dtype]
) -> None:
    assert devices.list_faulty_cuda_precisions(capability, cudnn_version).keys() == faulty


@pytest.mark.parametrize(
    ("version", "start"), [(91002, "cuDNN 9.10.2 is installed."), (None, "PyTorch cannot find cuDNN.")]
)
def test_explanation_of_faulty_cudnn_says_what_to_install(version: int | None, start: str) -> None:
    explanation = devices.explain_faulty_cudnn(version) or ""
    assert explanation.startswith(start)
    assert "Install cuDNN 9.15 or later" in explanation


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_bf16_support_of_the_cpu_depends_on_its_flags() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    native = devices.list_native_precisions(torch.device("cpu"))
    assert devices.list_faulty_precisions(torch.device("cpu")) == {}
    assert torch.float32 in native
    assert (torch.bfloat16 in native) == ("avx512_bf16" in flags or "amx_tile" in flags)


def test_cpu_status_describes_this_machine() -> None:
    cpu = host.query_host()
    assert cpu.name
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    if cpu.memory_total is not None and cpu.memory_available is not None:
        assert 0 < cpu.memory_available <= cpu.memory_total
    assert set(cpu.features) <= set(host.INSTRUCTION_SETS)
    assert devices.get_device_name(torch.device("cpu")) == cpu.name


def test_memory_of_cuda_graphs_between_replays_is_not_free() -> None:
    pools = ((6, (0, 0), 50, 20), (6, (0, 1), 40, 10), (6, (3, 0), 20, 20), (7, (0, 2), 30, 0))
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}
        for device, pool, total, allocated in pools
    ]
    # GPU 6 has 100 free bytes, and torch has reserved 60 bytes that are not allocated.
    stats = {"reserved_bytes": {"all": {"current": 110}}, "allocated_bytes": {"all": {"current": 50}}}
    cuda, device = Mock(), torch.device("cuda", 6)
    cuda.mem_get_info.return_value, cuda.memory_stats_as_nested_dict.return_value = (100, 1000), stats
    cuda.memory_snapshot.return_value = segments
    assert devices.query_free_bytes(device, cuda) == 100 + 60, "before any graph was recorded"
    assert devices.measure_graph_pools(device, cuda) == 60
    assert devices.query_free_bytes(device, cuda) == 100 + 30
    assert devices.measure_graph_pools(torch.device("cuda", 7), cuda) == 30
    cuda.memory_snapshot.return_value = segments[:1]
    assert devices.measure_graph_pools(device, cuda) == 0
    assert devices.query_free_bytes(device, cuda) == 100 + 60
    assert devices.measure_graph_pools(torch.device("cpu")) == 0


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU")
def test_gpu_status_includes_memory_of_this_process() -> None:
    tensor = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert max(status.reserved_bytes for status in gpus.query_gpus()) >= tensor.numel()
    assert devices.choose_device("auto").type == "cuda"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc caches freed memory")
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
def test_out_of_memory_errors_of_libraries_are_recognized(error: BaseException) -> None:
    assert devices.is_out_of_memory(error)
    assert not devices.is_out_of_memory(RuntimeError("allocation"))
    assert not devices.is_out_of_memory(OSError(errno.EACCES, "Cannot allocate memory"))


def test_device_is_lost_only_if_it_fails_repeatedly() -> None:
    device, full = torch.device("cpu"), torch.OutOfMemoryError("no")
    capturing = RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing stream")
    assert devices.is_working(device)
    assert devices.is_working(device, Mock(side_effect=[capturing, capturing, True]), pause_seconds=0)
    assert not devices.is_working(device, Mock(side_effect=[capturing] * 3), pause_seconds=0)
    assert devices.is_working(device, Mock(side_effect=[full] * 3), pause_seconds=0)


def test_freed_memory_is_returned_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [bytearray(2000) for _ in range(50_000)]
    last = blocks[-1]
    del blocks
    before = resident()
    devices.release_memory(torch.device("cpu"))
    assert before - resident() > 50_000_000
    assert len(last) == 2000


def test_thread_count_of_torch_is_set_per_thread():
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(devices.set_torch_threads, 2).result()
        other.submit(devices.set_torch_threads, 1).result()
        assert one.submit(torch.get_num_threads).result() == 2
        assert other.submit(torch.get_num_threads).result() == 1
        one.submit(devices.set_torch_threads, 0).result()
        assert one.submit(torch.get_num_threads).result() == host.count_usable_cores()
        one.submit(devices.set_torch_threads, before).result()
