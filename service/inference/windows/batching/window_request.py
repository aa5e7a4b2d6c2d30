"""Windows of one request on their way through batches: taken, computed, blended in order, handed to its thread."""

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


class Share(NamedTuple):
    """Part of one request in a batch: its windows, its share of the batch's slots and of the device's seconds."""

    windows: int
    slots: float
    seconds: float


class BatchSlice:
    """Windows of one request in one batch, and their scores or the error once they were computed."""

    def __init__(self, request: WindowRequest, part: WindowSlice) -> None:
        self.request, self.part, self.windows = request, part, len(part.places)
        self.outcome: Tensor | Exception | None = None
        self.share: Share | None = None
        # Windows of the request that are blended with this slice and those before it.
        self.done = 0


class WindowRequest:
    """Windows of one request, between its own thread and those of the device, whose lock guards shared state."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        due: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        share: Callable[[Share], None],
        *,
        deferred: bool = False,
    ) -> None:
        self.window, self.due, self.cancelled = window, due, cancelled
        self.progress, self.share = progress, share
        # Asked once a device that computes by itself is done with what it was given.
        self.finite = FiniteFlag(window.batch.device) if deferred else None
        self.scan = window.scan(image, overlap, require_finite if self.finite is None else self.finite.note)
        # In the order in which they are blended, whatever the order in which they are computed.
        self.batch_slices: deque[BatchSlice] = deque()
        self.blending = False
        # Slabs, then None after the last of them or for an error. No lock is needed to be woken by it.
        self.answers: SimpleQueue[Slab | None] = SimpleQueue()
        # Slabs that its thread has not taken, and how many of these it may leave while more windows are computed: none,
        # or those of the latest batch, as a device that computes by itself would otherwise wait for this thread.
        self.untaken = self.spared = 0
        self.error: Exception | None = None
        self.failed = self.over = False

    @property
    def is_ready(self) -> bool:
        """Whether windows are left, its thread has taken all slabs, and few batches wait for one that is slow."""
        keeps_up = self.untaken <= self.spared and len(self.batch_slices) <= self.window.streams
        return self.scan.left > 0 and not self.failed and keeps_up

    @property
    def cancellation(self) -> Cancelled:
        """Error that says how far the request has come."""
        return Cancelled(f"given up after {self.scan.done} of {self.scan.total} windows")

    def fail(self, error: Exception) -> None:
        """Stop computing and blending, and raise `error` in the thread of the request unless another one came first."""
        if not self.failed:
            self.failed, self.error = True, error
            self.answers.put(None)

    def raise_error(self) -> None:
        """Raise the error that the request got, if any, and forget it."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # which refers to this frame, and with it to the request

    def hand_over(self, slabs: Sequence[Slab], done: int) -> None:
        """Hand finished slabs to the thread of the request, of which so many windows are done."""
        self.untaken += len(slabs)
        self.spared = 0 if self.finite is None else len(slabs)
        for slab in slabs:
            self.answers.put(slab)
        if done == self.scan.total:
            self.over = True
            self.answers.put(None)


def fill_batch(requests: Sequence[WindowRequest], capacity: int) -> list[BatchSlice]:
    """Take as many windows of the requests as the batch has capacity for."""
    batch_slices = []
    for request in requests:
        if not capacity:
            break
        batch_slice = BatchSlice(request, request.scan.take(capacity))
        request.batch_slices.append(batch_slice)
        batch_slices.append(batch_slice)
        capacity -= batch_slice.windows
    return batch_slices


def copy_scores(scores: Tensor) -> Tensor | Exception:
    """Return a copy, or the error if there is no memory for one."""
    try:
        return scores.clone()
    except (RuntimeError, MemoryError) as error:
        return error


def blend(batch_slice: BatchSlice) -> list[Slab] | Exception:
    """Blend computed windows; return the slabs that became final, or what was wrong with the scores."""
    request, (scan, places), scores = batch_slice.request, batch_slice.part, batch_slice.outcome
    if request.failed:
        return []
    if not isinstance(scores, Tensor):
        return scores or RuntimeError("not computed")
    try:
        slabs = scan.blend(places, scores)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        return error
    batch_slice.done = scan.done
    return slabs


def report(batch_slice: BatchSlice, outcome: list[Slab] | Exception) -> list[Slab] | Exception:
    """Count windows that are computed and blended; return their `outcome`, or what was wrong with the scores."""
    request = batch_slice.request
    if request.failed or isinstance(outcome, Exception) or batch_slice.share is None:
        return outcome
    try:
        if request.finite is not None:
            request.finite.check()
        request.share(batch_slice.share)
        request.progress(batch_slice.done, request.scan.total)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        return error
    return outcome


class BlendingOrder:
    """Blends the computed windows of each request in their order, whatever the order in which they were computed.

    `lock` guards the state that requests share with the threads of the device.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def finish(self, batch_slice: BatchSlice, outcome: Tensor | Exception) -> None:
        """Blend computed windows and those that waited for them, or leave that to the thread that blends before."""
        request = batch_slice.request
        waits = request.blending or request.batch_slices[0] is not batch_slice
        if waits and isinstance(outcome, Tensor) and not request.window.owns_scores:
            # This stream's next batch may overwrite the scores before they are blended.
            outcome = copy_scores(outcome)
        with self._lock:
            batch_slice.outcome = outcome
            if request.blending or request.batch_slices[0] is not batch_slice:
                return
            request.blending = True
        following: BatchSlice | None = batch_slice
        while following is not None:
            following = self._blend(following)

    def _blend(self, batch_slice: BatchSlice) -> BatchSlice | None:
        """Blend one slice, and return the next if that was computed."""
        return self.settle(batch_slice, report(batch_slice, blend(batch_slice)))

    def settle(self, batch_slice: BatchSlice, outcome: list[Slab] | Exception) -> BatchSlice | None:
        """Hand over what has come of the first slice of a request; return its next if that was computed."""
        request = batch_slice.request
        with self._lock:
            if isinstance(outcome, Exception):
                request.fail(outcome)
            elif not request.failed:
                request.hand_over(outcome, batch_slice.done)
            request.batch_slices.popleft()
            if request.batch_slices and request.batch_slices[0].outcome is not None:
                return request.batch_slices[0]
            request.blending = False
            return None
