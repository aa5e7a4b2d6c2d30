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
from fakes import until
from torch import Tensor

from service.core.errors import Cancelled, NonFiniteScores
from service.engine.cuda.events import mark_end
from service.inference.windows.batching.batcher import WindowBatcher
from service.inference.windows.batching.launch import Mark
from service.inference.windows.batching.window_request import Share
from service.inference.windows.blending import Blending, Slab
from service.inference.windows.sliding_window import Network, SlidingWindow

ROI = (4, 4, 4)
EVIL = 666.0


class Counted:
    """The identity, and what it was called with; raises for what holds an evil number."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[Tensor] = []
        self.threads: set[str] = set()
        self._seconds = seconds

    def __call__(self, batch: Tensor) -> Tensor:
        time.sleep(self._seconds)
        self.batches.append(batch.clone())
        self.threads.add(threading.current_thread().name)
        if (batch == EVIL).any():
            raise RuntimeError("evil")
        return batch

    def who(self) -> list[list[int]]:
        """Whose windows were in each batch, where images are constant."""
        return [[int(window[0, 0, 0, 0]) for window in batch] for batch in self.batches]


class Requests:
    """Requests that stand before a device, each in a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, streams: int = 1, mark: Mark | None = None) -> None:
        self.divisions: list[int] = []
        self.device = WindowBatcher("device", streams, self.divisions.append, mark)
        self._pool, self.launched = pool, mark is not None
        self.shares: list[Share] = []

    def post(
        self, window: SlidingWindow, image: Tensor, *, due: float = 0.0, cancelled: Callable[[], bool] = lambda: False
    ) -> Future[Tensor]:
        """Stands in the queue when this returns."""

        def work() -> Tensor:
            slabs = self.device.run(
                window,
                image,
                0.0,
                cancelled=cancelled,
                progress=lambda _done, _total: None,
                share=self.shares.append,
                due=due,
            )
            return whole(slabs)

        # Counting them would miss one that comes while an earlier one is given up.
        before = list(self.device._requests)
        future = self._pool.submit(work)
        until(lambda: future.done() or any(request not in before for request in list(self.device._requests)))
        return future


@pytest.fixture(params=[None, partial(mark_end, torch.device("cpu"))], ids=["computed", "launched"])
def requests(request: pytest.FixtureRequest) -> Iterator[Requests]:
    """Before a device whose batches are done when they return, and one that is given the next before that."""
    yield from before_a_device(1, request.param)


@pytest.fixture
def streaming() -> Iterator[Requests]:
    """Before a device of three streams."""
    yield from before_a_device(3)


def before_a_device(streams: int, mark: Mark | None = None) -> Iterator[Requests]:
    with ThreadPoolExecutor(12) as pool:
        loaded_model = Requests(pool, streams, mark)
        yield loaded_model
        loaded_model.device.close()
    assert loaded_model.device.join(10)
    assert loaded_model.device._requests == []


def windows(
    network: Network, capacity: int = 4, streams: int = 1, *, any_batch_size: bool = False, owns_scores: bool = False
) -> SlidingWindow:
    batches = SlidingWindow(
        network, 1, ROI, capacity, blending=Blending("constant"), device=torch.device("cpu"), streams=streams
    )
    return batches.with_network(network, any_batch_size=any_batch_size, owns_scores=owns_scores)


def whole(slabs: Iterator[Slab]) -> Tensor:
    """Slabs of images that are a row of windows along z."""
    return torch.cat([slab.scores for slab in slabs], 2)


def image(windows: int, value: float = 1.0) -> Tensor:
    """So many windows, one above the other, all of one value."""
    return torch.full((1, 1, 4 * windows, 4, 4), value)


def test_small_images_share_batches_and_everyone_gets_what_belongs_to_it(requests: Requests) -> None:
    network = Counted()
    window = windows(network)
    images = [torch.rand(1, 1, 4, 4, 4) for _ in range(8)]
    futures = [requests.post(window, one) for one in images]
    requests.device.start()
    for one, future in zip(images, futures, strict=True):
        assert torch.equal(future.result(10), one)
    assert len(network.batches) == 2
    assert network.threads == {"device"}
    assert sum(share.windows for share in requests.shares) == sum(share.slots for share in requests.shares) == 8


