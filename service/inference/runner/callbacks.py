"""Functions that a request brings along: what computes its windows, and who is asked and told meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from service.inference.types import Estimate
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow

Cancelled = Callable[[], bool]
Progress = Callable[[int, int], None]

ComputeSlabs = Callable[[SlidingWindow, Image, float], Iterator[Slab]]
"""(windows, image, overlap) -> the scores of the image."""


class RunWindows(Protocol):
    """Computes the windows of an image: `SlidingWindow.run`, or `WindowBatcher.run` together with those of others."""

    def __call__(
        self, window: SlidingWindow, image: Image, overlap: float, /, *, cancelled: Cancelled, progress: Progress
    ) -> Iterator[Slab]:
        """Yield the scores of `image`. Raises what `SlidingWindow.run` raises."""


class Callbacks(NamedTuple):
    """Functions of a caller that segments.

    run        computes the windows
    cancelled  whether the request was cancelled; asked between two batches
    progress   called with the windows that are done, from 0 on, and their total, each once for every view of it
    revised    called with a new estimate once the diameter of the objects was estimated
    """

    run: RunWindows = SlidingWindow.run
    cancelled: Cancelled = lambda: False
    progress: Progress = lambda _done, _total: None
    revised: Callable[[Estimate], object] = lambda _estimate: None

    @property
    def probe(self) -> ComputeSlabs:
        """Computes windows that are scored to measure objects or background, and that do not count as progress."""
        return partial(self.run, cancelled=self.cancelled, progress=lambda _done, _total: None)
