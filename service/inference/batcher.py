"""The threads that may touch a device: each is a stream of batches of windows, of several requests where it can.

Preparing, decoding and writing happen in the threads of the requests; what these wait for here is the network. Windows
of requests that run through the same one share the room of a batch, as most networks take the same time however full it
is. A GPU has one stream. On a CPU several batches at once, with a part of the cores each, keep these busier than one
after the other with all of them: nobody waits at the end of every layer for the thread that was slowest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from service.core import hardware
from service.core.config import MAX_STREAMS, Settings
from service.core.errors import Cancelled
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow, WindowSlice

T = TypeVar("T")

# How often a request that waits looks whether it was cancelled, even if the device does not answer any more.
LOOK_SECONDS = 0.2
# For a batch that is being computed while nobody waits for it any more.
CLOSE_SECONDS = 5.0


class Share(NamedTuple):
    """What one batch was for one request: its windows, its part of the batch's slots and of the device's seconds."""

    windows: int
    slots: float
    seconds: float


class _BatchSlice:
    """Windows of one request on their way through the network, and what came of them once that is known."""

    def __init__(self, request: _WindowRequest, part: WindowSlice) -> None:
        self.request, self.part, self.windows = request, part, len(part.places)
        self.outcome: Tensor | Exception | None = None
        self.share: Share | None = None


class _WindowRequest:
    """The windows of one request, between its own thread and the device's, whose lock guards what several change."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        due: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        share: Callable[[Share], None],
    ) -> None:
        self.window, self.due, self.cancelled = window, due, cancelled
        self.progress, self.share = progress, share
        self.scan = window.scan(image, overlap)
        # In the order in which they are blended, whatever the order in which they arrive.
        self.batch_slices: deque[_BatchSlice] = deque()
        self.blending = False
        # Slabs, then None after the last of them or for an error. No lock is needed to be woken by it.
        self.answers: SimpleQueue[Slab | None] = SimpleQueue()
        # Of the slabs, those that its thread has not taken.
        self.untaken = 0
        self.error: Exception | None = None
        self.failed = self.over = False

    @property
    def wants(self) -> bool:
        """Whether it can use a place in the next batch.

        Windows are left, what came of earlier ones was taken, and not too much waits for a batch that is slow.
        """
        in_step = not self.untaken and len(self.batch_slices) <= self.window.streams
        return self.scan.left > 0 and not self.failed and in_step

    def fail(self, error: Exception) -> None:
        """Nothing more is computed or blended; the first error is the one that is told."""
        if not self.failed:
            self.failed, self.error = True, error
            self.answers.put(None)

    def give(self, slabs: Sequence[Slab]) -> None:
        """What became final, to its thread."""
        self.untaken += len(slabs)
        for slab in slabs:
            self.answers.put(slab)
        if self.scan.done == self.scan.total:
            self.over = True
            self.answers.put(None)


class _Batch(NamedTuple):
    """What a thread computes next: windows of these requests, in this stream, while so many share the device."""

    batch_slices: list[_BatchSlice]
    stream: int
    among: int


class _Running(NamedTuple):
    """A batch that is being computed: which since the start, through which windows, in which of their streams."""

    number: int
    window: SlidingWindow
    stream: int


