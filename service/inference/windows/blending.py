"""Weighted means of the scores of overlapping windows, given away as soon as they are final.

Windows come in rows along x, rows in layers along z. Voxels that no later row covers leave as a slab with the last
window of their row; of a layer only the planes that the next one covers are kept. Neither the scores nor the weights of
the whole volume ever exist: touching fresh memory costs more than the arithmetic.

On a CPU the C++ kernel blends each window in one pass. It keeps sums only of what windows share, a third of the memory
that sums of whole rows take. Torch does the same on any other device, a row of windows at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from service.core.errors import NonFiniteScores
from service.core.volume import Size
from service.inference.windows.grid import AxisOverlap, Grid
from service.inference.windows.kernels import OverlapSums, WindowKernels

MIN_WEIGHT = 1e-3

NOT_FINITE = "The network returned NaN or infinite scores for this volume; try precision fp32."


class Slab(NamedTuple):
    """Finished scores [1, K, z, y, X] of the planes from `z0` and the rows from `y0` on.

    They are float32; those of a single window are bfloat16 where the network returns that.
    """

    z0: int
    y0: int
    scores: Tensor


@dataclass(frozen=True)
class Blending:
    """Weighting of a voxel by its position in the window; `sigma` is a share of the edge (Gaussian only)."""

    mode: Literal["constant", "gaussian"] = "gaussian"
    sigma: float = 0.125


class Blender(ABC):
    """Weighted means of the scores of windows that are added in order; `make_blender` makes one."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def add(self, start: Size, window: Tensor) -> Slab | None:
        """Add the scores [K, *roi] of one window, and return the finished slab with the last window of a row.

        Raises NonFiniteScores.
        """
        z, y, x = (axis[first] for axis, first in zip(self._grid.overlaps, start, strict=True))
        scores = self._add(z, y, x, window)
        if scores is None:
            return None
        # Only an axis that holds a single window is padded, so that cropping affects its only slab.
        inside = (slice(first, first + n) for first, n in zip(self._grid.pad_before, self._grid.size, strict=True))
        return Slab(start[0], start[1], scores[(None, slice(None), *inside)])

    @abstractmethod
    def _add(self, z: AxisOverlap, y: AxisOverlap, x: AxisOverlap, window: Tensor) -> Tensor | None:
        """Return the means [K, z, y, X] of the final planes and rows with the last window of a row."""


class CheckFinite(Protocol):
    """Check of finished scores for NaN and infinity: `require_finite`, or `FiniteFlag.note`, which needs no waiting."""

    def __call__(self, scores: Tensor, /) -> Tensor:
        """Return the scores, of half precision as float32. May raise NonFiniteScores."""


def make_blender(  # noqa: PLR0913, PLR0917
    grid: Grid,
    outputs: int,
    blending: Blending,
    device: torch.device,
    kernels: WindowKernels,
    check: CheckFinite | None = None,
) -> Blender:
    """Return what blends windows with this number of outputs on this device; `check` None: `require_finite`."""
    if kernels.supports(device):
        return _KernelBlender(grid, outputs, blending, kernels)
    return _TorchBlender(grid, outputs, blending, device, check or require_finite)


def count_buffered_floats(grid: Grid, outputs: int, *, by_kernel: bool) -> int:
    """Return how many float32 numbers a blender keeps besides its slabs; a single window is not blended."""
    if grid.count == 1:
        return 0
    (depth, height, _), (_, length, width), (planes, rows, columns) = grid.roi, grid.padded, grid.max_shared
    if by_kernel:
        return outputs * (depth * (2 * height * columns + width * rows) + planes * length * width)
    # Sums of a whole row with their weights, and the weights of one row alone.
    return width * (depth * height * (outputs + 2) + planes * length * (outputs + 1))


class _KernelBlender(Blender):
    """A blender in C++: final means leave with each window, and only sums of overlaps are kept."""

    def __init__(self, grid: Grid, outputs: int, blending: Blending, kernels: WindowKernels) -> None:
        super().__init__(grid)
        z, y, x = (_axis_importance(edge, blending, torch.device("cpu")) for edge in grid.roi)
        self._kernels, self._columns = kernels, len(grid.starts[2])
        self._sums = OverlapSums(outputs, grid.padded, (z, y, x), MIN_WEIGHT, grid.starts)
        self._means: Tensor | None = None

    def _add(self, z: AxisOverlap, y: AxisOverlap, x: AxisOverlap, window: Tensor) -> Tensor | None:
        if self._means is None:
            self._means = self._sums.empty_means(z.final, y.final)
        if not self._kernels.blend(self._sums, (z.position, y.position, x.position), window, self._means):
            raise NonFiniteScores(NOT_FINITE)
        if x.position + 1 < self._columns:
            return None
        means, self._means = self._means, None
        return means


