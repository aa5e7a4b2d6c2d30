"""Scores of a network for planes, which is applied to the planes of three orientations, as in Cellpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from service.core.quantities import Size
from service.inference.windows.blending import Slab
from service.inference.windows.grid import PLANE_ORIENTATIONS, as_size, cover_planes
from service.inference.windows.sliding_window import SlidingWindow
from service.models.spec_parts import Tiling

# Number of planes of a yielded slab. Decoders copy the planes of a slab.
SLAB_PLANES = 16


class OrthogonalPlanes:
    """Runs a network for planes on the planes of three orientations, and adds up the scores.

    Used like `SlidingWindow.run`. The scores of the whole volume are held in memory, because the planes of each
    orientation contribute to all of them.

    run     runs the network on the windows of an image
    resize  returns a `SlidingWindow` for the same network and another window size
    tiling  positions of the tiles on the planes
    """

    def __init__(
        self,
        run: Callable[..., Iterator[Slab]],
        resize: Callable[[SlidingWindow, Size], SlidingWindow],
        tiling: Tiling,
    ) -> None:
        self._run, self._resize, self._tiling = run, resize, tiling

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
        """Yield the sums of the scores of `image`, float32 [1, C, Z, Y, X]. Propagates exceptions from `run`.

        The outputs of the network are a score without direction, and a vector (z, y, x) of which z is across the plane.
        """
        tile = as_size(window.batch.shape[2:])
        grids = cover_planes(as_size(image.shape[2:]), tile, overlap, self._tiling)
        counts = [grid.num_windows for grid in grids]
        total = torch.zeros(())
        for index, (axes, grid) in enumerate(zip(PLANE_ORIENTATIONS, grids, strict=True)):
            num_finished = sum(counts[:index])
            slabs = self._run(
                self._resize(window, grid.window_size),
                image.permute(0, 1, *(axis + 2 for axis in axes)),
                overlap,
                cancelled=cancelled,
                progress=lambda done, _total, num_finished=num_finished: progress(num_finished + done, sum(counts)),
            )
            for slab in slabs:
                if not total.dim():
                    total = torch.zeros((slab.scores.shape[1], *image.shape[2:]))
                _add_scores(total, slab, axes)
        for first in range(0, image.shape[2], SLAB_PLANES):
            yield Slab(first, 0, total[None, :, first : first + SLAB_PLANES])


def _add_scores(total: Tensor, slab: Slab, axes: Size) -> None:
    """Add a slab of planes whose axes are `axes` of the volume to the scores [4, Z, Y, X] of the volume."""
    _, _, num_planes, num_rows, _ = slab.scores.shape
    scores = slab.scores[0].float().cpu()
    # The vector has no component across the plane.
    for source, target in ((0, 0), (2, 1 + axes[1]), (3, 1 + axes[2])):
        planes = total[target].permute(axes)
        planes[slab.z0 : slab.z0 + num_planes, slab.y0 : slab.y0 + num_rows] += scores[source]
