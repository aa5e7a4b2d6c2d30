"""Blending of overlapping windows: their scores are averaged with weights, and returned as soon as they are final.

Windows form rows along x, and rows form layers along z. When the last window of a row is added, the voxels that no
later row covers are returned as a slab. Only the sums for planes that two layers share are stored for the next
layer. The scores and weights of the whole volume are never held in memory, because allocating that memory takes longer
than blending.

On a CPU, a C++ kernel blends each window in one pass. It stores sums only for voxels that windows share, and needs
a third of the memory that sums of whole rows would need. On other devices, torch blends one row of windows at a time.
"""

from __future__ import annotations

import itertools
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
from service.models.spec_parts import MONAI_TILING, Tiling, TilingName

# Lower bound of the weight of a voxel. nnU-Net's bound depends on the smallest weight in float16; ours only prevents
# divisions by zero. With "stardist" and "cellpose", no weight is 0.
MIN_WEIGHTS: dict[TilingName, float] = {"monai": 1e-3, "nnunet": 1e-12, "stardist": 0.0, "cellpose": 0.0}
# With "stardist", factor of the weight of voxels that are nearer to another window. It is positive, because no other
# window covers the voxels at the faces of the volume, and its third power is a normal number in float32.
FAR_WEIGHT = 1e-6

# With "cellpose", weights are a sigmoid function of the distance from the edges of a tile of this length.
TILE_LENGTH = 224
TILE_MARGIN = 20.0
TILE_SLOPE = 7.5

NON_FINITE_MESSAGE = "The network returned NaN or infinite scores for this volume. Try `engine.precision: fp32`."


class Slab(NamedTuple):
    """Finished scores [1, K, z, y, X] that start at plane `z0` and row `y0`.

    The dtype is float32, or bfloat16 if the volume fits in a single window and the network returns bfloat16.
    """

    z0: int
    y0: int
    scores: Tensor


@dataclass(frozen=True)
class Blending:
    """Weights of the voxels of a window.

    mode    constant: equal weights; gaussian: weights that decrease toward the edges
    sigma   standard deviation of Gaussian weights, as a fraction of the window's edge length
    tiling  positions of the windows. With "stardist", `mode` is ignored: along each axis, a voxel gets the scores of
            the window whose center is nearest, because non-maximum suppression depends on small differences of scores.
            With "cellpose", `mode` is ignored: the weights of the tiles of planes are those of Cellpose.
    """

    mode: Literal["constant", "gaussian"] = "gaussian"
    sigma: float = 0.125
    tiling: Tiling = MONAI_TILING

    @property
    def min_weight(self) -> float:
        """Lower bound of the weight of a voxel."""
        return MIN_WEIGHTS[self.tiling.name]


class Blender(ABC):
    """Computes the weighted mean of the scores of windows, which are added in order. Created by `make_blender`."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @abstractmethod
    def add(self, positions: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Add the scores [B, K, *roi] of the next windows, whose first voxels are `positions`.

        Returns a slab for each row of windows that is now complete. Raises NonFiniteScores for NaN or infinite scores.
        """

    def _make_slab(self, z0: int, y0: int, scores: Tensor) -> Slab:
        """Return a slab of scores [K, z, y, X], whose first voxel is at (z0, y0, 0), without padding."""
        starts, slices = list[int](), list[slice]()
        for start, pad, length in zip((z0, y0, 0), self._grid.pad_before, self._grid.size, strict=True):
            starts.append(max(start - pad, 0))
            slices.append(slice(max(pad - start, 0), pad + length - start))
        return Slab(starts[0], starts[1], scores[(None, slice(None), *slices)])

    def _get_overlaps(self, position: Size) -> tuple[AxisOverlap, AxisOverlap, AxisOverlap]:
        z, y, x = (axis[first] for axis, first in zip(self._grid.overlaps, position, strict=True))
        return z, y, x


