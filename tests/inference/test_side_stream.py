"""What one stream has made is used by another only once it is done, and not freed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from service.core.volume import Volume
from service.inference.device_image import SentVolume
from service.inference.side_stream import SideStream


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """As much of `torch.cuda` as a side stream uses."""

    Stream = FakeStream

    def __init__(self) -> None:
        self.now = self.default = FakeStream(torch.device("cuda", 0))

    def current_stream(self, _device: torch.device) -> FakeStream:
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class FakeTensor:
    def __init__(self) -> None:
        self.users: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.users.append(stream)


def test_each_stream_waits_for_the_one_that_a_tensor_comes_from() -> None:
    cuda: Any = FakeCuda()
    aside = SideStream(torch.device("cuda", 0), "decode", cuda)
    scores: Any = FakeTensor()
    planes: Any = FakeTensor()
    with aside.current():
        own = cuda.now
    assert own is not cuda.now is cuda.default
    aside.take_over(scores)
    assert (scores.users, own.waited_for, cuda.default.waited_for) == ([own], [cuda.default], [])
    aside.hand_over(planes)
    assert (planes.users, own.waited_for, cuda.default.waited_for) == ([cuda.default], [cuda.default], [own])


def test_requests_share_the_stream_of_each_purpose() -> None:
    cuda, used = FakeCuda(), []
    fake: Any = cuda
    for purpose in ("prepare", "decode", "prepare", "decode"):
        with SideStream(torch.device("cuda", 0), purpose, fake).current():
            used.append(cuda.now)
    assert used[:2] == used[2:]
    assert used[0] is not used[1]


def test_a_device_that_computes_in_order_has_none() -> None:
    aside, tensor = SideStream(torch.device("cpu"), "decode", None), torch.zeros(1)
    with aside.current():
        aside.take_over(tensor)
    aside.hand_over(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_volume_is_sent_and_counted_while_the_device_computes_something_else() -> None:
    device = torch.device("cuda", 0)
    pixels = np.random.default_rng(0).integers(0, 2**16, (1, 8, 256, 256), np.uint16)
    aside, busy = SideStream(device, "prepare"), torch.cuda.Event()
    # A kernel is loaded at its first launch, which waits for the whole device, as does new memory for a stream.
    with aside.current():
        SentVolume(Volume.from_array(pixels), device).count_keys(0)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    busy.record()
    with aside.current():
        sent = SentVolume(Volume.from_array(pixels), device)
        counts = sent.count_keys(0)
    assert not busy.query(), "that waited for the windows"
    assert np.array_equal(counts, np.bincount(pixels.ravel(), minlength=2**16))
    aside.hand_over(sent.planes(0, 0, 8))
    assert np.array_equal(sent.planes(0, 0, 8).int().cpu().numpy(), pixels[0])
