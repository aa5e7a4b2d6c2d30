"""Callbacks of a request, which run the network on windows, check for cancellation, and report progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from service.inference.types import ResourceEstimate
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow

IsCancelled = Callable[[], bool]
ReportProgress = Callable[[int, int], None]

ComputeSlabs = Callable[[SlidingWindow, Image, float], Iterator[Slab]]
"""Function (window, image, overlap) that yields the scores of the image as slabs."""


class RunWindows(Protocol):
    """Function that runs the network on the windows of an image.

    `WindowBatcher.run` batches them with the windows of other requests; `SlidingWindow.run` processes them separately.
    """

    def __call__(
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        /,
        *,
        cancelled: IsCancelled,
        progress: ReportProgress,
    ) -> Iterator[Slab]:
        """Yield the scores of `image`. Raises the same exceptions as `SlidingWindow.run`."""


class Callbacks(NamedTuple):
    """Callbacks of one request.

    run              runs the network on the windows
    cancelled        returns whether the request was canceled; called between batches
    progress         called with the number of finished windows, starting with 0, and the total number of windows; each
                     view of a window counts separately
    on_new_estimate  called with the new memory estimate after the object diameter has been estimated
    """

    run: RunWindows = SlidingWindow.run
    cancelled: IsCancelled = lambda: False
    progress: ReportProgress = lambda _done, _total: None
    on_new_estimate: Callable[[ResourceEstimate], object] = lambda _estimate: None

    @property
    def probe(self) -> ComputeSlabs:
        """Function that runs the network on windows to measure objects or background, without reporting progress."""
        return partial(self.run, cancelled=self.cancelled, progress=lambda _done, _total: None)
