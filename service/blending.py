"""Where windows lie on a volume, what a voxel in them counts, and the weighted sums of their scores.

Windows come in rows along x, rows in layers along z. Neither the scores of the whole volume nor their weights ever
exist: one row is summed at a time, and of a layer only the planes that the next one reaches are kept.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from service.errors import NonFiniteScores
from service.stitching import Row, Stitching

Size = tuple[int, int, int]

LEAST_WEIGHT = 1e-3

NOT_FINITE = "The network returned NaN or infinite scores for this volume; try precision fp32."

# Scores of windows that are not computed become final all at once: no more bytes of them than these at a time.
SKIPPED_BYTES = 2**26


class Slab(NamedTuple):
    """Finished scores [1, K, z, y, X] of the planes from `z0` and the rows from `y0` on.

    float32, or of a single window on a CPU bfloat16, where the network gives that.
    """

    z0: int
    y0: int
    scores: Tensor


@dataclass(frozen=True)
class Grid:
    """Where the windows lie on a volume of `size` (Z, Y, X) that is padded to at least one window.

    roi       edges of a window
    before    voxels of padding in front of each axis
    padded    edges of the padded volume
    starts    first voxel of the windows along each axis, in the padded volume
    """

    size: Size
    roi: Size
    before: Size
    padded: Size
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @classmethod
    def cover(cls, size: Size, roi: Size, overlap: float) -> Grid:
        """The positions that MONAI would take for this overlap (a share of the window, 0 <= overlap < 1)."""
        missing = [max(edge - length, 0) for edge, length in zip(roi, size, strict=True)]
        padded = triple([length + m for length, m in zip(size, missing, strict=True)])
        steps = [_step(length, edge, overlap) for length, edge in zip(padded, roi, strict=True)]
        z, y, x = (_starts(length, edge, step) for length, edge, step in zip(padded, roi, steps, strict=True))
        return cls(size, roi, triple([m // 2 for m in missing]), padded, (z, y, x))

    @property
    def count(self) -> int:
        """Number of windows."""
        z, y, x = self.starts
        return len(z) * len(y) * len(x)

    @property
    def rows(self) -> int:
        """Number of rows of windows along x."""
        return len(self.starts[0]) * len(self.starts[1])

    @property
    def shared_planes(self) -> int:
        """Most planes that two layers of windows, one z start after the other, have in common."""
        steps = (after - start for start, after in itertools.pairwise(self.starts[0]))
        return max((self.roi[0] - step for step in steps), default=0)

    def rows_to_skip(self, outputs: int, batch_size: int) -> int:
        """Most rows without a window that is computed between two that are: their slabs leave with one batch."""
        row = 4 * outputs * self.roi[0] * self.roi[1] * self.padded[2]
        return max(SKIPPED_BYTES // (row * batch_size), 1)

    def positions(self) -> Iterator[Size]:
        """First voxels of the windows, z slowest."""
        return itertools.product(*self.starts)


@dataclass(frozen=True)
class Blending:
    """How much a voxel counts by its place in the window; `sigma` is a share of the edge (Gaussian only)."""

    mode: Literal["constant", "gaussian"] = "gaussian"
    sigma: float = 0.125


class Blender(ABC):
    """Weighted means of the scores of windows that come in order; `blender` makes one.

    One row of windows along x is summed at a time, and the part of the row before that lies in it; of the layer before
    (one z start), those planes are kept that this layer reaches.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # Planes of the layer before that this one reaches.
        self._reached = 0
        self._z = self._y = -1
        # The first rows of this row came from the one before, the first columns of the others from its windows.
        self._carried = self._right = 0

    def add(self, place: Size, window: Tensor) -> Slab | None:
        """Add the scores [K, *roi] of one window; gives what became final, if anything. Raises NonFiniteScores."""
        z, y, left = place
        slab = self._next_row(z, y) if self._z >= 0 and (z, y) != (self._z, self._y) else None
        self._z, self._y = z, y
        self._put(window, left, max(self._right - left, 0))
        self._right = left + self._grid.roi[2]
        return slab

    def finish(self) -> Slab:
        """What is left after the last window. Raises NonFiniteScores."""
        return self._slab(self._grid.roi[0], self._grid.roi[1])

    def _next_row(self, z: int, y: int) -> Slab:
        """Take leave of this row, as far as the one that begins at (z, y) does not reach into it."""
        depth, height, _ = self._grid.roi
        self._right = 0
        if z != self._z:
            slab = self._slab(z - self._z, height)
            self._begin_layer()
            self._carried, self._reached = 0, depth - (z - self._z)
            return slab
        step = y - self._y
        slab = self._slab(self._final_planes(), step)
        self._carried = height - step
        self._carry(step)
        return slab

    def _final_planes(self) -> int:
        """Planes of this layer that no later one reaches."""
        later = (start for start in self._grid.starts[0] if start > self._z)
        return next(later, self._z + self._grid.roi[0]) - self._z

    def _slab(self, planes: int, rows: int) -> Slab:
        scores = self._leave(planes, rows)
        # Only an axis that holds a single window is padded, so what is cut off is cut off its only slab.
        inside = (slice(first, first + n) for first, n in zip(self._grid.before, self._grid.size, strict=True))
        return Slab(self._z, self._y, scores[(None, slice(None), *inside)])

    @abstractmethod
    def _put(self, window: Tensor, left: int, known: int) -> None:
        """Add a window to the row from column `left` on, of which the first `known` have sums already."""

    @abstractmethod
    def _leave(self, planes: int, rows: int) -> Tensor:
        """Take leave of the first `rows` of this row: `planes` of them are final, the next layer gets the others."""

    @abstractmethod
    def _carry(self, step: int) -> None:
        """Let the next row begin `step` rows further."""

    @abstractmethod
    def _begin_layer(self) -> None:
        """Let the next row be the first of its layer."""


