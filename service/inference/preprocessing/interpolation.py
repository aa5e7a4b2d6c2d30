"""Interpolation of images on other grids: linear, by cubic splines, or from the nearest voxel, along each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import Size

InterpolationKind = Literal["linear", "cubic", "nearest"]
InterpolationKinds = tuple[InterpolationKind, InterpolationKind, InterpolationKind]
"""Kinds of interpolation along (z, y, x)."""
Spans = tuple[range, range, range]
"""Ranges of voxels along (z, y, x) that define a box."""

# Number of voxels on each side that contribute to a voxel of a cubic spline. The weights of all others add up to less
# than 1e-4.
SPLINE_RADIUS = 8


class AxisInterpolation(NamedTuple):
    """Source voxels of each target voxel along one axis, and their weights, which add up to 1.

    The source voxels of a target voxel are adjacent. Voxels outside the image repeat the voxel at the border.

    indices  zero-based indices of source voxels, [taps, target length]
    weights  float32, [taps, target length]
    """

    indices: NDArray[np.intp]
    weights: NDArray[np.float32]

    @property
    def lower_indices(self) -> NDArray[np.intp]:
        """First source voxel of each target voxel."""
        lower_indices: NDArray[np.intp] = self.indices[0]
        return lower_indices

    @property
    def upper_indices(self) -> NDArray[np.intp]:
        """Last source voxel of each target voxel."""
        upper_indices: NDArray[np.intp] = self.indices[-1]
        return upper_indices


def compute_interpolation(source_length: int, target_length: int, kind: InterpolationKind) -> AxisInterpolation:
    """Return the interpolation between the voxel centers of axes with these lengths.

    linear   the same weights as in `torch.nn.functional.interpolate` with `align_corners=False`; two taps
    cubic    cubic spline through all voxels, like `scipy.ndimage.zoom` with `order=3, mode="nearest", grid_mode=True`
    nearest  the source voxel that contains the center of the target voxel; one tap
    """
    if source_length == target_length or kind == "nearest":
        indices = ((np.arange(target_length) + 0.5) * source_length / target_length).astype(np.intp)
        return AxisInterpolation(indices[None], np.ones((1, target_length), np.float32))
    positions = (np.arange(target_length) + 0.5) * source_length / target_length - 0.5
    if kind == "linear":
        positions = positions.clip(0, source_length - 1)
        lower_indices = positions.astype(np.intp)
        upper_weights = (positions - lower_indices).astype(np.float32)
        indices = np.stack((lower_indices, np.minimum(lower_indices + 1, source_length - 1)))
        return AxisInterpolation(indices, np.stack((1 - upper_weights, upper_weights)))
    offsets = np.arange(1 - SPLINE_RADIUS, SPLINE_RADIUS + 1)[:, None]
    neighbors = np.floor(positions).astype(np.intp) + offsets
    weights = _compute_cardinal_spline(positions - neighbors)
    weights /= weights.sum(0)
    return AxisInterpolation(neighbors.clip(0, source_length - 1), weights.astype(np.float32))


def _compute_cardinal_spline(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cubic spline that is 1 at distance 0 and 0 at all other integers.

    It is the sum of B-splines at integers, weighted by the inverse filter of the B-spline. Source: Unser 1999.
    """
    pole = math.sqrt(3) - 2
    total = np.zeros_like(distances)
    nearest_integers = np.floor(distances)
    for shift in (-1, 0, 1, 2):
        integers = nearest_integers + shift
        total += pole ** np.abs(integers) * _compute_b_spline(np.abs(distances - integers))
    total *= -6 * pole / (1 - pole**2)
    return total


def _compute_b_spline(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cubic B-spline at these distances from its center, which are not negative."""
    inner = 2 / 3 - distances**2 + distances**3 / 2
    outer = np.maximum(2 - distances, 0) ** 3 / 6
    return np.where(distances < 1, inner, outer)


@dataclass(frozen=True)
class Resampling:
    """Interpolation from a grid of `source_size` voxels (Z, Y, X) to the centers of `target_size` voxels.

    kinds  kind of interpolation along each axis

    The result does not depend on the division of the grid into boxes: weights depend on the position in the whole grid,
    and the result of each operation is rounded separately.
    """

    source_size: Size
    target_size: Size
    kinds: InterpolationKinds = ("linear", "linear", "linear")

    @cached_property
    def _axes(self) -> list[AxisInterpolation]:
        return list(map(compute_interpolation, self.source_size, self.target_size, self.kinds))

    @cached_property
    def _axis_order(self) -> list[int]:
        """Axes in the fastest order: axes that shrink first, then axes that grow, from x (which is contiguous) to z."""
        factors = [
            target_length / source_length
            for source_length, target_length in zip(self.source_size, self.target_size, strict=True)
        ]
        return sorted(range(3), key=lambda axis: (factors[axis], axis if factors[axis] < 1 else -axis))

    def find_source_box(self, box: Spans) -> Spans:
        """Return the box of the source grid that a box of the target grid is interpolated from."""
        z, y, x = (
            range(int(axis.lower_indices[span[0]]), int(axis.upper_indices[span[-1]]) + 1)
            for axis, span in zip(self._axes, box, strict=True)
        )
        return z, y, x

    def interpolate(self, pixels: NDArray[np.float32], box: Spans) -> NDArray[np.float32]:
        """Interpolate a box of the target grid, [C, z, y, x], from the pixels of `find_source_box(box)`."""
        source_box = self.find_source_box(box)
        for axis_index in self._axis_order:
            if self.source_size[axis_index] == self.target_size[axis_index]:
                continue
            axis, first, span = self._axes[axis_index], source_box[axis_index].start, box[axis_index]
            target_indices = slice(span.start, span.stop)
            indices, weights = axis.indices[:, target_indices] - first, axis.weights[:, target_indices]
            weights = weights.reshape(len(weights), *(-1 if dimension == axis_index else 1 for dimension in range(3)))
            lower_pixels = pixels.take(indices[0], axis_index + 1)
            if len(indices) == 1:
                pixels = lower_pixels
            elif len(indices) == 2:
                pixels = pixels.take(indices[1], axis_index + 1)
                pixels -= lower_pixels
                pixels *= weights[1]
                pixels += lower_pixels
            else:
                pixels = _add_weighted(pixels, axis_index + 1, indices, weights)
        return pixels

    def count_planes(self, num_source_planes: int) -> int:
        """Return the number of planes of the target grid that depend only on the first planes of the source grid."""
        return int(np.searchsorted(self._axes[0].upper_indices, num_source_planes))


def _add_weighted(
    pixels: NDArray[np.float32], axis: int, indices: NDArray[np.intp], weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the sum of the pixels at each row of `indices` along an axis, multiplied with its row of `weights`."""
    total: NDArray[np.float32] | None = None
    for tap_indices, tap_weights in zip(indices, weights, strict=True):
        weighted = pixels.take(tap_indices, axis)
        weighted *= tap_weights
        if total is None:
            total = weighted
        else:
            total += weighted
    return pixels if total is None else total
