"""Where windows lie on a volume, what a voxel in them counts, and the weighted sums of their scores.

Windows come in rows along x, rows in layers along z. Neither the scores of the whole volume nor their weights ever
exist: what no later row reaches leaves with the last window of its row, and of a layer only the planes are kept that
the next one reaches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from service.core.errors import NonFiniteScores
from service.core.volume import Size
from service.inference.windows.grid import Along, Grid, Place
from service.inference.windows.kernels import Margins, Stitching

LEAST_WEIGHT = 1e-3

NOT_FINITE = "The network returned NaN or infinite scores for this volume; try precision fp32."


class Slab(NamedTuple):
    """Finished scores [1, K, z, y, X] of the planes from `z0` and the rows from `y0` on.

    float32, or of a single window on a CPU bfloat16, where the network gives that.
    """

    z0: int
    y0: int
    scores: Tensor


@dataclass(frozen=True)
class Blending:
    """How much a voxel counts by its place in the window; `sigma` is a share of the edge (Gaussian only)."""

    mode: Literal["constant", "gaussian"] = "gaussian"
    sigma: float = 0.125


class Blender(ABC):
    """Weighted means of the scores of windows that come in order; `blender` makes one."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def add(self, place: Size, window: Tensor) -> Slab | None:
        """Add the scores [K, *roi] of one window; gives what leaves with the last of a row. Raises NonFiniteScores."""
        z, y, x = (axis[start] for axis, start in zip(self._grid.along, place, strict=True))
        scores = self._add((z, y, x), window)
        if scores is None:
            return None
        # Only an axis that holds a single window is padded, so what is cut off is cut off its only slab.
        inside = (slice(first, first + n) for first, n in zip(self._grid.before, self._grid.size, strict=True))
        return Slab(place[0], place[1], scores[(None, slice(None), *inside)])

    @abstractmethod
    def _add(self, place: Place, window: Tensor) -> Tensor | None:
        """Of the last window of a row: means of the planes and rows that leave, [K, z, y, X]."""


def blender(grid: Grid, outputs: int, blending: Blending, device: torch.device, kernel: Stitching) -> Blender:
    """What blends windows of so many outputs on this device."""
    if kernel.suits(device):
        return _InOnePass(grid, outputs, blending, kernel)
    return _WithTorch(grid, outputs, blending, device)


def kept_floats(grid: Grid, outputs: int, *, by_kernel: bool) -> int:
    """How many numbers a `blender` keeps beside what leaves; a window that is alone is not blended."""
    if grid.count == 1:
        return 0
    (depth, height, _), (_, length, width), (planes, rows, columns) = grid.roi, grid.padded, grid.shared
    if by_kernel:
        return outputs * (depth * (2 * height * columns + width * rows) + planes * length * width)
    # Sums of a whole row with their weights, and the weights of one row alone.
    return width * (depth * height * (outputs + 2) + planes * length * (outputs + 1))


class _InOnePass(Blender):
    """By the kernel: what no later window reaches leaves with each window; of the others sums are kept."""

    def __init__(self, grid: Grid, outputs: int, blending: Blending, kernel: Stitching) -> None:
        super().__init__(grid)
        z, y, x = (importance(edge, blending, torch.device("cpu")) for edge in grid.roi)
        self._kernel, self._columns = kernel, len(grid.starts[2])
        self._margins = Margins(outputs, grid.padded, (z, y, x), LEAST_WEIGHT, grid.starts)
        self._means: Tensor | None = None

    def _add(self, place: Place, window: Tensor) -> Tensor | None:
        z, y, x = place
        if self._means is None:
            self._means = self._margins.means(z.leaving, y.leaving)
        if not self._kernel.blend(self._margins, (z.nth, y.nth, x.nth), window, self._means):
            raise NonFiniteScores(NOT_FINITE)
        if x.nth + 1 < self._columns:
            return None
        means, self._means = self._means, None
        return means