class _TorchBlender(Blender):
    """A blender for any device that sums one row of windows along x at a time.

    row     [K, roi z, roi y, X], of which the leading rows came from the previous row of windows
    layer   [K, z, Y, X], planes of the previous layer (one z start) that this one covers
    Weights have the same shapes without K, and the weights of a single row are equal for all rows.

    Buffers are never zeroed before they are overwritten, because they do not fit a processor's cache.
    """

    def __init__(self, grid: Grid, outputs: int, blending: Blending, device: torch.device, check: CheckFinite) -> None:
        super().__init__(grid)
        self._check = check
        self._importance = importance_map(grid.roi, blending, device)
        shared = (grid.max_shared[0], *grid.padded[1:])
        self._row = torch.empty((outputs, *grid.roi[:2], grid.padded[2]), device=device)
        self._layer = torch.empty((outputs, *shared), device=device)
        self._layer_weight = torch.empty(shared, device=device)
        self._single_row_weight = torch.zeros(self._row.shape[1:], device=device)
        for left in grid.starts[2]:
            self._single_row_weight[:, :, left : left + grid.roi[2]] += self._importance
        self._weight = self._single_row_weight.clone()

    def _add(self, z: AxisOverlap, y: AxisOverlap, x: AxisOverlap, window: Tensor) -> Tensor | None:
        # Half of the time that it takes with channels last.
        window, starts = window.contiguous(), self._grid.starts
        left, old, new = starts[2][x.position], slice(y.shared), slice(y.shared, None)
        here = self._row[..., left : left + self._grid.roi[2]]
        here[:, :, old].addcmul_(window[:, :, old], self._importance[:, old])
        here[:, :, new, : x.shared].addcmul_(window[:, :, new, : x.shared], self._importance[:, new, : x.shared])
        torch.mul(window[:, :, new, x.shared :], self._importance[:, new, x.shared :], out=here[:, :, new, x.shared :])
        if x.position + 1 < len(starts[2]):
            return None
        means = self._finish_row(z, y, starts[1][y.position])
        if y.position + 1 < len(starts[1]):
            self._advance_row(y.final)
        else:
            self._weight.copy_(self._single_row_weight)
        return means

    def _finish_row(self, z: AxisOverlap, y: AxisOverlap, top: int) -> Tensor:
        """Return the means of the final planes and rows, and keep the other planes of these rows for the next layer."""
        kept = self._grid.roi[0] - z.final
        for row, layer in ((self._row, self._layer), (self._weight, self._layer_weight)):
            sums, here = row[..., : y.final, :], layer[..., top : top + y.final, :]
            sums[..., : z.shared, :, :] += here[..., : z.shared, :, :]
            here[..., :kept, :, :].copy_(sums[..., z.final :, :, :])
        return self._check(self._row[:, : z.final, : y.final] / self._weight[: z.final, : y.final])

    def _advance_row(self, step: int) -> None:
        """Move the buffers `step` rows on along y."""
        kept = self._grid.roi[1] - step
        for sums in (self._row, self._weight):
            part = sums[..., step:, :]
            # Source and target overlap where windows overlap by more than a half.
            sums[..., :kept, :].copy_(part if kept <= step else part.clone())
        self._weight[:, kept:] = 0
        self._weight += self._single_row_weight


def require_finite(scores: Tensor) -> Tensor:
    """Return the scores, of half precision as float32. Raises NonFiniteScores."""
    # The sum of finite scores may be beyond what half precision holds; bfloat16 has the range of float32.
    scores = scores.float() if scores.dtype == torch.float16 else scores
    # A sum is NaN or infinite as soon as one score is, and reads the scores once while they are in the cache.
    if not math.isfinite(scores.sum().item()):
        raise NonFiniteScores(NOT_FINITE)
    return scores


class FiniteFlag:
    """Whether all scores of a request are finite, kept on their device: nobody waits for it while they are computed.

    A copy on the host, in pinned memory, is right once the device is done with what it was given.
    """

    def __init__(self, device: torch.device) -> None:
        self._flag = torch.ones((), dtype=torch.bool, device=device)
        self._copy = torch.ones((), dtype=torch.bool, pin_memory=device.type == "cuda")

    def note(self, scores: Tensor, /) -> Tensor:
        """Return the scores, of half precision as float32, and note whether they are finite."""
        scores = scores.float() if scores.dtype == torch.float16 else scores
        self._flag.logical_and_(scores.sum().isfinite())
        self._copy.copy_(self._flag, non_blocking=True)
        return scores

    def check(self) -> None:
        """Raise NonFiniteScores where scores that the device is done with, or has begun, are not finite."""
        if not self._copy.item():
            raise NonFiniteScores(NOT_FINITE)


@lru_cache(maxsize=16)
def importance_map(roi: Size, blending: Blending, device: torch.device) -> Tensor:
    """Return the weight of every voxel of a window, float32 [*roi], like `monai.data.utils.compute_importance_map`."""
    z, y, x = (_axis_importance(edge, blending, device) for edge in roi)
    # Dividing by the tail of a Gaussian would amplify rounding errors.
    return (z[:, None, None] * y[:, None] * x).clamp(min=MIN_WEIGHT)


def _axis_importance(edge: int, blending: Blending, device: torch.device) -> Tensor:
    """Return the weight by position along one axis of a window, float32 [edge], without a lower bound."""
    if blending.mode == "constant":
        return torch.ones(edge, device=device)
    distance = torch.arange(edge, dtype=torch.float32, device=device) - (edge - 1) / 2
    return torch.exp(distance**2 / (-2 * (blending.sigma * edge) ** 2))