@pytest.mark.parametrize("capacity", [1, 3, 4])
def test_images_of_every_size_at_once(requests: Requests, capacity: int) -> None:
    network = Counted()
    window = windows(network, capacity)
    requests.device.start()
    sizes = [(1, 1, 1), (3, 9, 5), (16, 4, 4), (9, 9, 9), (4, 4, 30), (2, 20, 2)]
    images = [torch.rand(1, 1, *size) for size in sizes]
    together = list(requests._pool.map(lambda one: alone(requests.device, window, one), images))
    for one, got in zip(images, together, strict=True):
        assert torch.equal(got, one)
    assert len({tuple(batch.shape) for batch in network.batches}) == 1


def alone(device: WindowBatcher, window: SlidingWindow, one: Tensor) -> Tensor:
    got = torch.zeros_like(one)
    for slab in device.run(window, one, 0.0, cancelled=lambda: False, progress=lambda _done, _total: None):
        _, _, z, y, _ = slab.scores.shape
        got[:, :, slab.z0 : slab.z0 + z, slab.y0 : slab.y0 + y] = slab.scores
    return got


def test_one_that_is_given_up_and_one_that_fails_do_not_hurt_the_others(requests: Requests) -> None:
    window = windows(Counted())
    good = [requests.post(window, image(3, value)) for value in (1, 2)]
    evil = requests.post(window, image(3, EVIL))
    unreadable: Any = Unreadable()
    broken = requests.post(window, unreadable)
    given_up = requests.post(window, image(3), cancelled=lambda: True)
    spoilt = requests.post(window, image(3, float("nan")))
    good.append(requests.post(window, image(3, 3)))
    requests.device.start()
    for value, future in enumerate(good, 1):
        assert torch.equal(future.result(10), image(3, value))
    for future, error in ((evil, RuntimeError), (broken, OSError), (given_up, Cancelled), (spoilt, NonFiniteScores)):
        with pytest.raises(error):
            future.result(10)


class Unreadable:
    shape = (1, 1, 12, 4, 4)

    def __getitem__(self, box: Any) -> Tensor:
        raise OSError("the disk is gone")


def test_two_networks_take_turns_and_share_nothing(requests: Requests) -> None:
    one, other = Counted(), Counted()
    windows_of_one, windows_of_other = windows(one), windows(other)
    futures = [requests.post(each, image(2, 7)) for each in (windows_of_one, windows_of_other) * 2]
    requests.device.start()
    assert all(torch.equal(future.result(10), image(2, 7)) for future in futures)
    assert len(one.batches) == len(other.batches) == 1


def test_small_one_waits_for_a_batch_or_two_however_large_the_one_before_it_is(requests: Requests) -> None:
    network = Counted()
    window = windows(network)
    requests.post(window, image(100, 1), due=-1.0)
    requests.post(window, image(1, 2), due=100.0)
    requests.device.start()
    until(lambda: len(network.batches) >= 25)
    assert any(2 in batch for batch in network.who()[:2])


def test_large_one_that_is_due_gets_half_of_the_device_however_many_small_ones_come(requests: Requests) -> None:
    network, stop, seen, before = Counted(), threading.Event(), list[float](), set[float]()

    def crowded(batch: Tensor) -> Tensor:
        """Everyone whose window is not on its way has come back meanwhile, however busy the machine is."""
        here = [window.max().item() for window in batch]
        seen.extend(here)
        small = {value for value in {*here, *before} if value > 1}
        others = 5 - len(small) - (seen.count(1) == 20 or 1 in before.intersection(here))
        if requests.launched:
            # The device is not done with this batch when it gets the next one.
            before.clear()
            before.update(here)
        until(lambda: stop.is_set() or sum(request.is_ready for request in list(requests.device._requests)) >= others)
        return network(batch)

    window = windows(crowded, 2)
    large = requests.post(window, image(20, 1), due=-1.0)

    def keep_coming(value: float) -> None:
        while not stop.is_set():
            alone(requests.device, window, image(1, value))

    small = [requests._pool.submit(keep_coming, value) for value in (2, 3, 4, 5)]
    until(lambda: len(requests.device._requests) == 5)
    requests.device.start()
    large.result(10)
    stop.set()
    for one in small:
        one.result(10)
    batches = network.who()
    last = max(number for number, batch in enumerate(batches) if 1 in batch)
    assert 10 <= last + 1 <= 2 * 10 + 1
    assert sum(1 not in batch for batch in batches[: last + 1]) >= 7, "and they get the other half"


