"""Requests in the batcher: their windows are taken, computed and blended, and finished slabs are delivered to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from service.core.errors import Cancelled
from service.inference.windows.blending import FiniteFlag, Slab, require_finite
from service.inference.windows.sliding_window import Image, SlidingWindow, WindowSlice


class BatchShare(NamedTuple):
    """One request's share of a batch: number of windows, number of batch slots, and seconds of device time."""

    num_windows: int
    num_slots: float
    device_seconds: float


class BatchSlice:
    """Windows of one request in one batch and, once they have been processed, their scores or the error."""

    def __init__(self, request: WindowRequest, window_slice: WindowSlice) -> None:
        self.request, self.window_slice, self.num_windows = request, window_slice, len(window_slice.positions)
        self.outcome: Tensor | Exception | None = None
        self.share: BatchShare | None = None
        # Number of windows of the request that have been blended, up to and including this slice.
        self.num_blended = 0


class WindowRequest:
    """Windows of one request.

    The thread of the request and the threads of the device share this object, so a lock guards its attributes.

    due_time      value that orders the requests; the request with the lowest value is due first
    report_share  called with the share of the request in each batch that contains windows of the request
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        due_time: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        report_share: Callable[[BatchShare], None],
        *,
        is_asynchronous: bool = False,
    ) -> None:
        self.sliding_window, self.due_time, self.cancelled = window, due_time, cancelled
        self.progress, self.report_share = progress, report_share
        # On an asynchronous device, the scores are checked for NaN and infinity once a batch has finished.
        self.finite_flag = FiniteFlag(window.batch.device) if is_asynchronous else None
        self.scan = window.scan(image, overlap, require_finite if self.finite_flag is None else self.finite_flag.record)
        # Slices in blending order, which may differ from the order in which they are computed.
        self.batch_slices: deque[BatchSlice] = deque()
        self.is_blending = False
        # Finished slabs, followed by None after the last slab or an error. The queue can be used without the lock.
        self.slab_queue: SimpleQueue[Slab | None] = SimpleQueue()
        # Number of slabs that the thread of the request has not taken yet, and the maximum number up to which further
        # windows are computed. The maximum is normally 0. On an asynchronous device, it is the number of slabs of the
        # latest batch, because the device must not wait for the thread.
        self.num_pending_slabs = self.max_pending_slabs = 0
        self.error: Exception | None = None
        self.has_failed = self.is_finished = False

    @property
    def is_ready(self) -> bool:
        """Whether windows remain, the thread has taken enough slabs, and not too many slices wait to be blended."""
        is_keeping_up = (
            self.num_pending_slabs <= self.max_pending_slabs and len(self.batch_slices) <= self.sliding_window.streams
        )
        return self.scan.num_remaining > 0 and not self.has_failed and is_keeping_up

    @property
    def cancellation(self) -> Cancelled:
        """Exception that reports how many windows were finished when the request was canceled."""
        return Cancelled(f"The request was canceled after {self.scan.num_blended} of {self.scan.num_windows} windows.")

    def fail(self, error: Exception) -> None:
        """Stop the request, and raise `error` in its thread, unless the request has already failed."""
        if not self.has_failed:
            self.has_failed, self.error = True, error
            self.slab_queue.put(None)

    def raise_error(self) -> None:
        """Raise and clear the error of the request, if it has one."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame, which keeps the request alive.

    def deliver(self, slabs: Sequence[Slab], num_blended: int) -> None:
        """Deliver finished slabs to the thread of the request. `num_blended` windows have been blended so far."""
        self.num_pending_slabs += len(slabs)
        self.max_pending_slabs = 0 if self.finite_flag is None else len(slabs)
        for slab in slabs:
            self.slab_queue.put(slab)
        if num_blended == self.scan.num_windows:
            self.is_finished = True
            self.slab_queue.put(None)


def fill_batch(requests: Sequence[WindowRequest], capacity: int) -> list[BatchSlice]:
    """Take as many windows from the requests as fit in the batch."""
    batch_slices = []
    for request in requests:
        if not capacity:
            break
        batch_slice = BatchSlice(request, request.scan.take(capacity))
        request.batch_slices.append(batch_slice)
        batch_slices.append(batch_slice)
        capacity -= batch_slice.num_windows
    return batch_slices


def copy_scores(scores: Tensor) -> Tensor | Exception:
    """Return a copy of the scores, or the error if there is not enough memory."""
    try:
        return scores.clone()
    except (RuntimeError, MemoryError) as error:
        return error


def blend_slice(batch_slice: BatchSlice) -> list[Slab] | Exception:
    """Blend the computed windows of a slice, and return the completed slabs or the error."""
    request, (scan, positions), scores = batch_slice.request, batch_slice.window_slice, batch_slice.outcome
    if request.has_failed:
        return []
    if not isinstance(scores, Tensor):
        return scores or RuntimeError("the windows have not been computed")
    try:
        slabs = scan.blend(positions, scores)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        return error
    batch_slice.num_blended = scan.num_blended
    return slabs


def report_progress(batch_slice: BatchSlice, outcome: list[Slab] | Exception) -> list[Slab] | Exception:
    """Report the progress of a request after one of its slices has been blended.

    Returns `outcome`, or the error of a callback of the request.
    """
    request = batch_slice.request
    if request.has_failed or isinstance(outcome, Exception) or batch_slice.share is None:
        return outcome
    try:
        if request.finite_flag is not None:
            request.finite_flag.raise_if_not_finite()
        request.report_share(batch_slice.share)
        request.progress(batch_slice.num_blended, request.scan.num_windows)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        return error
    return outcome


class OrderedBlender:
    """Blends the slices of each request in window order, regardless of the order in which they are computed.

    `lock` guards the state that requests share with the threads of the device.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def finish(self, batch_slice: BatchSlice, outcome: Tensor | Exception) -> None:
        """Store the outcome of a slice, and blend all slices that are next in window order."""
        request = batch_slice.request
        must_store_scores = request.is_blending or request.batch_slices[0] is not batch_slice
        if must_store_scores and isinstance(outcome, Tensor) and not request.sliding_window.owns_scores:
            # The next batch of this stream may overwrite the scores before they are blended.
            outcome = copy_scores(outcome)
        with self._lock:
            batch_slice.outcome = outcome
            if request.is_blending or request.batch_slices[0] is not batch_slice:
                return
            request.is_blending = True
        next_slice: BatchSlice | None = batch_slice
        while next_slice is not None:
            next_slice = self._blend(next_slice)

    def _blend(self, batch_slice: BatchSlice) -> BatchSlice | None:
        """Blend a slice, and return the next one if it has been computed."""
        return self.deliver(batch_slice, report_progress(batch_slice, blend_slice(batch_slice)))

    def deliver(self, batch_slice: BatchSlice, outcome: list[Slab] | Exception) -> BatchSlice | None:
        """Deliver the outcome of the first slice of a request. Return the next slice if it has been computed."""
        request = batch_slice.request
        with self._lock:
            if isinstance(outcome, Exception):
                request.fail(outcome)
            elif not request.has_failed:
                request.deliver(outcome, batch_slice.num_blended)
            request.batch_slices.popleft()
            if request.batch_slices and request.batch_slices[0].outcome is not None:
                return request.batch_slices[0]
            request.is_blending = False
            return None
