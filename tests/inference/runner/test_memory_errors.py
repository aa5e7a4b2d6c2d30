import pytest
import torch
from fakes import SeparateMemoryDriver

from service.core.errors import DeviceLost, OutOfMemory
from service.inference.runner.memory_errors import check_memory, translate_errors
from service.inference.types import ResourceEstimate


def test_failed_device_is_reported_as_lost_but_a_working_one_is_not():
    needed = ResourceEstimate(1, 2, 0.25, (1, 1, 1), host_bytes=1, device_bytes=0)
    gpu, driver = torch.device("cuda", 0), SeparateMemoryDriver()
    driver.is_healthy = False
    for error in (RuntimeError("CUDA error: device-side assert triggered"), AssertionError()):
        with pytest.raises(DeviceLost, match="cuda:0 has failed"), translate_errors(needed, gpu, driver):
            raise error
    with pytest.raises(RuntimeError, match="triggered"), translate_errors(needed, torch.device("cpu")):
        raise RuntimeError("triggered")
    with pytest.raises(OutOfMemory), translate_errors(needed, gpu, driver):
        raise torch.OutOfMemoryError("no")


@pytest.mark.parametrize(("side", "memory"), [("host", "memory"), ("device", "device memory")])
def test_volume_that_cannot_fit_is_rejected_immediately(side, memory):
    def check(free):
        check_memory(needed, *((free, None) if side == "host" else (0, free)))

    needed = ResourceEstimate(1, 2, 0.25, (1, 1, 1), **{"host_bytes": 0, "device_bytes": 0, f"{side}_bytes": 3 * 2**30})
    check(None)
    check(3 * 2**30)
    with pytest.raises(OutOfMemory, match=f"about 3.0 GiB of {memory}, but only 2.0 GiB is free") as caught:
        check(2 * 2**30)
    assert caught.value.needed_bytes == 3 * 2**30
