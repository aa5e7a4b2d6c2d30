from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from fakes import wait_until
from torch import Tensor

from service.core.errors import Cancelled, NonFiniteScores
from service.engine.cuda.events import record_end
from service.inference.windows.batching.batcher import WindowBatcher
from service.inference.windows.batching.launch import Mark
from service.inference.windows.batching.window_request import BatchShare
from service.inference.windows.blending import Blending, Slab
from service.inference.windows.sliding_window import Network, SlidingWindow

ROI = (4, 4, 4)
POISON = 666.0


class RecordingNetwork:
    """Identity network that records its batches, and fails for batches with the value `POISON`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[Tensor] = []
        self.threads: set[str] = set()
        self._seconds = seconds

    def __call__(self, batch: Tensor) -> Tensor:
        time.sleep(self._seconds)
        self.batches.append(batch.clone())
        self.threads.add(threading.current_thread().name)
        if (batch == POISON).any():
            raise RuntimeError("poisoned batch")
        return batch

    def values(self) -> list[list[int]]:
        """Return the value of each window by batch, for images of constant value."""
        return [[int(window[0, 0, 0, 0]) for window in batch] for batch in self.batches]


class Requests:
    """Requests to one device, each in its own thread."""

    def __init__(self, pool: ThreadPoolExecutor, streams: int = 1, mark: Mark | None = None) -> None:
        self.stream_counts: list[int] = []
        self.device = WindowBatcher("device", streams, self.stream_counts.append, mark)
        self._pool, self.launched = pool, mark is not None
        self.shares: list[BatchShare] = []

    def submit(
        self,
        window: SlidingWindow,
        image: Tensor,
        *,
        due_time: float = 0.0,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Future[Tensor]:
        """Return once the device has received the request."""

        def work() -> Tensor:
            slabs = self.device.run(
                window,
                image,
                0.0,
                cancelled=cancelled,
                progress=lambda _done, _total: None,
                report_share=self.shares.append,
                due_time=due_time,
            )
            return concatenate(slabs)

        # Counting the requests would miss one that arrives while another is cancelled.
        before = list(self.device._requests)
        future = self._pool.submit(work)
        wait_until(lambda: future.done() or any(request not in before for request in list(self.device._requests)))
        return future


@pytest.fixture(params=[None, partial(record_end, torch.device("cpu"))], ids=["computed", "launched"])
def requests(request: pytest.FixtureRequest) -> Iterator[Requests]:
    """Requests to a synchronous device, and to an asynchronous one."""
    yield from run_device(1, request.param)


@pytest.fixture
def multi_stream() -> Iterator[Requests]:
    """Requests to a device with three streams."""
    yield from run_device(3)


def run_device(streams: int, mark: Mark | None = None) -> Iterator[Requests]:
    with ThreadPoolExecutor(12) as pool:
        requests = Requests(pool, streams, mark)
        yield requests
        requests.device.close()
    assert requests.device.join(10)
    assert requests.device._requests == []


def make_windows(
    network: Network,
    capacity: int = 4,
    streams: int = 1,
    *,
    accepts_partial_batches: bool = False,
    owns_scores: bool = False,
) -> SlidingWindow:
    batches = SlidingWindow(
        network, 1, ROI, capacity, blending=Blending("constant"), device=torch.device("cpu"), streams=streams
    )
    return batches.with_network(network, accepts_partial_batches=accepts_partial_batches, owns_scores=owns_scores)


def concatenate(slabs: Iterator[Slab]) -> Tensor:
    """Return the scores of an image that is one row of windows along z."""
    return torch.cat([slab.scores for slab in slabs], 2)


def make_image(windows: int, value: float = 1.0) -> Tensor:
    """Return an image of constant value that is covered by this number of windows along z."""
    return torch.full((1, 1, 4 * windows, 4, 4), value)


def test_small_images_share_batches_and_each_request_gets_its_scores(requests: Requests) -> None:
    network = RecordingNetwork()
    window = make_windows(network)
    images = [torch.rand(1, 1, 4, 4, 4) for _ in range(8)]
    futures = [requests.submit(window, image) for image in images]
    requests.device.start()
    for image, future in zip(images, futures, strict=True):
        assert torch.equal(future.result(10), image)
    assert len(network.batches) == 2
    assert network.threads == {"device"}
    assert sum(share.num_windows for share in requests.shares) == sum(share.num_slots for share in requests.shares) == 8


@pytest.mark.parametrize("capacity", [1, 3, 4])
def test_concurrent_images_of_any_size_are_segmented_correctly(requests: Requests, capacity: int) -> None:
    network = RecordingNetwork()
    window = make_windows(network, capacity)
    requests.device.start()
    sizes = [(1, 1, 1), (3, 9, 5), (16, 4, 4), (9, 9, 9), (4, 4, 30), (2, 20, 2)]
    images = [torch.rand(1, 1, *size) for size in sizes]
    results = list(requests._pool.map(lambda image: compute(requests.device, window, image), images))
    for image, scores in zip(images, results, strict=True):
        assert torch.equal(scores, image)
    assert len({tuple(batch.shape) for batch in network.batches}) == 1


def compute(device: WindowBatcher, window: SlidingWindow, image: Tensor) -> Tensor:
    scores = torch.zeros_like(image)
    for slab in device.run(window, image, 0.0, cancelled=lambda: False, progress=lambda _done, _total: None):
        _, _, z, y, _ = slab.scores.shape
        scores[:, :, slab.z0 : slab.z0 + z, slab.y0 : slab.y0 + y] = slab.scores
    return scores


def test_cancelled_and_failed_requests_do_not_affect_others(requests: Requests) -> None:
    window = make_windows(RecordingNetwork())
    good = [requests.submit(window, make_image(3, value)) for value in (1, 2)]
    poisoned = requests.submit(window, make_image(3, POISON))
    unreadable: Any = Unreadable()
    broken = requests.submit(window, unreadable)
    cancelled = requests.submit(window, make_image(3), cancelled=lambda: True)
    nonfinite = requests.submit(window, make_image(3, float("nan")))
    good.append(requests.submit(window, make_image(3, 3)))
    requests.device.start()
    for value, future in enumerate(good, 1):
        assert torch.equal(future.result(10), make_image(3, value))
    for future, error in (
        (poisoned, RuntimeError),
        (broken, OSError),
        (cancelled, Cancelled),
        (nonfinite, NonFiniteScores),
    ):
        with pytest.raises(error):
            future.result(10)


class Unreadable:
    shape = (1, 1, 12, 4, 4)

    def __getitem__(self, box: Any) -> Tensor:
        raise OSError("the disk is gone")


def test_networks_take_turns_and_share_no_batches(requests: Requests) -> None:
    network_a, network_b = RecordingNetwork(), RecordingNetwork()
    windows_a, windows_b = make_windows(network_a), make_windows(network_b)
    futures = [requests.submit(each, make_image(2, 7)) for each in (windows_a, windows_b) * 2]
    requests.device.start()
    assert all(torch.equal(future.result(10), make_image(2, 7)) for future in futures)
    assert len(network_a.batches) == len(network_b.batches) == 1


def test_small_image_waits_for_at_most_two_batches_of_a_large_one(requests: Requests) -> None:
    network = RecordingNetwork()
    window = make_windows(network)
    requests.submit(window, make_image(100, 1), due_time=-1.0)
    requests.submit(window, make_image(1, 2), due_time=100.0)
    requests.device.start()
    wait_until(lambda: len(network.batches) >= 25)
    assert any(2 in batch for batch in network.values()[:2])


def test_large_image_that_is_due_first_gets_half_of_the_device(requests: Requests) -> None:
    network, stop, seen, before = RecordingNetwork(), threading.Event(), list[float](), set[float]()

    def network_under_load(batch: Tensor) -> Tensor:
        """Wait until every request whose window is not being computed has queued again, however busy the machine is."""
        values = [window.max().item() for window in batch]
        seen.extend(values)
        small = {value for value in {*values, *before} if value > 1}
        expected = 5 - len(small) - (seen.count(1) == 20 or 1 in before.intersection(values))
        if requests.launched:
            # The device has not finished this batch when it gets the next one.
            before.clear()
            before.update(values)
        wait_until(
            lambda: stop.is_set() or sum(request.is_ready for request in list(requests.device._requests)) >= expected
        )
        return network(batch)

    window = make_windows(network_under_load, 2)
    large = requests.submit(window, make_image(20, 1), due_time=-1.0)

    def keep_submitting(value: float) -> None:
        while not stop.is_set():
            compute(requests.device, window, make_image(1, value))

    small = [requests._pool.submit(keep_submitting, value) for value in (2, 3, 4, 5)]
    wait_until(lambda: len(requests.device._requests) == 5)
    requests.device.start()
    large.result(10)
    stop.set()
    for future in small:
        future.result(10)
    batches = network.values()
    last = max(number for number, batch in enumerate(batches) if 1 in batch)
    assert 10 <= last + 1 <= 2 * 10 + 1
    assert sum(1 not in batch for batch in batches[: last + 1]) >= 7, "the small images get the other half"


def test_request_that_is_due_first_is_computed_first(requests: Requests) -> None:
    network = RecordingNetwork()
    window = make_windows(network, 2)
    for due_time in (3, 1, 2):
        requests.submit(window, make_image(2, due_time), due_time=due_time)
    requests.device.start()
    wait_until(lambda: len(network.batches) == 3)
    assert network.values() == [[1, 1], [2, 2], [3, 3]]


def test_no_windows_are_computed_while_a_request_has_slabs_to_take(requests: Requests) -> None:
    network = RecordingNetwork()
    requests.device.start()
    slabs = requests.device.run(
        make_windows(network, 2), make_image(20), 0.0, cancelled=lambda: False, progress=lambda _done, _total: None
    )
    next(slabs)
    time.sleep(0.1)
    assert len(network.batches) <= 3
    slabs.close()
    assert requests.device._requests == []


def test_device_is_free_within_two_batches_after_cancellation(requests: Requests) -> None:
    network = RecordingNetwork(0.05)
    gone = threading.Event()
    request = requests.submit(make_windows(network), make_image(400), cancelled=gone.is_set)
    requests.device.start()
    wait_until(lambda: len(network.batches) >= 2)
    gone.set()
    before = len(network.batches)
    with pytest.raises(Cancelled, match="of 400 windows"):
        request.result(10)
    time.sleep(0.2)
    assert len(network.batches) <= before + 2


def test_call_runs_in_the_thread_of_the_device_and_raises_in_the_caller(requests: Requests) -> None:
    requests.device.start()
    assert requests.device.call(lambda: threading.current_thread().name) == "device"
    assert not requests.device.call(torch.is_inference_mode_enabled), "models created in a call may be trained"
    with pytest.raises(KeyError):
        requests.device.call(lambda: {}["missing"])
    with pytest.raises(TimeoutError):
        requests.device.call(lambda: Future[None]().result(0))
    assert requests.device.is_alive


def test_heartbeat_is_set_only_while_windows_are_computed(requests: Requests) -> None:
    assert requests.device.heartbeat is None
    gate, called = threading.Event(), threading.Event()

    def network(batch: Tensor) -> Tensor:
        called.set()
        gate.wait(10)
        return batch

    request = requests.submit(make_windows(network), make_image(4))
    requests.device.start()
    assert called.wait(10)
    assert requests.device.heartbeat == 1
    gate.set()
    request.result(10)
    wait_until(lambda: requests.device.heartbeat is None)


def test_close_cancels_waiting_requests_and_calls(requests: Requests) -> None:
    request = requests.submit(make_windows(RecordingNetwork()), make_image(4))
    call = requests._pool.submit(requests.device.call, lambda: 1)
    requests.device.close()
    for waiting in (request, call):
        with pytest.raises(Cancelled):
            waiting.result(10)
    with pytest.raises(Cancelled):
        requests.device.call(lambda: 1)
    with pytest.raises(Cancelled):
        requests.submit(make_windows(RecordingNetwork()), make_image(4)).result(10)


class ReusedOutput:
    """Identity network of varying run time that reuses one output buffer per thread."""

    def __init__(self) -> None:
        self._answers: dict[str, Tensor] = {}
        self._calls = itertools.count()

    def __call__(self, batch: Tensor) -> Tensor:
        time.sleep(0.002 * (next(self._calls) * 7 % 5))
        answer = self._answers.setdefault(str(threading.get_ident()), torch.empty(2, *batch.shape[1:]))
        return answer[: len(batch)].copy_(batch)


@pytest.mark.parametrize("accepts_partial_batches", [False, True])
def test_several_streams_return_the_same_scores_as_one(multi_stream: Requests, accepts_partial_batches: bool) -> None:
    window = make_windows(ReusedOutput(), 2, streams=3, accepts_partial_batches=accepts_partial_batches)
    multi_stream.device.start()
    sizes = [(1, 1, 1), (3, 9, 5), (40, 4, 4), (9, 9, 9), (4, 4, 30), (2, 20, 2), (17, 12, 11), (4, 4, 4)]
    images = [torch.rand(1, 1, *size) for size in sizes]
    results = list(multi_stream._pool.map(lambda image: compute(multi_stream.device, window, image), images))
    for image, scores in zip(images, results, strict=True):
        assert torch.equal(scores, image)


def test_streams_compute_windows_of_one_image_concurrently(multi_stream: Requests) -> None:
    meeting = threading.Barrier(3)

    def network(batch: Tensor) -> Tensor:
        meeting.wait(10)
        return batch

    request = multi_stream.submit(make_windows(network, 2, streams=3), make_image(12))
    multi_stream.device.start()
    assert torch.equal(request.result(10), make_image(12))
    assert set(multi_stream.stream_counts) == {3}
    wait_until(lambda: multi_stream.device._num_idle_threads == 3)
    # A single request arrives, and every idle thread has to be woken for it.
    request = multi_stream.submit(make_windows(network, 2, streams=3), make_image(12))
    assert torch.equal(request.result(10), make_image(12))


def test_network_with_one_stream_runs_alone(multi_stream: Requests) -> None:
    computing, met = list[str](), threading.Event()
    concurrent = set[tuple[str, ...]]()

    def network(name: str) -> Network:
        def run(batch: Tensor) -> Tensor:
            computing.append(name)
            if name == "exclusive":
                time.sleep(0.005)
            else:
                # Long enough for another batch to start, unless it is the turn of the exclusive network.
                if len(computing) > 1:
                    met.set()
                met.wait(0.5)
            concurrent.add(tuple(computing))
            computing.remove(name)
            return batch

        return run

    exclusive, shared = make_windows(network("exclusive"), 1), make_windows(network("shared"), 1, streams=3)
    # No batch of the exclusive network separates the last two requests.
    futures = [multi_stream.submit(window, make_image(4)) for window in (exclusive, shared, exclusive, shared, shared)]
    multi_stream.device.start()
    for future in futures:
        future.result(10)
    assert {"exclusive", "shared"} == {name for names in concurrent for name in names}
    assert ("exclusive",) in concurrent
    assert all(names == ("exclusive",) for names in concurrent if "exclusive" in names)
    assert any(len(names) > 1 for names in concurrent)


def test_partly_filled_batch_waits_for_running_batches(multi_stream: Requests) -> None:
    network, gate = RecordingNetwork(), threading.Event()

    def gated(batch: Tensor) -> Tensor:
        gate.wait(10)
        return network(batch)

    window = make_windows(gated, 2, streams=3)
    multi_stream.device.start()
    first = multi_stream.submit(window, make_image(1, 1))
    wait_until(lambda: multi_stream.device.heartbeat is not None)
    expected = [multi_stream.submit(window, make_image(1, value)) for value in (2, 3)]
    gate.set()
    for each in (first, *expected):
        each.result(10)
    assert sorted(network.values()) == [[1, 0], [2, 3]]


def test_partly_filled_batch_does_not_wait_if_the_network_accepts_any_batch_size(multi_stream: Requests) -> None:
    meeting, started = threading.Barrier(3), list[int]()

    def network(batch: Tensor) -> Tensor:
        started.append(len(batch))
        meeting.wait(10)
        return batch

    multi_stream.device.start()
    window, requests = make_windows(network, 2, streams=3, accepts_partial_batches=True), list[Future[Tensor]]()
    for value in (1, 2, 3):
        requests.append(multi_stream.submit(window, make_image(1, value)))
        # Requests that arrive together may share a batch.
        wait_until(lambda: len(started) == len(requests))
    for request in requests:
        request.result(10)
    assert all(share.num_windows == share.num_slots == 1 for share in multi_stream.shares)


def test_call_and_batches_never_run_concurrently(multi_stream: Requests) -> None:
    computing = threading.Semaphore(0)

    def network(batch: Tensor) -> Tensor:
        computing.release()
        time.sleep(0.01)
        computing.acquire()
        return batch

    def call() -> bool:
        time.sleep(0.02)
        return computing.acquire(blocking=False)

    request = multi_stream.submit(make_windows(network, 1, streams=3), make_image(30))
    multi_stream.device.start()
    assert [multi_stream.device.call(call) for _ in range(3)] == [False] * 3
    assert torch.equal(request.result(10), make_image(30))


def test_heartbeat_stops_if_one_of_several_streams_is_stuck(multi_stream: Requests) -> None:
    gate = threading.Event()

    def network(batch: Tensor) -> Tensor:
        if (batch == POISON).any():
            gate.wait(10)
        return batch

    stuck = multi_stream.submit(make_windows(network, 1, streams=3), make_image(2, POISON))
    multi_stream.device.start()
    wait_until(lambda: multi_stream.device.heartbeat is not None)
    before = multi_stream.device.heartbeat
    busy = multi_stream.submit(make_windows(network, 1, streams=3), make_image(20))
    assert torch.equal(busy.result(10), make_image(20))
    assert multi_stream.device.heartbeat == before
    gate.set()
    stuck.result(10)
    wait_until(lambda: multi_stream.device.heartbeat is None)


class UncopiableScores(Tensor):
    """Scores that cannot be copied."""

    def clone(self, **_options: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def make_unordered_windows(device: WindowBatcher) -> tuple[Network, Tensor]:
    """Return a network and an image of two windows. The second window finishes first, and cannot be copied."""
    first = threading.Event()

    def network(batch: Tensor) -> Tensor:
        if batch.max() > 1:
            first.set()
            return batch.clone().as_subclass(UncopiableScores)
        first.wait(10)
        # The other thread is idle once it has delivered its scores.
        wait_until(lambda: device._num_idle_threads == 2)
        return batch.clone()

    return network, torch.cat((make_image(1, 1), make_image(1, 2)), 2)


def test_lack_of_memory_for_waiting_scores_fails_only_their_request(multi_stream: Requests) -> None:
    network, stack = make_unordered_windows(multi_stream.device)
    request = multi_stream.submit(make_windows(network, 1, streams=3), stack)
    multi_stream.device.start()
    with pytest.raises(RuntimeError, match="can't allocate"):
        request.result(10)
    other = multi_stream.submit(make_windows(RecordingNetwork(), 1, streams=3), make_image(3))
    assert torch.equal(other.result(10), make_image(3))
    assert multi_stream.device.is_alive


def test_scores_owned_by_the_network_are_not_copied(multi_stream: Requests) -> None:
    network, stack = make_unordered_windows(multi_stream.device)
    request = multi_stream.submit(make_windows(network, 1, streams=3, owns_scores=True), stack)
    multi_stream.device.start()
    assert torch.equal(request.result(10), stack)


def test_error_in_the_progress_callback_fails_only_its_request(multi_stream: Requests) -> None:
    def broken_progress(_done: int, _total: int) -> None:
        raise OSError("connection lost")

    multi_stream.device.start()
    slabs = multi_stream.device.run(
        make_windows(RecordingNetwork(), 1, streams=3),
        make_image(3),
        0.0,
        cancelled=lambda: False,
        progress=broken_progress,
    )
    with pytest.raises(OSError, match="connection lost"):
        list(slabs)
    other = multi_stream.submit(make_windows(RecordingNetwork(), 1, streams=3), make_image(3))
    assert torch.equal(other.result(10), make_image(3))


def test_failed_request_on_several_streams_does_not_affect_others(multi_stream: Requests) -> None:
    window = make_windows(RecordingNetwork(0.002), 2, streams=3)
    poisoned = multi_stream.submit(window, make_image(9, POISON))
    cancelled = multi_stream.submit(window, make_image(9), cancelled=lambda: True)
    good = [multi_stream.submit(window, make_image(9, value)) for value in (1, 2)]
    nonfinite = multi_stream.submit(window, make_image(9, float("nan")))
    multi_stream.device.start()
    for value, future in enumerate(good, 1):
        assert torch.equal(future.result(10), make_image(9, value))
    for future, error in ((poisoned, RuntimeError), (cancelled, Cancelled), (nonfinite, NonFiniteScores)):
        with pytest.raises(error):
            future.result(10)


def test_all_requests_finish_for_random_mixes_of_requests_and_calls(multi_stream: Requests) -> None:
    """Each round ends before the next one begins, because later requests would wake a thread that was missed."""
    random, device = Random(0), multi_stream.device
    device.start()
    kinds = [(1, 1, False), (2, 3, False), (1, 3, True), (3, 2, True)]
    choices = [
        make_windows(RecordingNetwork(), capacity, streams, accepts_partial_batches=accepts_partial_batches)
        for capacity, streams, accepts_partial_batches in kinds
    ]

    def run_slowly(window: SlidingWindow, size: int, pause: float, checks: int) -> None:
        cancel_answers = (count > checks for count in itertools.count())
        slabs = device.run(
            window,
            make_image(size),
            0.0,
            cancelled=lambda: next(cancel_answers),
            progress=lambda _done, _total: None,
        )
        with suppress(Cancelled):
            for _ in slabs:
                time.sleep(pause)

    for _ in range(150):
        futures = list[Future[None]]()
        for _ in range(random.randint(0, 5)):
            size, pause = random.randint(1, 9), random.choice([0.0, 0.0, 0.001, 0.003])
            checks = random.choice([10**9, 10**9, random.randint(0, 9)])
            futures.append(multi_stream._pool.submit(run_slowly, random.choice(choices), size, pause, checks))
        if random.random() < 0.5:
            futures.append(multi_stream._pool.submit(device.call, lambda: None))
        for future in futures:
            future.result(10)
        # Sometimes let all threads become idle, as before the first round.
        time.sleep(random.choice([0.0, 0.002]))
    wait_until(lambda: device.heartbeat is None)
