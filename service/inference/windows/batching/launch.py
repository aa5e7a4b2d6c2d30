"""Batches on an asynchronous device. The host waits for a batch only after it has launched the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from service.inference.windows.batching.window_request import BatchSlice, blend_slice
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Measure

Mark = Callable[[], Callable[[], object]]
"""Function that marks the end of the launched work, and returns a function that waits until that work is finished."""

Outcomes = Sequence[tuple[BatchSlice, list[Slab] | Exception]]
"""Slices of a batch, each with the slabs that the slice completed, or with its error."""


class Timer(Protocol):
    """Timer for the networks that run on a device, such as `CudaTimer`."""

    def measure(self) -> AbstractContextManager[object]:
        """Return a context manager that times the networks launched within it."""

    @property
    def seconds(self) -> float:
        """Run time of the networks in seconds. Valid once the device has finished."""


class LaunchedBatch:
    """One batch on a device, launched by the constructor. Create it in torch's inference mode.

    start_time      time of the launch, as returned by `time.monotonic`
    device_seconds  run time of the network, measured by the device's clock; set by `wait`, or None without a timer

    Each batch slice must be the next one of its request in blending order.
    """

    def __init__(
        self, number: int, batch_slices: Sequence[BatchSlice], stream: int, mark: Mark, timer: Timer | None = None
    ) -> None:
        self.number, self.start_time, self._timer = number, time.monotonic(), timer
        measure = nullcontext if timer is None else timer.measure
        self._outcomes: Outcomes = _enqueue_batch(batch_slices, stream, measure)
        self._wait: Callable[[], object] = lambda: None
        self.device_seconds: float | None = None
        try:
            self._wait = mark()
        except Exception as error:  # noqa: BLE001 - raised again in the threads of the requests
            self._fail(error)

    def wait(self) -> Outcomes:
        """Wait until the device has finished the batch, and return the outcomes."""
        try:
            self._wait()
            if self._timer is not None and not any(isinstance(outcome, Exception) for _, outcome in self._outcomes):
                self.device_seconds = self._timer.seconds
        except Exception as error:  # noqa: BLE001 - raised again in the threads of the requests
            self._fail(error)
        return self._outcomes

    def _fail(self, error: Exception) -> None:
        self._outcomes = [(batch_slice, error) for batch_slice, _ in self._outcomes]


def _enqueue_batch(batch_slices: Sequence[BatchSlice], stream: int, measure: Measure) -> Outcomes:
    """Queue the computation and blending of a batch on the device. If the batch fails, queue each slice separately."""
    sliding_window = batch_slices[0].request.sliding_window
    try:
        scores = sliding_window.forward(
            [batch_slice.window_slice for batch_slice in batch_slices], stream, measure=measure
        )
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        if len(batch_slices) == 1:
            return [(batch_slices[0], error)]
        # The error does not reveal which request caused it.
        return [outcome for batch_slice in batch_slices for outcome in _enqueue_batch([batch_slice], stream, measure)]
    for batch_slice, slice_scores in zip(batch_slices, scores, strict=True):
        batch_slice.outcome = slice_scores
    return [(batch_slice, blend_slice(batch_slice)) for batch_slice in batch_slices]
