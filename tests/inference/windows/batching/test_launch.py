"""Batches on an asynchronous device, which never waits for the host and never delivers unfinished scores."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fakes import bind_to_variants, wait_until
from torch import Tensor

from service.core.config import Settings
from service.core.errors import NonFiniteScores
from service.engine.cuda.events import CudaTimer
from service.inference.windows.batching.batcher import WindowBatcher, make_batcher
from service.inference.windows.batching.window_request import BatchShare
from service.inference.windows.blending import Blending
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import SlidingWindow

ROI, CPU = (4, 4, 4), torch.device("cpu")


class AsynchronousDevice:
    """Device that finishes a batch only when a thread waits for the batch.

    before_done  called before each wait ends; simulates a device that is slower than the threads of its requests
    log          launches and waits, with the number of the batch, in order
    """

    def __init__(self) -> None:
        self.before_done: Callable[[], object] = lambda: None
        self.log: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self._launched = 0

    def mark(self) -> Callable[[], None]:
        self._launched += 1
        number = self._launched
        self.log.append(("launch", number))

        def wait() -> None:
            self.log.append(("wait", number))
            self.before_done()
            if self.error is not None:
                raise self.error

        return wait


@pytest.fixture
def async_device() -> AsynchronousDevice:
    return AsynchronousDevice()


@pytest.fixture
def device(async_device: AsynchronousDevice) -> Iterator[WindowBatcher]:
    batcher = WindowBatcher("device", mark=async_device.mark)
    batcher.start()
    yield batcher
    batcher.close()
    assert batcher.join(10)


def make_windows(capacity: int = 2, network: Callable[[Tensor], Tensor] = lambda x: x) -> SlidingWindow:
    """Return windows that torch blends, as on a GPU."""
    no_kernels = bind_to_variants(window_kernels)
    return SlidingWindow(network, 1, ROI, capacity, blending=Blending(), device=CPU, kernels=no_kernels)


def run(
    device: WindowBatcher, window: SlidingWindow, image: Tensor, overlap: float = 0.25, **options: object
) -> Tensor:
    slabs = device.run(window, image, overlap, **{"cancelled": lambda: False, "progress": lambda *_: None, **options})  # type: ignore[arg-type]
    scores = torch.full_like(image, torch.nan)
    for slab in slabs:
        z, y = slab.scores.shape[2:4]
        scores[:, :, slab.z0 : slab.z0 + z, slab.y0 : slab.y0 + y] = slab.scores
    return scores


def test_each_full_batch_is_launched_before_the_previous_one_is_waited_for(
    device: WindowBatcher, async_device: AsynchronousDevice
) -> None:
    window, image = make_windows(), torch.rand(1, 1, 40, 4, 4)
    async_device.before_done = lambda: wait_until(
        lambda: all(not each.num_pending_slabs or not each.scan.num_remaining for each in list(device._requests))
    )
    counts, shares = list[tuple[int, int]](), list[BatchShare]()
    scores = run(
        device,
        window,
        image,
        0.0,
        progress=lambda done, total: counts.append((done, total)),
        report_share=shares.append,
    )
    torch.testing.assert_close(scores, image)
    events = [event for number in range(1, 5) for event in (("launch", number + 1), ("wait", number))]
    assert async_device.log == [("launch", 1), *events, ("wait", 5)], "one wait per batch, and one batch ahead"
    assert counts == [(done, 10) for done in (2, 4, 6, 8, 10)]
    assert sum(share.num_windows for share in shares) == 10


@pytest.mark.parametrize("size", [(9, 11, 13), (2, 20, 3), (4, 4, 4)])
def test_scores_equal_those_of_synchronous_windows(device: WindowBatcher, size: tuple[int, int, int]) -> None:
    window, image = make_windows(3, lambda x: x * 2), torch.randn(1, 1, *size)
    expected = torch.cat([slab.scores.flatten() for slab in window.run(image, 0.25)])
    slabs = device.run(window, image, 0.25, cancelled=lambda: False, progress=lambda *_: None)
    assert torch.equal(torch.cat([slab.scores.flatten() for slab in slabs]), expected)


@pytest.mark.parametrize("size", [(12, 9, 9), (4, 4, 4)])
def test_non_finite_scores_are_never_delivered(device: WindowBatcher, size: tuple[int, int, int]) -> None:
    image = torch.zeros(1, 1, *size)
    image[0, 0, -1, -1, -1] = torch.inf
    with pytest.raises(NonFiniteScores):
        run(device, make_windows(), image)
    torch.testing.assert_close(run(device, make_windows(), torch.ones(1, 1, *size)), torch.ones(1, 1, *size))


def test_error_while_waiting_fails_the_requests_of_the_batch(
    device: WindowBatcher, async_device: AsynchronousDevice
) -> None:
    async_device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        run(device, make_windows(), torch.rand(1, 1, 20, 4, 4))
    async_device.error = None
    image = torch.rand(1, 1, 20, 4, 4)
    torch.testing.assert_close(run(device, make_windows(), image, 0.0), image)
    wait_until(lambda: device.heartbeat is None)


def test_call_waits_for_launched_batches(device: WindowBatcher, async_device: AsynchronousDevice) -> None:
    began, gate = threading.Event(), threading.Event()

    def network(batch: Tensor) -> Tensor:
        began.set()
        gate.wait(10)
        return batch

    threads = [
        threading.Thread(target=run, args=(device, make_windows(2, network), torch.rand(1, 1, 16, 4, 4), 0.0)),
        threading.Thread(target=lambda: device.call(lambda: async_device.log.append(("call", 0)))),
    ]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    wait_until(lambda: bool(device._calls))
    gate.set()
    for thread in threads:
        thread.join(10)
    assert async_device.log == [("launch", 1), ("wait", 1), ("call", 0), ("launch", 2), ("wait", 2)]


def test_only_devices_with_their_own_memory_get_batches_in_advance() -> None:
    assert make_batcher(Settings(), CPU, uses_host_memory=True)._mark is None
    assert make_batcher(Settings(), CPU, uses_host_memory=True)._max_stream_batches == 1
    assert make_batcher(Settings(), CPU, uses_host_memory=False)._max_stream_batches == 2


class FakeTimer:
    """Timer that measures two seconds for each network call."""

    seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        yield
        self.seconds += 2.0


def test_reported_seconds_are_measured_by_the_clock_of_the_device(async_device: AsynchronousDevice) -> None:
    device = WindowBatcher("device", mark=async_device.mark, make_timer=FakeTimer)
    device.start()
    shares = list[BatchShare]()
    run(device, make_windows(), torch.rand(1, 1, 24, 4, 4), 0.0, report_share=shares.append)
    assert [share.device_seconds for share in shares] == [2.0, 2.0, 2.0]
    async_device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        run(device, make_windows(), torch.rand(1, 1, 8, 4, 4))
    device.close()
    assert device.join(10)


class FakeEvent:
    def __init__(self, cuda: FakeClock, *, enable_timing: bool) -> None:
        assert enable_timing
        self._cuda = cuda

    def record(self, stream: object) -> None:
        self.at = self._cuda.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.at - self.at)


class FakeClock:
    """The part of `torch.cuda` that `CudaTimer` uses; `now` is the clock of the device in seconds."""

    now = 0.0

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, enable_timing=enable_timing)

    def current_stream(self, _device: torch.device) -> object:
        return self


def test_timer_sums_the_parts_that_it_measures() -> None:
    cuda = FakeClock()
    timer = CudaTimer(torch.device("cuda", 0), cuda)
    for seconds in (0.25, 0.5):
        cuda.now += 10.0
        with timer.measure():
            cuda.now += seconds
    assert timer.seconds == pytest.approx(0.75)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_launching_batches_never_synchronizes_with_the_device() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    network = torch.nn.Conv3d(1, 1, 3, padding=1).to(cuda).requires_grad_(requires_grad=False)
    window = SlidingWindow(network, 1, (32, 32, 32), 2, blending=Blending(), device=cuda)
    device = make_batcher(Settings(), cuda, uses_host_memory=False)
    image = torch.rand(1, 1, 64, 96, 96, device=cuda)
    expected = [slab.scores for slab in window.run(image, 0.25)]
    device.start()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        slabs = list(device.run(window, image, 0.25, cancelled=lambda: False, progress=lambda *_: None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        device.close()
    assert all(torch.equal(slab.scores, scores) for slab, scores in zip(slabs, expected, strict=True))