def test_what_is_due_first_comes_first(requests: Requests) -> None:
    network = Counted()
    window = windows(network, 2)
    for due in (3, 1, 2):
        requests.post(window, image(2, due), due=due)
    requests.device.start()
    until(lambda: len(network.batches) == 3)
    assert network.who() == [[1, 1], [2, 2], [3, 3]]


def test_nothing_is_computed_ahead_of_a_request_that_does_not_keep_up(requests: Requests) -> None:
    network = Counted()
    requests.device.start()
    slabs = requests.device.run(
        windows(network, 2), image(20), 0.0, cancelled=lambda: False, progress=lambda _done, _total: None
    )
    next(slabs)
    time.sleep(0.1)
    assert len(network.batches) <= 3
    slabs.close()
    assert requests.device._requests == []


def test_device_is_free_within_two_batches_of_a_cancel(requests: Requests) -> None:
    network = Counted(0.05)
    gone = threading.Event()
    request = requests.post(windows(network), image(400), cancelled=gone.is_set)
    requests.device.start()
    until(lambda: len(network.batches) >= 2)
    gone.set()
    before = len(network.batches)
    with pytest.raises(Cancelled, match="of 400 windows"):
        request.result(10)
    time.sleep(0.2)
    assert len(network.batches) <= before + 2


def test_call_runs_in_the_device_s_thread_and_raises_here(requests: Requests) -> None:
    requests.device.start()
    assert requests.device.call(lambda: threading.current_thread().name) == "device"
    assert not requests.device.call(torch.is_inference_mode_enabled), "what it makes may be trained"
    with pytest.raises(KeyError):
        requests.device.call(lambda: {}["missing"])
    with pytest.raises(TimeoutError):
        requests.device.call(lambda: Future[None]().result(0))
    assert requests.device.alive


def test_pulse_beats_while_windows_are_computed_and_at_no_other_time(requests: Requests) -> None:
    assert requests.device.pulse is None
    gate, called = threading.Event(), threading.Event()

    def network(batch: Tensor) -> Tensor:
        called.set()
        gate.wait(10)
        return batch

    request = requests.post(windows(network), image(4))
    requests.device.start()
    assert called.wait(10)
    assert requests.device.pulse == 1
    gate.set()
    request.result(10)
    until(lambda: requests.device.pulse is None)


def test_closing_gives_up_what_waits(requests: Requests) -> None:
    request = requests.post(windows(Counted()), image(4))
    call = requests._pool.submit(requests.device.call, lambda: 1)
    requests.device.close()
    for waiting in (request, call):
        with pytest.raises(Cancelled):
            waiting.result(10)
    with pytest.raises(Cancelled):
        requests.device.call(lambda: 1)
    with pytest.raises(Cancelled):
        requests.post(windows(Counted()), image(4)).result(10)


class Reused:
    """The identity, whose answers lie where the thread's next one will, and which takes now shorter, now longer."""

    def __init__(self) -> None:
        self._answers: dict[str, Tensor] = {}
        self._calls = itertools.count()

    def __call__(self, batch: Tensor) -> Tensor:
        time.sleep(0.002 * (next(self._calls) * 7 % 5))
        answer = self._answers.setdefault(str(threading.get_ident()), torch.empty(2, *batch.shape[1:]))
        return answer[: len(batch)].copy_(batch)


@pytest.mark.parametrize("any_batch_size", [False, True])
def test_streams_give_everyone_the_same_as_one_does(streaming: Requests, any_batch_size: bool) -> None:
    window = windows(Reused(), 2, streams=3, any_batch_size=any_batch_size)
    streaming.device.start()
    sizes = [(1, 1, 1), (3, 9, 5), (40, 4, 4), (9, 9, 9), (4, 4, 30), (2, 20, 2), (17, 12, 11), (4, 4, 4)]
    images = [torch.rand(1, 1, *size) for size in sizes]
    together = list(streaming._pool.map(lambda one: alone(streaming.device, window, one), images))
    for one, got in zip(images, together, strict=True):
        assert torch.equal(got, one)


