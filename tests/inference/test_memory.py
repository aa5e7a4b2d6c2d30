import errno

import pytest
import torch

from service.core.errors import DeviceLost, OutOfMemory
from service.inference.estimate import Estimate
from service.inference.memory import check_memory, is_out_of_memory, translate_errors


def test_any_allocation_that_is_mentioned_is_not_exhausted_memory():
    assert not is_out_of_memory(RuntimeError("allocation"))
    assert not is_out_of_memory(OSError(errno.EACCES, "Cannot allocate memory"))


def test_device_that_answers_no_more_is_lost_and_one_that_does_is_not():
    needed = Estimate(1, 2, 0.25, (1, 1, 1), host_bytes=1, device_bytes=0)
    gone = torch.device("meta")  # holds no numbers, so that nothing computed on it can be read
    with pytest.raises(DeviceLost, match="meta has failed"), translate_errors(needed, gone):
        raise RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="triggered"), translate_errors(needed, torch.device("cpu")):
        raise RuntimeError("triggered")
    with pytest.raises(OutOfMemory), translate_errors(needed, gone):
        raise torch.OutOfMemoryError("no")


def test_a_volume_that_cannot_fit_is_refused_at_once():
    needed = Estimate(1, 2, 0.25, (1, 1, 1), host_bytes=3 * 2**30, device_bytes=0)
    check_memory(needed, None)
    check_memory(needed, 3 * 2**30)
    with pytest.raises(OutOfMemory, match=r"about 3.0 GiB of memory, 2.0 GiB are free") as caught:
        check_memory(needed, 2 * 2**30)
    assert caught.value.needed_bytes == needed.host_bytes