def blender(grid: Grid, outputs: int, blending: Blending, device: torch.device, kernel: Stitching) -> Blender:
    """What blends windows of so many outputs on this device."""
    if kernel.suits(device):
        return _InOnePass(grid, outputs, blending, kernel)
    return _WithTorch(grid, outputs, blending, device)


class _InOnePass(Blender):
    """By the kernel; the weights of what leaves are computed once more, which is cheaper than keeping their sums."""

    def __init__(self, grid: Grid, outputs: int, blending: Blending, kernel: Stitching) -> None:
        super().__init__(grid)
        z, y, x = (importance(edge, blending, torch.device("cpu")) for edge in grid.roi)
        self._kernel = kernel
        self._row = Row(
            sums=torch.empty((outputs, *grid.roi[:2], grid.padded[2])),
            layer=torch.empty((outputs, grid.shared_planes, *grid.padded[1:])),
            weights=(z, y, x),
            least=LEAST_WEIGHT,
            starts=grid.starts,
        )

    def _put(self, window: Tensor, left: int, known: int) -> None:
        self._kernel.add(self._row, window, left, known, self._carried)

    def _leave(self, planes: int, rows: int) -> Tensor:
        scores, good = self._kernel.leave(self._row, (self._z, self._y), (planes, rows), self._reached)
        if not good:
            raise NonFiniteScores(NOT_FINITE)
        return scores

    def _carry(self, step: int) -> None:
        self._row.first = (self._row.first + step) % self._grid.roi[1]

    def _begin_layer(self) -> None:
        self._row.first = 0


class _WithTorch(Blender):
    """By torch, on any device.

    row     [K, roi z, roi y, X]
    layer   [K, z, Y, X]
    Weights have the same shapes without K, and those of a single row are the same for all rows.

    Nothing is zeroed that is written anyway: the buffers do not fit a processor's cache.
    """

    def __init__(self, grid: Grid, outputs: int, blending: Blending, device: torch.device) -> None:
        super().__init__(grid)
        self._importance = importance_map(grid.roi, blending, device)
        shared = (grid.shared_planes, *grid.padded[1:])
        self._row = torch.empty((outputs, *grid.roi[:2], grid.padded[2]), device=device)
        self._layer = torch.empty((outputs, *shared), device=device)
        self._layer_weight = torch.empty(shared, device=device)
        self._one_row = torch.zeros(self._row.shape[1:], device=device)
        for left in grid.starts[2]:
            self._one_row[:, :, left : left + grid.roi[2]] += self._importance
        self._weight = self._one_row.clone()

    def _put(self, window: Tensor, left: int, known: int) -> None:
        old, new = slice(self._carried), slice(self._carried, None)
        here = self._row[..., left : left + self._grid.roi[2]]
        here[:, :, old].addcmul_(window[:, :, old], self._importance[:, old])
        here[:, :, new, :known].addcmul_(window[:, :, new, :known], self._importance[:, new, :known])
        torch.mul(window[:, :, new, known:], self._importance[:, new, known:], out=here[:, :, new, known:])

    def _leave(self, planes: int, rows: int) -> Tensor:
        kept = self._grid.roi[0] - planes
        for all_sums, layer in ((self._row, self._layer), (self._weight, self._layer_weight)):
            sums, here = all_sums[..., :rows, :], layer[..., self._y : self._y + rows, :]
            sums[..., : self._reached, :, :] += here[..., : self._reached, :, :]
            here[..., :kept, :, :].copy_(sums[..., planes:, :, :])
        return finite(self._row[:, :planes, :rows] / self._weight[:planes, :rows])

    def _carry(self, step: int) -> None:
        kept = self._carried
        for sums in (self._row, self._weight):
            part = sums[..., step:, :]
            # Source and target overlap where windows do by more than a half.
            sums[..., :kept, :].copy_(part if kept <= step else part.clone())
        self._weight[:, kept:] = 0
        self._weight += self._one_row

    def _begin_layer(self) -> None:
        self._weight.copy_(self._one_row)


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


def _starts(length: int, edge: int, step: int) -> tuple[int, ...]:
    """Every `step` voxels from 0, the last window moved back so that it ends where the volume ends."""
    count = -(-(length - edge) // step) + 1
    return tuple(min(index * step, length - edge) for index in range(count))


def _step(length: int, edge: int, overlap: float) -> int:
    return edge if length == edge else max(int(edge * (1 - overlap)), 1)


def triple(values: Sequence[int]) -> Size:
    z, y, x = values
    return z, y, x