def test_streams_compute_windows_of_one_image_at_the_same_time(streaming: Requests) -> None:
    meeting = threading.Barrier(3)

    def network(batch: Tensor) -> Tensor:
        meeting.wait(10)
        return batch

    request = streaming.post(windows(network, 2, streams=3), image(12))
    streaming.device.start()
    assert torch.equal(request.result(10), image(12))
    assert set(streaming.divisions) == {3}
    until(lambda: streaming.device._idle == 3)
    # One comes, and each of those that slept has to be woken for it.
    request = streaming.post(windows(network, 2, streams=3), image(12))
    assert torch.equal(request.result(10), image(12))


def test_a_network_of_one_stream_has_the_device_for_itself(streaming: Requests) -> None:
    computing, met = list[str](), threading.Event()
    beside = set[tuple[str, ...]]()

    def network(name: str) -> Network:
        def run(batch: Tensor) -> Tensor:
            computing.append(name)
            if name == "shy":
                time.sleep(0.005)
            else:
                # Long enough for another to come beside it, unless it is the turn of the shy one.
                if len(computing) > 1:
                    met.set()
                met.wait(0.5)
            beside.add(tuple(computing))
            computing.remove(name)
            return batch

        return run

    shy, bold = windows(network("shy"), 1), windows(network("bold"), 1, streams=3)
    # The last two have no shy one between them.
    futures = [streaming.post(window, image(4)) for window in (shy, bold, shy, bold, bold)]
    streaming.device.start()
    for future in futures:
        future.result(10)
    assert {"shy", "bold"} == {name for names in beside for name in names}
    assert ("shy",) in beside
    assert all(names == ("shy",) for names in beside if "shy" in names)
    assert any(len(names) > 1 for names in beside)


def test_a_batch_that_is_not_full_waits_for_those_that_are_computed(streaming: Requests) -> None:
    network, gate = Counted(), threading.Event()

    def gated(batch: Tensor) -> Tensor:
        gate.wait(10)
        return network(batch)

    window = windows(gated, 2, streams=3)
    streaming.device.start()
    first = streaming.post(window, image(1, 1))
    until(lambda: streaming.device.pulse is not None)
    others = [streaming.post(window, image(1, value)) for value in (2, 3)]
    gate.set()
    for each in (first, *others):
        each.result(10)
    assert sorted(network.who()) == [[1, 0], [2, 3]]


def test_a_batch_that_costs_no_more_than_its_windows_waits_for_nothing(streaming: Requests) -> None:
    meeting, begun = threading.Barrier(3), list[int]()

    def network(batch: Tensor) -> Tensor:
        begun.append(len(batch))
        meeting.wait(10)
        return batch

    streaming.device.start()
    window, requests = windows(network, 2, streams=3, any_batch_size=True), list[Future[Tensor]]()
    for value in (1, 2, 3):
        requests.append(streaming.post(window, image(1, value)))
        # Two that come at once may share a batch.
        until(lambda: len(begun) == len(requests))
    for request in requests:
        request.result(10)
    assert all(share.windows == share.slots == 1 for share in streaming.shares)


def test_a_call_waits_for_all_streams_and_they_for_it(streaming: Requests) -> None:
    computing = threading.Semaphore(0)

    def network(batch: Tensor) -> Tensor:
        computing.release()
        time.sleep(0.01)
        computing.acquire()
        return batch

    def call() -> bool:
        time.sleep(0.02)
        return computing.acquire(blocking=False)

    request = streaming.post(windows(network, 1, streams=3), image(30))
    streaming.device.start()
    assert [streaming.device.call(call) for _ in range(3)] == [False] * 3
    assert torch.equal(request.result(10), image(30))


def test_pulse_stands_still_where_one_of_several_streams_does(streaming: Requests) -> None:
    gate = threading.Event()

    def network(batch: Tensor) -> Tensor:
        if (batch == EVIL).any():
            gate.wait(10)
        return batch

    stuck = streaming.post(windows(network, 1, streams=3), image(2, EVIL))
    streaming.device.start()
    until(lambda: streaming.device.pulse is not None)
    before = streaming.device.pulse
    busy = streaming.post(windows(network, 1, streams=3), image(20))
    assert torch.equal(busy.result(10), image(20))
    assert streaming.device.pulse == before
    gate.set()
    stuck.result(10)
    until(lambda: streaming.device.pulse is None)


