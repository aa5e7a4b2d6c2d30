"""Batches on their way through a device that computes by itself: launched, waited for when the next one is launched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from service.inference.windows.batching.window_request import BatchSlice, blend
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Measure

Mark = Callable[[], Callable[[], object]]
"""Marks the end of the work that a thread has given a device so far; what it returns waits until that is done."""

Outcomes = Sequence[tuple[BatchSlice, list[Slab] | Exception]]
"""Slices of a batch, each with the slabs that became final with it, or with its error."""


class Timer(Protocol):
    """Timer of the networks that a device runs, such as `CudaTimer`."""

    def measure(self) -> AbstractContextManager[object]:
        """Return a context in which a network is launched."""

    @property
    def seconds(self) -> float:
        """Seconds that the networks took, once the device has finished."""


class Launch:
    """One batch, which the device is given when this is made; `began` is when, in seconds of `time.monotonic`.

    device_seconds  that the network took by the device's own clock, after `wait`; None if no timer has measured them

    Its slices must be the next ones of their requests that are blended. Make it in torch's inference mode.
    """

    def __init__(
        self, number: int, batch_slices: Sequence[BatchSlice], stream: int, mark: Mark, timer: Timer | None = None
    ) -> None:
        self.number, self.began, self._timer = number, time.monotonic(), timer
        measure = nullcontext if timer is None else timer.measure
        self._outcomes: Outcomes = _enqueue(batch_slices, stream, measure)
        self._wait: Callable[[], object] = lambda: None
        self.device_seconds: float | None = None
        try:
            self._wait = mark()
        except Exception as error:  # noqa: BLE001 - raised again in the threads of the requests
            self._fail(error)

    def wait(self) -> Outcomes:
        """Wait until the device is done with the batch, and return what has come of it."""
        try:
            self._wait()
            if self._timer is not None and not any(isinstance(outcome, Exception) for _, outcome in self._outcomes):
                self.device_seconds = self._timer.seconds
        except Exception as error:  # noqa: BLE001 - raised again in the threads of the requests
            self._fail(error)
        return self._outcomes

    def _fail(self, error: Exception) -> None:
        self._outcomes = [(batch_slice, error) for batch_slice, _ in self._outcomes]


def _enqueue(batch_slices: Sequence[BatchSlice], stream: int, measure: Measure) -> Outcomes:
    """Have the device compute and blend a batch, or where it refuses the whole, each slice alone."""
    window = batch_slices[0].request.window
    try:
        scores = window.forward([batch_slice.part for batch_slice in batch_slices], stream, measure=measure)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        if len(batch_slices) == 1:
            return [(batch_slices[0], error)]
        # The error does not tell which request caused it.
        return [outcome for batch_slice in batch_slices for outcome in _enqueue([batch_slice], stream, measure)]
    for batch_slice, part in zip(batch_slices, scores, strict=True):
        batch_slice.outcome = part
    return [(batch_slice, blend(batch_slice)) for batch_slice in batch_slices]
