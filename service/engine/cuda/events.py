"""CUDA events, used to wait for the work in a stream and to measure its duration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def record_end(device: torch.device) -> Callable[[], object]:
    """Record an event on the device's current stream, and return a function that waits for it."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


class CudaTimer:
    """A timer for the seconds that a CUDA device spends on parts of the work in its current stream.

    Time spent on the host is not included as long as each part is a single launch, such as the replay of a graph.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._event_pairs: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the device time of the work launched within this context."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._cuda.current_stream(self._device)
        start.record(stream)
        yield
        end.record(stream)
        self._event_pairs.append((start, end))

    @property
    def seconds(self) -> float:
        """Total time of all parts in seconds. Read this property only after the device has finished all of them."""
        milliseconds: float = sum(start.elapsed_time(end) for start, end in self._event_pairs)
        return milliseconds / 1000