class Full(Tensor):
    """Cannot be copied."""

    def clone(self, **_options: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def late_then_early(device: WindowBatcher) -> tuple[Network, Tensor]:
    """A network and an image of two windows, of which the second arrives first and cannot be copied."""
    first = threading.Event()

    def network(batch: Tensor) -> Tensor:
        if batch.max() > 1:
            first.set()
            return batch.clone().as_subclass(Full)
        first.wait(10)
        # The other's thread has nothing more to do once its scores have arrived.
        until(lambda: device._idle == 2)
        return batch.clone()

    return network, torch.cat((image(1, 1), image(1, 2)), 2)


def test_no_memory_for_scores_that_have_to_wait_fails_their_request_only(streaming: Requests) -> None:
    network, stack = late_then_early(streaming.device)
    request = streaming.post(windows(network, 1, streams=3), stack)
    streaming.device.start()
    with pytest.raises(RuntimeError, match="can't allocate"):
        request.result(10)
    other = streaming.post(windows(Counted(), 1, streams=3), image(3))
    assert torch.equal(other.result(10), image(3))
    assert streaming.device.alive


def test_scores_that_last_wait_where_they_are(streaming: Requests) -> None:
    network, stack = late_then_early(streaming.device)
    request = streaming.post(windows(network, 1, streams=3, owns_scores=True), stack)
    streaming.device.start()
    assert torch.equal(request.result(10), stack)


def test_a_request_that_cannot_be_told_fails_alone(streaming: Requests) -> None:
    def untold(_done: int, _total: int) -> None:
        raise OSError("nobody listens")

    streaming.device.start()
    slabs = streaming.device.run(
        windows(Counted(), 1, streams=3), image(3), 0.0, cancelled=lambda: False, progress=untold
    )
    with pytest.raises(OSError, match="nobody listens"):
        list(slabs)
    other = streaming.post(windows(Counted(), 1, streams=3), image(3))
    assert torch.equal(other.result(10), image(3))


def test_one_that_fails_in_streams_does_not_hurt_the_others(streaming: Requests) -> None:
    window = windows(Counted(0.002), 2, streams=3)
    evil = streaming.post(window, image(9, EVIL))
    given_up = streaming.post(window, image(9), cancelled=lambda: True)
    good = [streaming.post(window, image(9, value)) for value in (1, 2)]
    spoilt = streaming.post(window, image(9, float("nan")))
    streaming.device.start()
    for value, future in enumerate(good, 1):
        assert torch.equal(future.result(10), image(9, value))
    for future, error in ((evil, RuntimeError), (given_up, Cancelled), (spoilt, NonFiniteScores)):
        with pytest.raises(error):
            future.result(10)


def test_nobody_is_left_waiting_whatever_comes_together(streaming: Requests) -> None:
    """Everything that stands before the device at a time is over before more comes, which would wake its threads."""
    random, device = Random(0), streaming.device
    device.start()
    kinds = [(1, 1, False), (2, 3, False), (1, 3, True), (3, 2, True)]
    choices = [
        windows(Counted(), capacity, streams, any_batch_size=any_batch_size)
        for capacity, streams, any_batch_size in kinds
    ]

    def slowly(window: SlidingWindow, size: int, pause: float, looks: int) -> None:
        answers = (count > looks for count in itertools.count())
        slabs = device.run(
            window,
            image(size),
            0.0,
            cancelled=lambda: next(answers),
            progress=lambda _done, _total: None,
        )
        with suppress(Cancelled):
            for _ in slabs:
                time.sleep(pause)

    for _ in range(150):
        together = list[Future[None]]()
        for _ in range(random.randint(0, 5)):
            size, pause = random.randint(1, 9), random.choice([0.0, 0.0, 0.001, 0.003])
            looks = random.choice([10**9, 10**9, random.randint(0, 9)])
            together.append(streaming._pool.submit(slowly, random.choice(choices), size, pause, looks))
        if random.random() < 0.5:
            together.append(streaming._pool.submit(device.call, lambda: None))
        for one in together:
            one.result(10)
        # So that they all wait, as they do before the first.
        time.sleep(random.choice([0.0, 0.002]))
    until(lambda: device.pulse is None)
