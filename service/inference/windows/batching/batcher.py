"""Worker threads of one device, which compute batches with windows from several requests.

Requests preprocess, decode and write in threads of their own. Windows for the same network can share a batch, as most
networks take as long for a partly filled batch as for a full one. A GPU has one stream, on which the next batch is
launched before the previous one has finished. A CPU runs several batches concurrently, each on some of its cores. This
keeps the cores busier than one batch on all of them, where threads wait for the slowest one at the end of every layer.
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
from service.engine.cuda.events import CudaTimer, record_end
from service.inference.windows.batching.launch import Launch, Mark, Timer
from service.inference.windows.batching.schedule import Batch, Running, choose_requests, may_add
from service.inference.windows.batching.window_request import (
    BatchShare,
    BlendingOrder,
    WindowRequest,
    fill_batch,
    report,
)
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow

T = TypeVar("T")

# Interval at which a waiting request checks whether it was cancelled, even if the device no longer responds.
POLL_SECONDS = 0.2
# Time that `open_batcher` waits for the threads of its batcher to end.
CLOSE_SECONDS = 5.0
# Maximum number of unfinished batches that are launched on a GPU, so that it never waits for the host.
LAUNCHED_BATCHES = 2


class WindowBatcher:
    """Runs the batches of one device in its own threads, between `start` and `close`.

    name          name of the threads
    streams       maximum number of batches that run concurrently; a model may allow fewer
    share_cores   called in the thread of a stream before a batch, with the number of streams that share the device
    mark          for asynchronous devices: marks the end of the launched work. None: the device is synchronous
    start_timer   returns a timer that measures the network by the clock of the device; None: use the host's clock

    Two rules alternate in choosing the request for the next batch. One takes the request that is due first, which thus
    gets at least half of the device. The other takes the request with the fewest windows left, so that a small stack
    waits for only one or two batches, even behind a very large stack. Remaining room in the batch goes to other
    requests for the same network, ordered by the same rule. A partly filled batch that would take as long as a full one
    waits until no other batch is running: more windows may arrive, and alone it has the whole device.

    An idle thread is woken if there is work when windows or a call arrive, or when a request takes a slab. Threads that
    finish a batch or a call look for work themselves, and wake another thread if there is more.
    """

    def __init__(
        self,
        name: str,
        streams: int = 1,
        share_cores: Callable[[int], None] = lambda _streams: None,
        mark: Mark | None = None,
        *,
        start_timer: Callable[[], Timer | None] = lambda: None,
    ) -> None:
        self._share_cores, self._mark, self._start_timer = share_cores, mark, start_timer
        # Batches that one stream may have in progress.
        self._batches_per_stream = 1 if mark is None else LAUNCHED_BATCHES
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._order = BlendingOrder(self._lock)
        # Threads that wait for work and have not been woken.
        self._idle_threads = 0
        self._requests: list[WindowRequest] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._calling_thread: int | None = None  # thread that is running a call
        self._closed = False
        self._batch_count = 0
        # Unfinished batches by number.
        self._running: dict[int, Running] = {}
        # Launched batches in launch order, and the time at which the latest of the finished ones was done.
        self._launched: deque[Launch] = deque()
        self._last_done = 0.0
        self._threads = [
            threading.Thread(target=self._run_thread, args=(index,), name=name, daemon=True) for index in range(streams)
        ]

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def heartbeat(self) -> int | None:
        """Number of the oldest unfinished batch, which changes unless a batch is stuck. None if no batch is running."""
        with self._lock:
            return min(self._running, default=None)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Discard the remaining work and end the threads. Waiting callers get Cancelled."""
        with self._lock:
            self._closed = True
            self._work.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for all threads to end; return whether they have."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the device while no batch is running, and return its result.

        Raises the exceptions of `work`, and Cancelled after `close`.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised again in the calling thread
                future.set_exception(error)

        with self._lock:
            self._raise_if_closed()
            self._calls.append(run)
            self._wake()
        while not wait([future], POLL_SECONDS).done:
            with self._lock:
                self._raise_if_closed()
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
        share: Callable[[BatchShare], None] = lambda _share: None,
        due: float = 0.0,
    ) -> Iterator[Slab]:
        """Yield the scores of `image` like `SlidingWindow.run`, but compute them in the threads of the device.

        `share` is called in these threads for each batch with windows of the image, never concurrently.
        Raises Cancelled, and the exceptions of `SlidingWindow.run`.
        """
        request = WindowRequest(
            window, image, overlap, due, cancelled, progress, share, is_asynchronous=self._mark is not None
        )
        with self._lock:
            self._raise_if_closed()
            self._requests.append(request)
            self._wake()
        try:
            while (slab := self._next_slab(request)) is not None:
                yield slab
        finally:
            with self._lock:
                request.has_failed = True
                self._requests.remove(request)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Cancelled("The device was shut down.")

    def _next_slab(self, request: WindowRequest) -> Slab | None:
        """Return the next slab of the request, or None after the last one. Raises the error of the request."""
        slab = self._wait_for_slab(request)
        request.raise_error()
        if slab is not None and request.scan.left:
            with self._lock:
                request.untaken_slabs -= 1
                self._wake()
        return slab

    def _wait_for_slab(self, request: WindowRequest) -> Slab | None:
        while True:
            try:
                return request.slab_queue.get(timeout=POLL_SECONDS)
            except Empty:
                with self._lock:
                    self._raise_if_closed()
            if request.cancelled():
                raise request.cancellation

    def _wake(self) -> None:
        """Wake an idle thread if there is work. The caller must hold the lock."""
        if self._idle_threads and (self._can_call() or self._find_ready_requests()):
            self._idle_threads -= 1
            self._work.notify()

    @torch.inference_mode()
    def _run_thread(self, thread: int) -> None:
        last_sharing, done = 0, None
        while (work := self._next_work(thread, done)) is not None:
            sharing, done = work.sharing if isinstance(work, Batch) else 1, None
            if sharing != last_sharing:
                # Call it only on a change, because torch discards prepared kernels when the number of threads changes.
                self._share_cores(sharing)
                last_sharing = sharing
            if isinstance(work, Batch):
                done = self._compute(work)
            elif isinstance(work, Launch):
                done = self._complete(work)
            else:
                with torch.inference_mode(mode=False):
                    work()
            del work  # It refers to images and models, and the next work may arrive hours later.

    def _next_work(self, thread: int, done: int | None) -> Callable[[], None] | Batch | Launch | None:
        """Mark this thread's call and the batch `done` as finished, and wait for work. Returns None after `close`."""
        with self._lock:
            if done is not None:
                del self._running[done]
            if self._calling_thread == thread:
                self._calling_thread = None
            while not self._closed:
                self._fail_cancelled()
                if self._can_call():
                    self._calling_thread = thread
                    return self._calls.popleft()
                if requests := self._find_ready_requests():
                    batch = self._next_batch(requests)
                    self._wake()
                    return batch
                if self._launched:
                    return self._launched.popleft()
                self._idle_threads += 1
                self._work.wait()
            return None

    def _can_call(self) -> bool:
        return bool(self._calls) and self._calling_thread is None and not self._running

    def _fail_cancelled(self) -> None:
        for request in self._requests:
            if not request.has_failed and not request.is_finished and request.cancelled():
                request.fail(request.cancellation)

    def _find_ready_requests(self) -> list[WindowRequest]:
        """Return the requests for the next batch, or an empty list if no batch may start now."""
        if self._calls or self._calling_thread is not None:
            return []
        requests = choose_requests(self._requests, self._batch_count)
        return requests if requests and may_add(requests, self._running.values(), self._batches_per_stream) else []

    def _next_batch(self, requests: Sequence[WindowRequest]) -> Batch:
        """Fill the next batch with windows of the given requests."""
        window = requests[0].window
        # Count requests that have to take slabs first, because they will be ready soon.
        left = sum(
            [request.scan.left for request in self._requests if request.window is window and not request.has_failed]
        )
        sharing = min(window.streams, len(self._threads), len(self._running) + -(-left // window.capacity))
        # On an asynchronous device, successive batches share the only stream.
        free = set(range(len(self._threads))) - {running.stream for running in self._running.values()}
        stream = min(free, default=0)
        self._batch_count += 1
        self._running[self._batch_count] = Running(window, stream)
        return Batch(self._batch_count, fill_batch(requests, window.capacity), stream, sharing)

    def _compute(self, batch: Batch) -> int | None:
        """Compute a batch and return its number, or launch it and return None if the device is asynchronous."""
        if self._mark is not None:
            launch = Launch(batch.number, batch.batch_slices, batch.stream, self._mark, self._start_timer())
            self._launched.append(launch)
            return None
        if not self._forward(batch) and len(batch.batch_slices) > 1:
            # The error does not reveal which request caused it, so each is computed separately.
            for batch_slice in batch.batch_slices:
                self._forward(batch._replace(batch_slices=[batch_slice]))
        return batch.number

    def _complete(self, launch: Launch) -> int:
        """Wait for a launched batch, deliver its results, and return its number."""
        outcomes = launch.wait()
        now = time.monotonic()
        if (seconds := launch.device_seconds) is None:
            # Exclude the time in which the device was still computing the previous batch.
            seconds = now - max(launch.began, self._last_done)
        self._last_done = now
        window_count = sum([batch_slice.windows for batch_slice, _ in outcomes])
        slots = outcomes[0][0].request.window.slots(window_count)
        for batch_slice, outcome in outcomes:
            part = batch_slice.windows / window_count
            batch_slice.share = BatchShare(batch_slice.windows, part * slots, part * seconds)
            self._order.deliver(batch_slice, report(batch_slice, outcome))
        return launch.number

    def _forward(self, batch: Batch) -> bool:
        """Compute and blend a batch; return False on an error, which is delivered if the batch has only one request."""
        began = time.monotonic()
        batch_slices = batch.batch_slices
        window, total = batch_slices[0].request.window, sum([batch_slice.windows for batch_slice in batch_slices])
        try:
            scores = window.forward([batch_slice.part for batch_slice in batch_slices], batch.stream)
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
            if len(batch_slices) == 1:
                self._order.finish(batch_slices[0], error)
            return False
        seconds_per_window = (time.monotonic() - began) / batch.sharing / total
        for batch_slice, outcome in zip(batch_slices, scores, strict=True):
            count = batch_slice.windows
            batch_slice.share = BatchShare(count, count * window.slots(total) / total, count * seconds_per_window)
            self._order.finish(batch_slice, outcome)
        return True


@contextmanager
def open_batcher(settings: Settings) -> Iterator[WindowBatcher]:
    """Run a batcher for `settings.device.name` outside the service. Raises ConfigError."""
    device = devices.choose_device(settings.device.name)
    batcher = make_batcher(settings, device, on_host=device.type == "cpu")
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.close()
        batcher.join(CLOSE_SECONDS)


def make_batcher(settings: Settings, device: torch.device, *, on_host: bool) -> WindowBatcher:
    """Create a batcher with as many streams as any model may use; streams in use share the cores."""
    cores = settings.device.threads or host.usable_cores()
    max_streams = min(cores, MAX_STREAMS) if settings.engine.streams == "auto" else settings.engine.streams
    return WindowBatcher(
        "device",
        max_streams if on_host else 1,
        lambda streams: devices.set_torch_threads(max(cores // streams, 1)),
        None if on_host else partial(record_end, device),
        start_timer=partial(CudaTimer, device) if device.type == "cuda" else lambda: None,
    )