class _WithTorch(Blender):
    """By torch, on any device. One row of windows along x is summed at a time.

    row     [K, roi z, roi y, X], of which the first rows came from the row before
    layer   [K, z, Y, X], planes of the layer before (one z start) that this one reaches
    Weights have the same shapes without K, and those of a single row are the same for all rows.

    Nothing is zeroed that is written anyway: the buffers do not fit a processor's cache.
    """

    def __init__(self, grid: Grid, outputs: int, blending: Blending, device: torch.device) -> None:
        super().__init__(grid)
        self._importance = importance_map(grid.roi, blending, device)
        shared = (grid.shared[0], *grid.padded[1:])
        self._row = torch.empty((outputs, *grid.roi[:2], grid.padded[2]), device=device)
        self._layer = torch.empty((outputs, *shared), device=device)
        self._layer_weight = torch.empty(shared, device=device)
        self._one_row = torch.zeros(self._row.shape[1:], device=device)
        for left in grid.starts[2]:
            self._one_row[:, :, left : left + grid.roi[2]] += self._importance
        self._weight = self._one_row.clone()

    def _add(self, place: Place, window: Tensor) -> Tensor | None:
        z, y, x = place
        starts = self._grid.starts
        left, old, new = starts[2][x.nth], slice(y.known), slice(y.known, None)
        here = self._row[..., left : left + self._grid.roi[2]]
        here[:, :, old].addcmul_(window[:, :, old], self._importance[:, old])
        here[:, :, new, : x.known].addcmul_(window[:, :, new, : x.known], self._importance[:, new, : x.known])
        torch.mul(window[:, :, new, x.known :], self._importance[:, new, x.known :], out=here[:, :, new, x.known :])
        if x.nth + 1 < len(starts[2]):
            return None
        means = self._leave(z, y, starts[1][y.nth])
        if y.nth + 1 < len(starts[1]):
            self._carry(y.leaving)
        else:
            self._weight.copy_(self._one_row)
        return means

    def _leave(self, z: Along, y: Along, top: int) -> Tensor:
        """Means of the planes and rows that are final; the next layer gets the other planes of these rows."""
        kept = self._grid.roi[0] - z.leaving
        for all_sums, layer in ((self._row, self._layer), (self._weight, self._layer_weight)):
            sums, here = all_sums[..., : y.leaving, :], layer[..., top : top + y.leaving, :]
            sums[..., : z.known, :, :] += here[..., : z.known, :, :]
            here[..., :kept, :, :].copy_(sums[..., z.leaving :, :, :])
        return finite(self._row[:, : z.leaving, : y.leaving] / self._weight[: z.leaving, : y.leaving])

    def _carry(self, step: int) -> None:
        """Let the next row begin `step` rows further."""
        kept = self._grid.roi[1] - step
        for sums in (self._row, self._weight):
            part = sums[..., step:, :]
            # Source and target overlap where windows do by more than a half.
            sums[..., :kept, :].copy_(part if kept <= step else part.clone())
        self._weight[:, kept:] = 0
        self._weight += self._one_row


def finite(scores: Tensor, kernel: Stitching | None = None) -> Tensor:
    """The same scores, float32 unless the kernel can look through them as they are. Raises NonFiniteScores."""
    if kernel is not None and kernel.tells(scores):
        good = kernel.finite(scores)
    else:
        scores = scores.float()
        # One sum is NaN or infinite as soon as one score is, and reads the scores once while they are in the cache.
        good = math.isfinite(scores.sum().item())
    if not good:
        raise NonFiniteScores(NOT_FINITE)
    return scores


@lru_cache(maxsize=16)
def importance_map(roi: Size, blending: Blending, device: torch.device) -> Tensor:
    """Weight of every voxel of a window, float32 [*roi]: that of `monai.data.utils.compute_importance_map`."""
    z, y, x = (importance(edge, blending, device) for edge in roi)
    # Where a Gaussian is next to nothing, dividing by it would make noise of rounding.
    return (z[:, None, None] * y[:, None] * x).clamp(min=LEAST_WEIGHT)


def importance(edge: int, blending: Blending, device: torch.device) -> Tensor:
    """Weight of a voxel by its place along one axis of a window, float32 [edge]; no lower bound yet."""
    if blending.mode == "constant":
        return torch.ones(edge, device=device)
    distance = torch.arange(edge, dtype=torch.float32, device=device) - (edge - 1) / 2
    return torch.exp(distance**2 / (-2 * (blending.sigma * edge) ** 2))
