"""Worker threads of one device, which run batches of windows from several requests.

Requests preprocess, decode and write in their own threads. Windows for the same network can share a batch, because most
networks take as long for a partly filled batch as for a full one. A GPU has one stream, on which the next batch is
launched before the previous one has finished. A CPU runs several batches concurrently, each on some of its cores. This
keeps the cores busier than one batch on all cores, whose threads wait for the slowest one at the end of every layer.
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
from service.inference.windows.batching.launch import LaunchedBatch, Mark, Timer
from service.inference.windows.batching.schedule import Batch, RunningBatch, can_start, choose_requests
from service.inference.windows.batching.window_request import (
    BatchShare,
    OrderedBlender,
    WindowRequest,
    fill_batch,
    report_progress,
)
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow

T = TypeVar("T")

# Interval at which a waiting request checks whether it was canceled. The check works even if the device is stuck.
POLL_SECONDS = 0.2
# Maximum time that `open_batcher` waits for the threads of its batcher to end.
CLOSE_TIMEOUT_SECONDS = 5.0
# Maximum number of unfinished batches that are launched on a GPU. With two, the GPU never waits for the host.
MAX_LAUNCHED_BATCHES = 2


class WindowBatcher:
    """Runs the batches of one device in its own threads, between `start` and `close`.

    name          name of the threads
    streams       maximum number of batches that run concurrently; a model may allow fewer batches
    share_cores   called in the thread of a stream before a batch, with the number of streams that share the device
    mark          function that marks the end of the launched work; None if the device is synchronous
    make_timer    returns a timer that measures the network by the device's clock, or None to use the host's clock

    Two rules alternate in choosing the request for the next batch. The first takes the request that is due first, so
    it gets at least half of the device time. The second takes the request with the fewest remaining windows, so a small
    stack waits for only one or two batches, even if it arrives after a very large one. The same rule then chooses other
    requests for the same network, whose windows fill the free slots. If a partly filled batch would take as long as a
    full one, it waits until no other batch is running, because more windows may arrive in the meantime.

    When windows or a call arrive, or when a request takes a slab, an idle thread is woken if there is work. A thread
    that finishes a batch or a call looks for work itself, and wakes another thread if there is more work.
    """

    def __init__(
        self,
        name: str,
        streams: int = 1,
        share_cores: Callable[[int], None] = lambda _streams: None,
        mark: Mark | None = None,
        *,
        make_timer: Callable[[], Timer | None] = lambda: None,
    ) -> None:
        self._share_cores, self._mark, self._make_timer = share_cores, mark, make_timer
        self._max_stream_batches = 1 if mark is None else MAX_LAUNCHED_BATCHES
        self._lock = threading.Lock()
        self._work_available = threading.Condition(self._lock)
        self._ordered_blender = OrderedBlender(self._lock)
        self._requests: list[WindowRequest] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._calling_thread_index: int | None = None  # index of the thread that is running a call
        self._is_closed = False
        self._num_idle_threads = 0  # number of threads that wait for work and have not been woken
        self._batch_count = 0
        # Unfinished batches by number.
        self._batches: dict[int, RunningBatch] = {}
        # Launched batches in launch order, and the time at which the latest batch finished.
        self._launched_batches: deque[LaunchedBatch] = deque()
        self._last_finish_time = 0.0
        self._threads = [
            threading.Thread(target=self._run_thread, args=(index,), name=name, daemon=True) for index in range(streams)
        ]

    @property
    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def heartbeat(self) -> int | None:
        """Number of the oldest unfinished batch; None if no batch is running. It changes unless a batch is stuck."""
        with self._lock:
            return min(self._batches, default=None)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Discard the remaining work and end the threads. Cancelled is raised in waiting callers."""
        with self._lock:
            self._is_closed = True
            self._work_available.notify_all()

    def join(self, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` for all threads to end. Return whether they have ended."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the device while no batch is running, and return its result.

        Propagates exceptions from `work`, and raises Cancelled if the batcher is closed.
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
        report_share: Callable[[BatchShare], None] = lambda _share: None,
        due_time: float = 0.0,
    ) -> Iterator[Slab]:
        """Yield the scores of `image` like `SlidingWindow.run`, but compute them in the threads of the device.

        `report_share` is called in these threads for each batch with windows of the image, never concurrently. Requests
        with a lower `due_time` are due earlier. Raises what `SlidingWindow.run` raises, and Cancelled after `close`.
        """
        request = WindowRequest(
            window, image, overlap, due_time, cancelled, progress, report_share, is_asynchronous=self._mark is not None
        )
        with self._lock:
            self._raise_if_closed()
            self._requests.append(request)
            self._wake()
        try:
            while (slab := self._get_next_slab(request)) is not None:
                yield slab
        finally:
            with self._lock:
                request.has_failed = True
                self._requests.remove(request)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise Cancelled("The device was shut down.")

    def _get_next_slab(self, request: WindowRequest) -> Slab | None:
        """Return the next slab of the request, or None after the last one. Raises the error of the request."""
        slab = self._wait_for_slab(request)
        request.raise_error()
        if slab is not None and request.scan.num_remaining:
            with self._lock:
                request.num_pending_slabs -= 1
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
        if self._num_idle_threads and (self._can_run_call() or self._find_ready_requests()):
            self._num_idle_threads -= 1
            self._work_available.notify()

    @torch.inference_mode()
    def _run_thread(self, thread_index: int) -> None:
        previous_stream_count, finished_batch = 0, None
        while (work := self._wait_for_work(thread_index, finished_batch)) is not None:
            stream_count, finished_batch = work.num_active_streams if isinstance(work, Batch) else 1, None
            if stream_count != previous_stream_count:
                # Avoid unnecessary calls, because each one makes torch discard its prepared kernels.
                self._share_cores(stream_count)
                previous_stream_count = stream_count
            if isinstance(work, Batch):
                finished_batch = self._compute_batch(work)
            elif isinstance(work, LaunchedBatch):
                finished_batch = self._complete_batch(work)
            else:
                with torch.inference_mode(mode=False):
                    work()
            del work  # It refers to images and models, and the next batch or call may arrive hours later.

    def _wait_for_work(self, index: int, batch_number: int | None) -> Callable[[], None] | Batch | LaunchedBatch | None:
        """Mark the last call or batch of a thread as finished, and wait for work. Returns None after `close`."""
        with self._lock:
            if batch_number is not None:
                del self._batches[batch_number]
            if self._calling_thread_index == index:
                self._calling_thread_index = None
            while not self._is_closed:
                self._fail_cancelled_requests()
                if self._can_run_call():
                    self._calling_thread_index = index
                    return self._calls.popleft()
                if requests := self._find_ready_requests():
                    batch = self._start_next_batch(requests)
                    self._wake()
                    return batch
                if self._launched_batches:
                    return self._launched_batches.popleft()
                self._num_idle_threads += 1
                self._work_available.wait()
            return None

    def _can_run_call(self) -> bool:
        return bool(self._calls) and self._calling_thread_index is None and not self._batches

    def _fail_cancelled_requests(self) -> None:
        for request in self._requests:
            if not request.has_failed and not request.is_finished and request.cancelled():
                request.fail(request.cancellation)

    def _find_ready_requests(self) -> list[WindowRequest]:
        """Return the requests for the next batch, or an empty list if no batch may start now."""
        if self._calls or self._calling_thread_index is not None:
            return []
        requests = choose_requests(self._requests, self._batch_count)
        return requests if requests and can_start(requests, self._batches.values(), self._max_stream_batches) else []

    def _start_next_batch(self, requests: Sequence[WindowRequest]) -> Batch:
        window = requests[0].sliding_window
        # Include requests whose threads still have to take slabs, because these requests will be ready soon.
        active_requests = [item for item in self._requests if item.sliding_window is window and not item.has_failed]
        num_remaining = sum([item.scan.num_remaining for item in active_requests])
        num_streams = min(window.streams, len(self._threads), len(self._batches) + -(-num_remaining // window.capacity))
        # On an asynchronous device, successive batches share the only stream.
        free_streams = set(range(len(self._threads))) - {running.stream for running in self._batches.values()}
        stream = min(free_streams, default=0)
        self._batch_count += 1
        self._batches[self._batch_count] = RunningBatch(window, stream)
        return Batch(self._batch_count, fill_batch(requests, window.capacity), stream, num_streams)

    def _compute_batch(self, batch: Batch) -> int | None:
        """Compute a batch and return its number. On an asynchronous device, launch it and return None."""
        if self._mark is not None:
            launch = LaunchedBatch(batch.number, batch.batch_slices, batch.stream, self._mark, self._make_timer())
            self._launched_batches.append(launch)
            return None
        if not self._forward_batch(batch) and len(batch.batch_slices) > 1:
            # The error does not reveal which request caused it, so compute the requests separately.
            for batch_slice in batch.batch_slices:
                self._forward_batch(batch._replace(batch_slices=[batch_slice]))
        return batch.number

    def _complete_batch(self, launch: LaunchedBatch) -> int:
        """Wait for a launched batch, deliver its results, and return its number."""
        outcomes = launch.wait()
        now = time.monotonic()
        if (seconds := launch.device_seconds) is None:
            # Exclude the time in which the device was still computing the previous batch.
            seconds = now - max(launch.start_time, self._last_finish_time)
        self._last_finish_time = now
        window_count = sum([batch_slice.num_windows for batch_slice, _ in outcomes])
        num_slots = outcomes[0][0].request.sliding_window.get_batch_size(window_count)
        for batch_slice, outcome in outcomes:
            fraction = batch_slice.num_windows / window_count
            batch_slice.share = BatchShare(batch_slice.num_windows, fraction * num_slots, fraction * seconds)
            self._ordered_blender.deliver(batch_slice, report_progress(batch_slice, outcome))
        return launch.number

    def _forward_batch(self, batch: Batch) -> bool:
        """Compute and blend a batch. Return False on an error, which is delivered if there is only one request."""
        start_time = time.monotonic()
        batch_slices = batch.batch_slices
        window = batch_slices[0].request.sliding_window
        total = sum([batch_slice.num_windows for batch_slice in batch_slices])
        try:
            scores = window.forward([batch_slice.window_slice for batch_slice in batch_slices], batch.stream)
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
            if len(batch_slices) == 1:
                self._ordered_blender.finish(batch_slices[0], error)
            return False
        window_seconds = (time.monotonic() - start_time) / batch.num_active_streams / total
        for batch_slice, outcome in zip(batch_slices, scores, strict=True):
            count = batch_slice.num_windows
            batch_slice.share = BatchShare(count, count * window.get_batch_size(total) / total, count * window_seconds)
            self._ordered_blender.finish(batch_slice, outcome)
        return True


@contextmanager
def open_batcher(settings: Settings) -> Iterator[WindowBatcher]:
    """Run a batcher for `settings.device.name` outside the service. Raises ConfigError if there is no such device."""
    device = devices.choose_device(settings.device.name)
    batcher = make_batcher(settings, device, uses_host_memory=device.type == "cpu")
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.close()
        if not batcher.join(CLOSE_TIMEOUT_SECONDS):
            host.skip_finalization()


def make_batcher(settings: Settings, device: torch.device, *, uses_host_memory: bool) -> WindowBatcher:
    """Create a batcher with as many streams as any model may use. Active streams share the cores."""
    cores = settings.device.threads or host.count_usable_cores()
    max_streams = min(cores, MAX_STREAMS) if settings.engine.streams == "auto" else settings.engine.streams
    return WindowBatcher(
        "device",
        max_streams if uses_host_memory else 1,
        lambda streams: devices.set_torch_threads(max(cores // streams, 1)),
        None if uses_host_memory else partial(record_end, device),
        make_timer=partial(CudaTimer, device) if device.type == "cuda" else lambda: None,
    )
