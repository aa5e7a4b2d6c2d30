import pytest
import torch
from fakes import SeparateDevice

from service.core.errors import DeviceLost, OutOfMemory
from service.inference.runner.memory_errors import check_memory, translate_errors
from service.inference.types import Estimate


def test_device_that_answers_no_more_is_lost_and_one_that_does_is_not():
    needed = Estimate(1, 2, 0.25, (1, 1, 1), host_bytes=1, device_bytes=0)
    gpu, driver = torch.device("cuda", 0), SeparateDevice()
    driver.working = False
    for error in (RuntimeError("CUDA error: device-side assert triggered"), AssertionError()):
        with pytest.raises(DeviceLost, match="cuda:0 has failed"), translate_errors(needed, gpu, driver):
            raise error
    with pytest.raises(RuntimeError, match="triggered"), translate_errors(needed, torch.device("cpu")):
        raise RuntimeError("triggered")
    with pytest.raises(OutOfMemory), translate_errors(needed, gpu, driver):
        raise torch.OutOfMemoryError("no")


def test_a_volume_that_cannot_fit_is_refused_at_once():
    needed = Estimate(1, 2, 0.25, (1, 1, 1), host_bytes=3 * 2**30, device_bytes=0)
    check_memory(needed, None)
    check_memory(needed, 3 * 2**30)
    with pytest.raises(OutOfMemory, match=r"about 3.0 GiB of memory, 2.0 GiB are free") as caught:
        check_memory(needed, 2 * 2**30)
    assert caught.value.needed_bytes == needed.host_bytes


def test_memory_of_the_device_is_checked_as_that_of_the_host():
    needed = Estimate(1, 2, 0.25, (1, 1, 1), host_bytes=0, device_bytes=3 * 2**30)
    check_memory(needed, 0, None)
    check_memory(needed, 0, 3 * 2**30)
    with pytest.raises(OutOfMemory, match=r"about 3.0 GiB of memory of the device, 2.0 GiB are free") as caught:
        check_memory(needed, 0, 2 * 2**30)
    assert caught.value.needed_bytes == needed.device_bytes
