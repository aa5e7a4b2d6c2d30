"""Batches on an asynchronous device: each is launched, and waited for after the next one has been launched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from service.inference.windows.batching.window_request import BatchSlice, blend
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Measure

Mark = Callable[[], Callable[[], object]]
"""Marks the end of the work that a thread has given to a device so far; returns a function that waits for that work."""

Outcomes = Sequence[tuple[BatchSlice, list[Slab] | Exception]]
"""Slices of a batch, each with its error or the slabs that it completed."""


class Timer(Protocol):
    """Timer for the networks that run on a device, such as `CudaTimer`."""

    def measure(self) -> AbstractContextManager[object]:
        """Return a context manager; the networks launched within it are measured."""

    @property
    def seconds(self) -> float:
        """Run time of the networks in seconds. Valid once the device has finished."""


class Launch:
    """One batch on a device, launched by the constructor. Create it in torch's inference mode.

    began           time of the launch, in seconds of `time.monotonic`
    device_seconds  run time of the network by the device's own clock, after `wait`; None if no timer has measured it

    The batch slices must be the next ones to blend of their requests.
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


def _enqueue(batch_slices: Sequence[BatchSlice], stream: int, measure: Measure) -> Outcomes:
    """Queue the computation and blending of a batch on the device; if the batch fails, queue each slice separately."""
    window = batch_slices[0].request.window
    try:
        scores = window.forward([batch_slice.part for batch_slice in batch_slices], stream, measure=measure)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        if len(batch_slices) == 1:
            return [(batch_slices[0], error)]
        # The error does not reveal which request caused it.
        return [outcome for batch_slice in batch_slices for outcome in _enqueue([batch_slice], stream, measure)]
    for batch_slice, part in zip(batch_slices, scores, strict=True):
        batch_slice.outcome = part
    return [(batch_slice, blend(batch_slice)) for batch_slice in batch_slices]
