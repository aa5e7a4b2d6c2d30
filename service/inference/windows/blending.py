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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from service.core.errors import NonFiniteScores
from service.core.quantities import Size
from service.inference.windows.grid import AxisOverlap, Grid, Run, split_runs
from service.inference.windows.kernels import OverlapSums, WindowKernels, window_kernels

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

    @abstractmethod
    def add(self, places: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Add the scores [B, K, *roi] of the next windows, whose first voxels are `places`.

        Returns the slabs of the rows of windows that are complete with them. Raises NonFiniteScores.
        """

    def _make_slab(self, z0: int, y0: int, scores: Tensor) -> Slab:
        """Return a slab of scores [K, z, y, X] without padding: only an axis with a single window is padded."""
        inside = (slice(first, first + n) for first, n in zip(self._grid.pad_before, self._grid.size, strict=True))
        return Slab(z0, y0, scores[(None, slice(None), *inside)])

    def _overlaps(self, place: Size) -> tuple[AxisOverlap, AxisOverlap, AxisOverlap]:
        z, y, x = (axis[first] for axis, first in zip(self._grid.overlaps, place, strict=True))
        return z, y, x


class CheckFinite(Protocol):
    """Check of finished scores for NaN and infinity: `require_finite`, or `FiniteFlag.note`, which needs no waiting."""

    def __call__(self, scores: Tensor, /) -> Tensor:
        """Return the scores, of half precision as float32. May raise NonFiniteScores."""


def require_finite(scores: Tensor) -> Tensor:
    """Return the scores, of half precision as float32. Raises NonFiniteScores."""
    # The sum of finite scores may be beyond what half precision holds; bfloat16 has the range of float32.
    scores = scores.float() if scores.dtype == torch.float16 else scores
    # A sum is NaN or infinite as soon as one score is, and reads the scores once while they are in the cache.
    if not math.isfinite(scores.sum().item()):
        raise NonFiniteScores(NOT_FINITE)
    return scores


class BlendingSetup(NamedTuple):
    """Weighting of the scores of windows, the device that they are on, and what blends and checks them there.

    kernels  used on devices that they support
    check    of finished scores
    """

    blending: Blending
    device: torch.device
    kernels: WindowKernels = window_kernels
    check: CheckFinite = require_finite


def make_blender(grid: Grid, outputs: int, setup: BlendingSetup) -> Blender:
    """Return what blends windows with this number of outputs."""
    if setup.kernels.supports(setup.device):
        return _KernelBlender(grid, outputs, setup.blending, setup.kernels)
    return _TorchBlender(grid, outputs, setup.blending, setup.device, setup.check)


def count_buffered_floats(grid: Grid, outputs: int, *, by_kernel: bool) -> int:
    """Return how many float32 numbers a blender keeps besides its slabs; a single window is not blended."""
    if grid.count == 1:
        return 0
    (depth, height, edge), (_, length, width), (planes, rows, columns) = grid.roi, grid.padded, grid.max_shared
    if by_kernel:
        return outputs * (depth * (2 * height * columns + width * rows) + planes * length * width)
    # Sums of a row with their weights, those that the next row and the next layer share, the weights of one row alone,
    # and the weighted scores of a row of windows.
    sums = (outputs + 1) * (depth * (height + rows) + planes * length) + depth * height
    return width * sums + outputs * depth * height * edge * len(grid.starts[2])


class _KernelBlender(Blender):
    """A blender in C++: final means leave with each window, and only sums of overlaps are kept."""

    def __init__(self, grid: Grid, outputs: int, blending: Blending, kernels: WindowKernels) -> None:
        super().__init__(grid)
        z, y, x = (_axis_importance(edge, blending, torch.device("cpu")) for edge in grid.roi)
        self._kernels, self._columns = kernels, len(grid.starts[2])
        self._sums = OverlapSums(outputs, grid.padded, (z, y, x), MIN_WEIGHT, grid.starts)
        self._means: Tensor | None = None

    def add(self, places: Sequence[Size], scores: Tensor) -> list[Slab]:
        slabs = list[Slab]()
        for place, window in zip(places, scores.unbind(), strict=True):
            z, y, x = self._overlaps(place)
            if self._means is None:
                self._means = self._sums.empty_means(z.final, y.final)
            if not self._kernels.blend(self._sums, (z.position, y.position, x.position), window, self._means):
                raise NonFiniteScores(NOT_FINITE)
            if x.position + 1 == self._columns:
                means, self._means = self._means, None
                slabs.append(self._make_slab(place[0], place[1], means))
        return slabs


class _TorchBlender(Blender):
    """A blender for any device that sums one row of windows along x at a time, in few operations.

    row     [K + 1, roi z, roi y, X], sums of the row of windows that is being added, and their weights
    carry   [K + 1, roi z, y, X], its last rows, which the next row of windows covers too
    layer   [K + 1, z, Y, X], planes of the previous layer (one z start) that this one covers

    Windows that do not overlap are added together, every second one of a row. Scores are the same to the bit however
    the windows of a row are split into batches: where they are added in another order, a voxel has only two of them.
    """

    def __init__(self, grid: Grid, outputs: int, blending: Blending, device: torch.device, check: CheckFinite) -> None:
        super().__init__(grid)
        self._check = check
        self._importance = importance_map(grid.roi, blending, device)
        depth, height, edge = grid.roi
        self._row_weight = torch.zeros((depth, height, grid.padded[2]), device=device)
        for left in grid.starts[2]:
            self._row_weight[:, :, left : left + edge] += self._importance
        self._row = torch.empty((outputs + 1, *self._row_weight.shape), device=device)
        self._layer = torch.empty((outputs + 1, grid.max_shared[0], *grid.padded[1:]), device=device)
        self._carry = self._row[:, :, :0]

    def add(self, places: Sequence[Size], scores: Tensor) -> list[Slab]:
        slabs, first = list[Slab](), 0
        for run in split_runs(places):
            z, y, left = run.start
            if not left:
                self._row[:-1].zero_()
                self._row[-1].copy_(self._row_weight)
            self._add_run(run, scores[first : first + run.windows])
            first += run.windows
            if left + (run.windows - 1) * run.step == self._grid.starts[2][-1]:
                slabs.append(self._make_slab(z, y, self._finish_row(run.start)))
        return slabs

    def _add_run(self, run: Run, scores: Tensor) -> None:
        """Add the scores [B, K, *roi] of windows to their row."""
        weighted = torch.empty(scores.shape, device=scores.device)
        torch.mul(scores, self._importance, out=weighted)
        left, edge = run.start[2], self._grid.roi[2]
        # Windows that are this far from each other do not overlap.
        apart = -(-edge // run.step)
        if apart > 2:
            # The order of more than two sums would show, so windows are added one after the other.
            apart = run.windows
        for number in range(min(apart, run.windows)):
            windows = weighted[number::apart].permute(1, 2, 3, 0, 4)
            sums = self._row[:-1, :, :, left + number * run.step :].unfold(3, edge, apart * run.step)
            sums[:, :, :, : windows.shape[3]] += windows

    def _finish_row(self, place: Size) -> Tensor:
        """Return the means of the final planes and rows, and keep what the next row and the next layer cover."""
        (z, y, _), top = self._overlaps(place), place[1]
        if y.shared:
            self._row[:, :, : y.shared] += self._carry
        self._carry = self._row[:, :, y.final :].clone()
        sums, here = self._row[:, :, : y.final], self._layer[:, :, top : top + y.final]
        if z.shared:
            sums[:, : z.shared] += here[:, : z.shared]
        here[:, : self._grid.roi[0] - z.final].copy_(sums[:, z.final :])
        return self._check(sums[:-1, : z.final] / sums[-1, : z.final])


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
