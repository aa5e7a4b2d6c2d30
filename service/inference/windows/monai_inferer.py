"""MONAI's `sliding_window_inference`, as an alternative to `SlidingWindow` and as the reference in its tests.

This module is imported only with the setting `windows.inferer: monai`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from service.core.sections.computing import Windows
from service.inference.windows.blending import Slab
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.sliding_window import SlidingWindow, score_stack
from service.models.architectures.monai import REQUIRED_PACKAGES, hide_packages_except

with hide_packages_except(REQUIRED_PACKAGES):
    from monai.inferers.utils import sliding_window_inference


class MonaiInferer:
    """Extracts and blends windows with MONAI.

    The function `run` runs the network; it is `SlidingWindow.run` or `WindowBatcher.run`. MONAI holds the scores of the
    whole volume in memory, and returns them as a single slab.
    """

    def __init__(self, settings: Windows, run: Callable[..., Iterator[Slab]]) -> None:
        self._settings, self._run = settings, run

    def __call__(
        self,
        window: SlidingWindow,
        image: Tensor,
        overlap: float,
        /,
        *,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> Iterator[Slab]:
        """Yield the scores of `image`, float32 [1, C, Z, Y, X], as one slab. Propagates exceptions from `run`."""
        settings, roi, num_scored = self._settings, as_size(window.batch.shape[2:]), 0
        total = Grid.cover(as_size(image.shape[2:]), roi, overlap).num_windows

        def compute_slabs(stack: Tensor) -> Iterator[Tensor]:
            slabs = self._run(window, stack, 0.0, cancelled=cancelled, progress=lambda _done, _total: None)
            return (slab.scores for slab in slabs)

        def score_batch(windows: Tensor) -> Tensor:
            nonlocal num_scored
            scores = score_stack(windows, compute_slabs).to(windows.device)
            num_scored += len(windows)
            progress(num_scored, total)
            return scores

        scores = sliding_window_inference(
            image,
            roi,
            window.capacity,
            score_batch,
            overlap,
            mode=settings.blending,
            sigma_scale=settings.sigma,
            padding_mode=settings.padding_mode,
            cval=settings.cval,
            sw_device=settings.sw_device,
            device=settings.device,
        )
        if not isinstance(scores, Tensor):
            raise TypeError(f"MONAI returned {type(scores).__name__} instead of one score tensor.")
        yield Slab(0, 0, scores)