class FiniteCheck(Protocol):
    """Function that checks finished scores: `require_finite`, or `FiniteFlag.record`, which does not wait for a GPU."""

    def __call__(self, scores: Tensor, /) -> Tensor:
        """Return the scores, with float16 converted to float32. May raise NonFiniteScores."""


def require_finite(scores: Tensor) -> Tensor:
    """Return the scores, with float16 converted to float32. Raises NonFiniteScores for NaN or infinite scores."""
    # The sum of finite scores may exceed the range of float16. The range of bfloat16 is the same as that of float32.
    scores = scores.float() if scores.dtype == torch.float16 else scores
    # The sum is NaN or infinite if any score is. Summation reads the scores only once, while they are cached.
    if not math.isfinite(scores.sum().item()):
        raise NonFiniteScores(NON_FINITE_MESSAGE)
    return scores


class BlendingSetup(NamedTuple):
    """Blending weights, the device of the scores, and the functions that blend and check the scores.

    kernels       C++ kernels, used on the devices that they support
    check_scores  function that is applied to finished scores
    """

    blending: Blending
    device: torch.device
    kernels: WindowKernels = window_kernels
    check_scores: FiniteCheck = require_finite


def make_blender(grid: Grid, num_outputs: int, setup: BlendingSetup) -> Blender:
    """Return a blender for the scores of a network with this number of outputs."""
    if setup.kernels.supports(setup.device):
        return _KernelBlender(grid, num_outputs, setup.blending, setup.kernels)
    return _TorchBlender(grid, num_outputs, setup.blending, setup.device, setup.check_scores)


def count_buffered_floats(grid: Grid, num_outputs: int, *, uses_kernel: bool) -> int:
    """Return the number of float32 values that a blender holds in addition to its slabs, or 0 for a single window."""
    if grid.num_windows == 1:
        return 0
    (depth, height, width), (_, padded_height, padded_width), (shared_depth, shared_height, shared_width) = (
        grid.window_size,
        grid.padded_size,
        grid.max_overlap,
    )
    if uses_kernel:
        return num_outputs * (
            depth * (2 * height * shared_width + padded_width * shared_height)
            + shared_depth * padded_height * padded_width
        )
    # The blender holds sums and weights for the current row, for the rows that it shares with the next row, and for the
    # planes that its layer shares with the next layer. It also holds the weights of one row, and the weighted scores of
    # one row of windows.
    sums = (num_outputs + 1) * (depth * (height + shared_height) + shared_depth * padded_height) + depth * height
    return padded_width * sums + num_outputs * depth * height * width * len(grid.starts[2])


class _KernelBlender(Blender):
    """Blender that uses the C++ kernels. Only the sums for voxels in overlaps are stored."""

    def __init__(self, grid: Grid, num_outputs: int, blending: Blending, kernels: WindowKernels) -> None:
        super().__init__(grid)
        weights = _compute_axis_weights(grid, blending, torch.device("cpu"))
        self._kernels, self._num_columns = kernels, len(grid.starts[2])
        self._sums = OverlapSums(num_outputs, grid.padded_size, weights, blending.min_weight, grid.starts)
        self._means: Tensor | None = None

    def add(self, positions: Sequence[Size], scores: Tensor) -> list[Slab]:
        slabs = list[Slab]()
        for position, window in zip(positions, scores.unbind(), strict=True):
            z, y, x = self._get_overlaps(position)
            if self._means is None:
                self._means = self._sums.allocate_means(z.num_final, y.num_final)
            if not self._kernels.blend(
                self._sums, (z.window_index, y.window_index, x.window_index), window, self._means
            ):
                raise NonFiniteScores(NON_FINITE_MESSAGE)
            if x.window_index + 1 == self._num_columns:
                means, self._means = self._means, None
                slabs.append(self._make_slab(position[0], position[1], means))
        return slabs