class WindowBatcher:
    """Owns the threads, named `name`. Before `start` and after `close` nothing is computed.

    streams  batches that are computed at the same time, at most, of models that want so many
    divide   called in a stream's thread before it computes, with the number of streams that share the device then

    Two rules take turns in choosing whose windows are next. One takes the request that is due first: it is not passed
    for ever, and gets at least half of the device. The other takes the one with the fewest windows left, so that a
    small stack waits for a batch or two however large those are that came before it. What room a batch then has, the
    next ones by the same rule get, as far as they run through the same network. A batch that would not be full, and
    take as long as a full one, waits for those that are being computed: something may come, and alone it has the whole
    device.

    A thread that has nothing to do is woken where there is something, and wakes the next where there is more. That is
    looked at where windows or a call come, and where slabs are taken; whoever ends a batch or a call looks by itself.
    """

    def __init__(self, name: str, streams: int = 1, divide: Callable[[int], None] = lambda _among: None) -> None:
        self._divide = divide
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        # Threads that wait for work, and that nobody has woken.
        self._idle = 0
        self._requests: list[_WindowRequest] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._calling = self._closed = False
        self._batches = 0
        # By the thread that computes it.
        self._busy: dict[int, _Running] = {}
        self._threads = [
            threading.Thread(target=self._loop, args=(index,), name=name, daemon=True) for index in range(streams)
        ]

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def pulse(self) -> int | None:
        """The oldest batch that is being computed, which changes while none is stuck; None if there is none."""
        with self._lock:
            return min((running.number for running in self._busy.values()), default=None)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give up what is left and end the threads; whoever waits gets Cancelled."""
        with self._lock:
            self._closed = True
            self._work.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended; False if one has not after `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, run in a thread of the device while no batch is computed. Raises Cancelled."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised again where it was called
                future.set_exception(error)

        with self._lock:
            self._check()
            self._calls.append(run)
            self._wake()
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                with self._lock:
                    self._check()

    def run(  # noqa: PLR0913
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        /,
        *,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        share: Callable[[Share], None] = lambda _share: None,
        due: float = 0.0,
    ) -> Iterator[Slab]:
        """Scores of `image` as `SlidingWindow.run` gives and refuses them, computed in the device's threads.

        `share` is told there, by one at a time, of each batch with windows of this image. Raises Cancelled.
        """
        request = _WindowRequest(window, image, overlap, due, cancelled, progress, share)
        with self._lock:
            self._check()
            self._requests.append(request)
            self._wake()
        try:
            while (slab := self._next(request)) is not None:
                yield slab
        finally:
            with self._lock:
                request.failed = True
                self._requests.remove(request)

    def _check(self) -> None:
        if self._closed:
            raise Cancelled("the device is given up")

    def _next(self, request: _WindowRequest) -> Slab | None:
        """The next slab of this lane; None after the last one."""
        slab = self._answer(request)
        if request.error is not None:
            error, request.error = request.error, None
            try:
                raise error
            finally:
                del error  # which knows this frame, and with it the lane
        if slab is not None and request.scan.left:
            with self._lock:
                request.untaken -= 1
                self._wake()
        return slab

    def _answer(self, request: _WindowRequest) -> Slab | None:
        while True:
            try:
                return request.answers.get(timeout=LOOK_SECONDS)
            except Empty:
                with self._lock:
                    self._check()
            if request.cancelled():
                raise Cancelled(f"given up after {request.scan.done} of {request.scan.total} windows")

    def _wake(self) -> None:
        """Let a thread that has nothing to do look for work, if there is some. With the lock."""
        if self._idle and (self._may_call() or self._may_compute()):
            self._idle -= 1
            self._work.notify()

    @torch.inference_mode()
    def _loop(self, thread: int) -> None:
        shared_by = 0
        done: Literal["nothing", "batch", "call"] = "nothing"
        while (work := self._wait(thread, done)) is not None:
            among = work.among if isinstance(work, _Batch) else 1
            if among != shared_by:
                # Only then: torch forgets what it has prepared for another number of threads.
                self._divide(among)
                shared_by = among
            if isinstance(work, _Batch):
                self._compute(work)
                done = "batch"
            else:
                with torch.inference_mode(mode=False):
                    work()
                done = "call"
            del work  # holds images and models, and the next may be hours away

    def _wait(self, thread: int, done: Literal["nothing", "batch", "call"]) -> Callable[[], None] | _Batch | None:
        """What to do next, after what is done: a call, or a batch. None at the end."""
        with self._lock:
            if done == "batch":
                del self._busy[thread]
            elif done == "call":
                self._calling = False
            while not self._closed:
                self._drop_cancelled()
                if self._may_call():
                    self._calling = True
                    return self._calls.popleft()
                if requests := self._may_compute():
                    batch = self._next_batch(thread, requests)
                    self._wake()
                    return batch
                self._idle += 1
                self._work.wait()
            return None

    def _may_call(self) -> bool:
        return bool(self._calls) and not self._calling and not self._busy

    def _drop_cancelled(self) -> None:
        for request in self._requests:
            if not request.failed and not request.over and request.cancelled():
                request.fail(Cancelled(f"given up after {request.scan.done} of {request.scan.total} windows"))

    def _may_compute(self) -> list[_WindowRequest]:
        """Whose windows may be computed now; none where there are none, or not yet."""
        if self._calls or self._calling:
            return []
        requests = self._chosen()
        return requests if requests and self._admits(requests) else []

    def _next_batch(self, thread: int, requests: Sequence[_WindowRequest]) -> _Batch:
        """Windows of these."""
        window = requests[0].window
        # Those that have to take slabs first count too: they will be back in a moment.
        left = sum([request.scan.left for request in self._requests if request.window is window and not request.failed])
        among = min(window.streams, len(self._threads), len(self._busy) + -(-left // window.capacity))
        taken = [running.stream for running in self._busy.values()]
        stream = 0
        while stream in taken:
            stream += 1
        self._batches += 1
        self._busy[thread] = _Running(self._batches, window, stream)
        return _Batch(_fill_batch(requests, window.capacity), stream, among)

    def _admits(self, requests: Sequence[_WindowRequest]) -> bool:
        """Whether a batch of windows of these may be computed beside those that are."""
        if not self._busy:
            return True
        window = requests[0].window
        fewest = min([window.streams, *[running.window.streams for running in self._busy.values()]])
        if len(self._busy) >= fewest:
            return False
        return window.any_batch_size or sum([request.scan.left for request in requests]) >= window.capacity

    def _chosen(self) -> list[_WindowRequest]:
        """Those with windows in the next batch, the one that must have some first."""
        requests = [request for request in self._requests if request.wants]
        if len(requests) < 2:
            return requests
        if self._batches % 2:
            requests.sort(key=lambda request: (request.scan.left, request.due))
        else:
            requests.sort(key=lambda request: request.due)
        return [request for request in requests if request.window is requests[0].window]

    def _compute(self, batch: _Batch) -> None:
        if not self._forward(batch) and len(batch.batch_slices) > 1:
            # Whose fault it was does not show; alone, each gets what it deserves.
            for batch_slice in batch.batch_slices:
                self._forward(batch._replace(batch_slices=[batch_slice]))

    def _forward(self, batch: _Batch) -> bool:
        """Compute and blend; False where nothing was computed, which is told to a request that is on its own."""
        began = time.monotonic()
        batch_slices = batch.batch_slices
        window, taken = batch_slices[0].request.window, sum([batch_slice.windows for batch_slice in batch_slices])
        try:
            scores = window.forward([batch_slice.part for batch_slice in batch_slices], batch.stream)
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
            if len(batch_slices) == 1:
                self._arrive(batch_slices[0], error)
            return False
        each = (time.monotonic() - began) / batch.among / taken
        for batch_slice, own in zip(batch_slices, scores, strict=True):
            mine = batch_slice.windows
            batch_slice.share = Share(mine, mine * window.slots(taken) / taken, mine * each)
            self._arrive(batch_slice, own)
        return True

    def _arrive(self, batch_slice: _BatchSlice, outcome: Tensor | Exception) -> None:
        """Blend what came of these windows, and what has waited for it; or leave it to whoever blends those before."""
        request = batch_slice.request
        waits = request.blending or request.batch_slices[0] is not batch_slice
        if waits and isinstance(outcome, Tensor) and not request.window.owns_scores:
            # Where it lies, this stream's next batch may lie before it is blended.
            outcome = _kept(outcome)
        with self._lock:
            batch_slice.outcome = outcome
            if request.blending or request.batch_slices[0] is not batch_slice:
                return
            request.blending = True
        landing: _BatchSlice | None = batch_slice
        while landing is not None:
            landing = self._land(landing)

    def _land(self, batch_slice: _BatchSlice) -> _BatchSlice | None:
        """Blend one; gives the next, if that has arrived."""
        request = batch_slice.request
        outcome = [] if request.failed else _blended(batch_slice)
        with self._lock:
            if isinstance(outcome, Exception):
                request.fail(outcome)
            elif not request.failed:
                request.give(outcome)
            request.batch_slices.popleft()
            if request.batch_slices and request.batch_slices[0].outcome is not None:
                return request.batch_slices[0]
            request.blending = False
            return None


def _fill_batch(requests: Sequence[_WindowRequest], capacity: int) -> list[_BatchSlice]:
    """As many of their windows as there is room for."""
    fill_batch = []
    for request in requests:
        if not capacity:
            break
        batch_slice = _BatchSlice(request, request.scan.take(capacity))
        request.batch_slices.append(batch_slice)
        fill_batch.append(batch_slice)
        capacity -= batch_slice.windows
    return fill_batch


def _kept(scores: Tensor) -> Tensor | Exception:
    """A copy, or that there is no memory for one."""
    try:
        return scores.clone()
    except (RuntimeError, MemoryError) as error:
        return error


def _blended(batch_slice: _BatchSlice) -> list[Slab] | Exception:
    """The slabs that became final, of which the request is told, or what was wrong with these scores."""
    if not isinstance(batch_slice.outcome, Tensor) or batch_slice.share is None:
        return batch_slice.outcome if isinstance(batch_slice.outcome, Exception) else RuntimeError("not computed")
    request, (scan, places) = batch_slice.request, batch_slice.part
    try:
        slabs = scan.blend(places, batch_slice.outcome)
        request.share(batch_slice.share)
        request.progress(scan.done, scan.total)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        return error
    return slabs


@contextmanager
def device_of(settings: Settings) -> Iterator[WindowBatcher]:
    """The device of `settings.device.name` as a station has it, for as long as nobody serves. Raises ConfigError."""
    device = make_device(settings, on_host=hardware.choose_device(settings.device.name).type == "cpu")
    device.start()
    try:
        yield device
    finally:
        device.close()
        device.join(CLOSE_SECONDS)


def make_device(settings: Settings, *, on_host: bool) -> WindowBatcher:
    """Make a device with as many streams as a model may have at most, each of which gets its part of the cores."""
    cores = settings.device.threads or hardware.usable_cores()
    wanted = settings.engine.streams
    most = min(cores, MAX_STREAMS) if wanted == "auto" else wanted
    return WindowBatcher("device", most if on_host else 1, lambda among: hardware.use_threads(max(cores // among, 1)))
