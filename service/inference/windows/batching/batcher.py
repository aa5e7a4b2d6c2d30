"""Threads that own a device: each computes a stream of batches, with windows of several requests where it can.

Requests prepare, decode and write in threads of their own. Windows that run through the same network share a batch, as
most networks take the same time however full it is. A GPU has one stream, on which a batch may be launched before the
previous one is done. On a CPU, several batches at once, each with a part of the cores, keep them busier than one batch
at a time with all of them: no thread waits at the end of every layer for the slowest one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import TypeVar

import torch

from service.core.config import Settings
from service.core.errors import Cancelled
from service.core.hardware import devices, host
from service.core.sections.computing import MAX_STREAMS
from service.engine.cuda.events import CudaTimer, mark_end
from service.inference.windows.batching.launch import Launch, Mark, Timer
from service.inference.windows.batching.schedule import Batch, Running, choose_requests, may_add
from service.inference.windows.batching.window_request import BlendingOrder, Share, WindowRequest, fill_batch, report
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow

T = TypeVar("T")

# Interval at which a waiting request checks whether it was cancelled, even if the device does not answer any more.
POLL_SECONDS = 0.2
CLOSE_SECONDS = 5.0
# Batches that are launched on a GPU before the first of them is done, so that it never waits for the host.
LAUNCHED_BATCHES = 2


class WindowBatcher:
    """Owner of a device's threads, named `name`. Before `start` and after `close` nothing is computed.

    streams  batches that are computed at the same time, at most, of models that want so many
    divide   called in a stream's thread before it computes, with the number of streams that share the device then
    mark     for a device that computes asynchronously: marks the end of the work that was launched. None: a batch is
             done once the network and the blender have returned
    start_timer  returns what measures the network by the clock of such a device; None: the host's clock does

    Two rules take turns in choosing whose windows are next. One takes the request that is due first: it is not passed
    for ever, and gets at least half of the device. The other takes the one with the fewest windows left, so that a
    small stack waits for a batch or two however large those are that came before it. What room a batch then has, the
    next ones by the same rule get, as far as they run through the same network. A batch that would not be full, and
    take as long as a full one, waits for those that are being computed: something may come, and alone it has the whole
    device.

    A thread that has nothing to do is woken where there is something, and wakes the next where there is more. That is
    looked at where windows or a call come, and where slabs are taken; whoever ends a batch or a call looks by itself.
    """

    def __init__(
        self,
        name: str,
        streams: int = 1,
        divide: Callable[[int], None] = lambda _streams: None,
        mark: Mark | None = None,
        *,
        start_timer: Callable[[], Timer | None] = lambda: None,
    ) -> None:
        self._divide, self._mark, self._start_timer = divide, mark, start_timer
        # Batches of a stream at a time.
        self._depth = 1 if mark is None else LAUNCHED_BATCHES
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._order = BlendingOrder(self._lock)
        # Threads that wait for work, and that nobody has woken.
        self._idle = 0
        self._requests: list[WindowRequest] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._caller: int | None = None  # thread that runs a call
        self._closed = False
        self._batches = 0
        # By number.
        self._busy: dict[int, Running] = {}
        # In the order of their launch, and when the last one before them was done.
        self._launched: deque[Launch] = deque()
        self._last_done = 0.0
        self._threads = [
            threading.Thread(target=self._loop, args=(index,), name=name, daemon=True) for index in range(streams)
        ]

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def pulse(self) -> int | None:
        """Oldest batch that is being computed, which changes while none is stuck; None if there is none."""
        with self._lock:
            return min(self._busy, default=None)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give up the remaining work and end the threads; callers that wait get Cancelled."""
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
        """Run `work` in a thread of the device while no batch is computed, and return its result.

        Raises what `work` raises, and Cancelled.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised again where it was called
                future.set_exception(error)

        with self._lock:
            self._check_open()
            self._calls.append(run)
            self._wake()
        while not wait([future], POLL_SECONDS).done:
            with self._lock:
                self._check_open()
        return future.result()

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
        """Yield the scores of `image` as `SlidingWindow.run` does, computed in the device's threads.

        `share` is called there, by one thread at a time, for each batch with windows of this image. Raises Cancelled,
        and what `SlidingWindow.run` raises.
        """
        request = WindowRequest(
            window, image, overlap, due, cancelled, progress, share, deferred=self._mark is not None
        )
        with self._lock:
            self._check_open()
            self._requests.append(request)
            self._wake()
        try:
            while (slab := self._next_slab(request)) is not None:
                yield slab
        finally:
            with self._lock:
                request.failed = True
                self._requests.remove(request)

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("the device is given up")

    def _next_slab(self, request: WindowRequest) -> Slab | None:
        """Return the next slab of the request; None after the last one. Raises the error of the request."""
        slab = self._wait_for_slab(request)
        request.raise_error()
        if slab is not None and request.scan.left:
            with self._lock:
                request.untaken -= 1
                self._wake()
        return slab

    def _wait_for_slab(self, request: WindowRequest) -> Slab | None:
        while True:
            try:
                return request.answers.get(timeout=POLL_SECONDS)
            except Empty:
                with self._lock:
                    self._check_open()
            if request.cancelled():
                raise request.cancellation

    def _wake(self) -> None:
        """Wake an idle thread if there is work. Call it with the lock."""
        if self._idle and (self._may_call() or self._may_compute()):
            self._idle -= 1
            self._work.notify()

    @torch.inference_mode()
    def _loop(self, thread: int) -> None:
        last_sharing, done = 0, None
        while (work := self._wait(thread, done)) is not None:
            sharing, done = work.sharing if isinstance(work, Batch) else 1, None
            if sharing != last_sharing:
                # Only on a change: torch forgets what it has prepared for another number of threads.
                self._divide(sharing)
                last_sharing = sharing
            if isinstance(work, Batch):
                done = self._compute(work)
            elif isinstance(work, Launch):
                done = self._retire(work)
            else:
                with torch.inference_mode(mode=False):
                    work()
            del work  # holds images and models, and the next may be hours away

    def _wait(self, thread: int, done: int | None) -> Callable[[], None] | Batch | Launch | None:
        """Note that the thread is done with its call and with the batch `done`, and wait for what is next.

        Returns None at the end.
        """
        with self._lock:
            if done is not None:
                del self._busy[done]
            if self._caller == thread:
                self._caller = None
            while not self._closed:
                self._drop_cancelled()
                if self._may_call():
                    self._caller = thread
                    return self._calls.popleft()
                if requests := self._may_compute():
                    batch = self._next_batch(requests)
                    self._wake()
                    return batch
                if self._launched:
                    return self._launched.popleft()
                self._idle += 1
                self._work.wait()
            return None

    def _may_call(self) -> bool:
        return bool(self._calls) and self._caller is None and not self._busy

    def _drop_cancelled(self) -> None:
        for request in self._requests:
            if not request.failed and not request.over and request.cancelled():
                request.fail(request.cancellation)

    def _may_compute(self) -> list[WindowRequest]:
        """Return the requests whose windows may be computed now."""
        if self._calls or self._caller is not None:
            return []
        requests = choose_requests(self._requests, self._batches)
        return requests if requests and may_add(requests, self._busy.values(), self._depth) else []

    def _next_batch(self, requests: Sequence[WindowRequest]) -> Batch:
        """Fill the next batch with windows of these requests."""
        window = requests[0].window
        # Requests that have to take slabs first count too: they will be back in a moment.
        left = sum([request.scan.left for request in self._requests if request.window is window and not request.failed])
        sharing = min(window.streams, len(self._threads), len(self._busy) + -(-left // window.capacity))
        # Batches that follow each other on a device share the only stream.
        free = set(range(len(self._threads))) - {running.stream for running in self._busy.values()}
        stream = min(free, default=0)
        self._batches += 1
        self._busy[self._batches] = Running(window, stream)
        return Batch(self._batches, fill_batch(requests, window.capacity), stream, sharing)

    def _compute(self, batch: Batch) -> int | None:
        """Compute a batch and return its number; None where the device has it before it, and does it by itself."""
        if self._mark is not None:
            launch = Launch(batch.number, batch.batch_slices, batch.stream, self._mark, self._start_timer())
            self._launched.append(launch)
            return None
        if not self._forward(batch) and len(batch.batch_slices) > 1:
            # The error does not tell which request caused it, so each is computed alone.
            for batch_slice in batch.batch_slices:
                self._forward(batch._replace(batch_slices=[batch_slice]))
        return batch.number

    def _retire(self, launch: Launch) -> int:
        """Wait for a launched batch, hand over what has come of it, and return its number."""
        outcomes = launch.wait()
        now = time.monotonic()
        if (seconds := launch.device_seconds) is None:
            # While the batch before it was computed, it did not take the device.
            seconds = now - max(launch.began, self._last_done)
        self._last_done = now
        taken = sum([batch_slice.windows for batch_slice, _ in outcomes])
        slots = outcomes[0][0].request.window.slots(taken)
        for batch_slice, outcome in outcomes:
            part = batch_slice.windows / taken
            batch_slice.share = Share(batch_slice.windows, part * slots, part * seconds)
            self._order.settle(batch_slice, report(batch_slice, outcome))
        return launch.number

    def _forward(self, batch: Batch) -> bool:
        """Compute and blend a batch; False for an error, which a request that is alone in its batch gets."""
        began = time.monotonic()
        batch_slices = batch.batch_slices
        window, taken = batch_slices[0].request.window, sum([batch_slice.windows for batch_slice in batch_slices])
        try:
            scores = window.forward([batch_slice.part for batch_slice in batch_slices], batch.stream)
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
            if len(batch_slices) == 1:
                self._order.finish(batch_slices[0], error)
            return False
        each = (time.monotonic() - began) / batch.sharing / taken
        for batch_slice, outcome in zip(batch_slices, scores, strict=True):
            count = batch_slice.windows
            batch_slice.share = Share(count, count * window.slots(taken) / taken, count * each)
            self._order.finish(batch_slice, outcome)
        return True


@contextmanager
def open_batcher(settings: Settings) -> Iterator[WindowBatcher]:
    """Start a batcher for `settings.device.name` where no service runs, and close it at the end. Raises ConfigError."""
    device = devices.choose_device(settings.device.name)
    batcher = make_batcher(settings, device, on_host=device.type == "cpu")
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.close()
        batcher.join(CLOSE_SECONDS)


def make_batcher(settings: Settings, device: torch.device, *, on_host: bool) -> WindowBatcher:
    """Make a batcher with the most streams that a model may have, each of which gets its part of the cores."""
    cores = settings.device.threads or host.usable_cores()
    most = min(cores, MAX_STREAMS) if settings.engine.streams == "auto" else settings.engine.streams
    return WindowBatcher(
        "device",
        most if on_host else 1,
        lambda streams: devices.use_threads(max(cores // streams, 1)),
        None if on_host else partial(mark_end, device),
        start_timer=partial(CudaTimer, device) if device.type == "cuda" else lambda: None,
    )