class _TorchBlender(Blender):
    """Blender for any device. It adds up one row of windows along x at a time, in a few operations.

    _row_sums             sums and weights of the current row of windows, [K + 1, roi z, roi y, X]
    _previous_row_sums    sums and weights of the previous row, for the voxels that the current row also covers,
                          [K + 1, roi z, y, X]
    _previous_layer_sums  sums and weights of the previous layer, for the voxels that the current layer also covers,
                          [K + 1, z, Y, X]

    Windows of a row that do not overlap are added in one operation. The scores are bitwise identical however a row is
    split into batches, because the order of additions changes only for voxels that two windows cover.
    """

    def __init__(
        self, grid: Grid, num_outputs: int, blending: Blending, device: torch.device, check_scores: FiniteCheck
    ) -> None:
        super().__init__(grid)
        self._check_scores = check_scores
        self._importance = _compute_weights(grid, blending, device)
        depth, height, width = grid.window_size
        self._row_weights = torch.zeros((depth, height, grid.padded_size[2]), device=device)
        for start in grid.starts[2]:
            self._row_weights[:, :, start : start + width] += self._importance
        self._row_sums = torch.empty((num_outputs + 1, *self._row_weights.shape), device=device)
        self._previous_layer_sums = torch.empty(
            (num_outputs + 1, grid.max_overlap[0], *grid.padded_size[1:]), device=device
        )
        self._previous_row_sums = self._row_sums[:, :, :0]

    def add(self, positions: Sequence[Size], scores: Tensor) -> list[Slab]:
        slabs, first = list[Slab](), 0
        for run in split_runs(positions):
            z, y, x = run.start
            if not x:
                self._row_sums[:-1].zero_()
                self._row_sums[-1].copy_(self._row_weights)
            self._add_run(run, scores[first : first + run.num_windows])
            first += run.num_windows
            if x + (run.num_windows - 1) * run.step == self._grid.starts[2][-1]:
                slabs.append(self._make_slab(z, y, self._finish_row(run.start)))
        return slabs

    def _add_run(self, run: Run, scores: Tensor) -> None:
        """Add the scores [B, K, *roi] of consecutive windows to the current row."""
        weighted_scores = torch.empty(scores.shape, device=scores.device)
        torch.mul(scores, self._importance, out=weighted_scores)
        first_column, width = run.start[2], self._grid.window_size[2]
        # Each window overlaps only with neighbors that are fewer than `spacing` windows away.
        spacing = -(-width // run.step)
        if spacing > 2:
            # The result of more than two additions depends on their order, so add the windows one by one.
            spacing = run.num_windows
        for first in range(min(spacing, run.num_windows)):
            scores_to_add = weighted_scores[first::spacing].permute(1, 2, 3, 0, 4)
            sums = self._row_sums[:-1, :, :, first_column + first * run.step :].unfold(3, width, spacing * run.step)
            sums[:, :, :, : scores_to_add.shape[3]] += scores_to_add

    def _finish_row(self, position: Size) -> Tensor:
        """Return the means of the final planes and rows. Store the sums that the next row and layer need."""
        (z, y, _), first_row = self._get_overlaps(position), position[1]
        if y.num_shared:
            self._row_sums[:, :, : y.num_shared] += self._previous_row_sums
        self._previous_row_sums = self._row_sums[:, :, y.num_final :].clone()
        sums, shared_layer_sums = (
            self._row_sums[:, :, : y.num_final],
            self._previous_layer_sums[:, :, first_row : first_row + y.num_final],
        )
        if z.num_shared:
            sums[:, : z.num_shared] += shared_layer_sums[:, : z.num_shared]
        shared_layer_sums[:, : self._grid.window_size[0] - z.num_final].copy_(sums[:, z.num_final :])
        return self._check_scores(sums[:-1, : z.num_final] / sums[-1, : z.num_final])


class FiniteFlag:
    """Flag on a device that is true while all scores of a request are finite. Updating it does not wait for the device.

    Its copy in pinned host memory is valid once the device has finished the launched work.
    """

    def __init__(self, device: torch.device) -> None:
        self._flag = torch.ones((), dtype=torch.bool, device=device)
        self._host_flag = torch.ones((), dtype=torch.bool, pin_memory=device.type == "cuda")

    def record(self, scores: Tensor, /) -> Tensor:
        """Return the scores, with float16 converted to float32, and record whether they are finite."""
        scores = scores.float() if scores.dtype == torch.float16 else scores
        self._flag.logical_and_(scores.sum().isfinite())
        self._host_flag.copy_(self._flag, non_blocking=True)
        return scores

    def raise_if_not_finite(self) -> None:
        """Raise NonFiniteScores if any recorded scores were not finite. The device must have finished its work."""
        if not self._host_flag.item():
            raise NonFiniteScores(NON_FINITE_MESSAGE)


def _compute_weights(grid: Grid, blending: Blending, device: torch.device) -> Tensor:
    """Return the weight of each voxel of a window, float32 [*window]."""
    if blending.tiling.name not in {"stardist", "cellpose"}:
        return compute_importance_map(grid.window_size, blending, device)
    z, y, x = _compute_axis_weights(grid, blending, device)
    return z[:, None, None] * y[:, None] * x


def _compute_axis_weights(grid: Grid, blending: Blending, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of the weights along z, y and x, float32 [window z], [window y] and [window x]."""
    if blending.tiling.name == "cellpose":
        depth, *lengths = grid.window_size
        y, x = (_compute_taper(length, device) for length in lengths)
        return torch.ones(depth, device=device), y, x
    if blending.tiling.name != "stardist":
        z, y, x = (_compute_axis_importance(length, blending, device) for length in grid.window_size)
        return z, y, x
    axes = list[Tensor]()
    for length, starts in zip(grid.window_size, grid.starts, strict=True):
        steps = [end - start for start, end in itertools.pairwise(starts)] or [length]
        # Each voxel is in the center of some window, or near a face of the volume and not near the face of any other
        # window that covers it.
        margin = min((length - max(steps)) // 2, *steps)
        weights = torch.full((length,), FAR_WEIGHT, device=device)
        weights[margin : length - margin] = 1
        axes.append(weights)
    z, y, x = axes
    return z, y, x


def _compute_taper(length: int, device: torch.device) -> Tensor:
    """Return the weights along one axis of a tile, float32 [length]. Source: `_taper_mask` in Cellpose."""
    full_length = max(TILE_LENGTH, length)
    distance = (torch.arange(full_length, dtype=torch.float64) - (full_length - 1) / 2).abs()
    weights = torch.sigmoid((full_length / 2 - TILE_MARGIN - distance) / TILE_SLOPE)
    return weights.narrow(0, full_length // 2 - length // 2, length).to(device, torch.float32)


@lru_cache(maxsize=16)
def compute_importance_map(roi: Size, blending: Blending, device: torch.device) -> Tensor:
    """Return the weight of each voxel of a window, float32 [*roi], like `monai.data.utils.compute_importance_map`."""
    z, y, x = (_compute_axis_importance(length, blending, device) for length in roi)
    # Dividing by the small tail values of a Gaussian would amplify rounding errors.
    return (z[:, None, None] * y[:, None] * x).clamp(min=blending.min_weight)


def _compute_axis_importance(length: int, blending: Blending, device: torch.device) -> Tensor:
    """Return the weight of each position along one axis of a window, float32 [length], without the lower bound."""
    if blending.mode == "constant":
        return torch.ones(length, device=device)
    # The center of nnU-Net's weights is a voxel, even if the number of voxels is even.
    center = length // 2 if blending.tiling.name == "nnunet" else (length - 1) / 2
    distance = torch.arange(length, dtype=torch.float32, device=device) - center
    return torch.exp(distance**2 / (-2 * (blending.sigma * length) ** 2))
