"""Positions of the sliding windows on an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from service.core.quantities import Size
from service.models.spec_parts import MONAI_TILING, Tiling, TilingName

Box = tuple[int, slice, slice, slice, slice]
"""Index of a region of an image: (0, channels, z, y, x)."""

# Maximum total size of the slabs of skipped windows that are created for one batch. The slabs of consecutive skipped
# rows all become final at the same time.
MAX_SKIPPED_SLAB_BYTES = 2**26


# Volumes that are shorter than a window along this number of axes, or more, are padded with mirror images if the tiling
# is mirrored. Within zeros, such a volume looks like one object. A volume of few planes does not.
MIN_MIRRORED_AXES = 2

# With "cellpose", planes are padded to a multiple of this length, with at least half of it on each side.
PLANE_PADDING = 16
PLANE_ORIENTATIONS: tuple[Size, Size, Size] = ((0, 1, 2), (1, 0, 2), (2, 0, 1))
"""Orientations of planes: the axis (0 for z) across the planes, and the axes of their rows and columns."""


class AxisOverlap(NamedTuple):
    """Overlap of a window with its two neighbors along one axis.

    window_index  zero-based index of the window along the axis
    num_shared    number of leading voxels that the previous window also covers
    num_final     number of leading voxels that the next window does not cover
    """

    window_index: int
    num_shared: int
    num_final: int


class Reading(NamedTuple):
    """Part of an image that a window covers.

    box      voxels of the image, (z, y, x)
    targets  where these voxels are in the window, (z, y, x)
    """

    box: tuple[slice, slice, slice]
    targets: tuple[slice, slice, slice]


class Run(NamedTuple):
    """Equally spaced windows along x.

    start        first voxel (z, y, x) of the first window
    num_windows  number of windows
    step         distance between adjacent windows in voxels
    """

    start: Size
    num_windows: int
    step: int


@dataclass(frozen=True)
class Grid:
    """Positions of the windows on a volume of `size` (Z, Y, X), which is padded to at least the size of a window.

    window_size   edge lengths of a window
    pad_before    number of padding voxels before the first voxel along each axis
    padded_size   edge lengths of the padded volume
    starts        first voxels of the windows along each axis of the padded volume
    aligned_size  edge lengths up to which the end of the volume is padded with its mirror image
    is_mirrored   whether all other padding consists of mirror images, too; otherwise it is zero
    """

    size: Size
    window_size: Size
    pad_before: Size
    padded_size: Size
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    aligned_size: Size
    is_mirrored: bool = False

    @classmethod
    def cover(cls, size: Size, window_size: Size, overlap: float, tiling: Tiling = MONAI_TILING) -> Grid:
        """Return the window positions for this overlap, a fraction of the window (0 <= overlap < 1)."""
        aligned_size = round_up(size, tiling.alignment)
        min_size = _pad_planes(size, window_size, tiling) if tiling.name == "cellpose" else aligned_size
        padded_size = as_size([max(pair) for pair in zip(window_size, min_size, strict=True)])
        padding = [padded_length - n for padded_length, n in zip(padded_size, aligned_size, strict=True)]
        compute_starts = _START_FUNCTIONS[tiling.name]
        # Tiles of Cellpose do not overlap across planes.
        overlaps = (0.0 if tiling.name == "cellpose" else overlap, overlap, overlap)
        z, y, x = (
            tuple(start * n for start in compute_starts(length // n, window_length // n, axis_overlap))
            for length, window_length, n, axis_overlap in zip(
                padded_size, window_size, tiling.alignment, overlaps, strict=True
            )
        )
        pad_before = [pad_length // 2 // n * n for pad_length, n in zip(padding, tiling.alignment, strict=True)]
        num_short_axes = sum(length < window_length for length, window_length in zip(size, window_size, strict=True))
        is_mirrored = tiling.is_mirrored and num_short_axes >= MIN_MIRRORED_AXES
        return cls(size, window_size, as_size(pad_before), padded_size, (z, y, x), aligned_size, is_mirrored)

    def divide(self, step: Size) -> Grid:
        """Return the grid of scores, if one score stands for `step` voxels (z, y, x). `step` divides the alignment."""
        lengths = (self.window_size, self.pad_before, self.padded_size, self.aligned_size)
        window_size, pad_before, padded_size, aligned_size = (
            as_size([length // n for length, n in zip(axes, step, strict=True)]) for axes in lengths
        )
        z, y, x = (tuple(start // n for start in starts) for starts, n in zip(self.starts, step, strict=True))
        size = as_size([-(-length // n) for length, n in zip(self.size, step, strict=True)])
        return Grid(size, window_size, pad_before, padded_size, (z, y, x), aligned_size)

    @property
    def valid_region(self) -> tuple[slice, slice, slice]:
        """Voxels of a window that are not padding. A volume that is shorter than the window is centered in it."""
        lengths = (
            min(window_length, length) for window_length, length in zip(self.window_size, self.size, strict=True)
        )
        z, y, x = (slice(first, first + n) for first, n in zip(self.pad_before, lengths, strict=True))
        return z, y, x

    def locate(self, position: Size) -> Reading:
        """Return the voxels of the volume in the window at `position`, its first voxel (z, y, x)."""
        box, targets = list[slice](), list[slice]()
        for start, pad, window_length, length in zip(
            position, self.pad_before, self.window_size, self.size, strict=True
        ):
            origin = start - pad
            first, end = max(origin, 0), min(origin + window_length, length)
            box.append(slice(first, end))
            targets.append(slice(first - origin, end - origin))
        (z, y, x), (z_target, y_target, x_target) = box, targets
        return Reading((z, y, x), (z_target, y_target, x_target))

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return self.num_rows * len(self.starts[2])

    @property
    def num_rows(self) -> int:
        """Number of rows of windows along x."""
        return len(self.starts[0]) * len(self.starts[1])

    @cached_property
    def overlaps(self) -> tuple[dict[int, AxisOverlap], dict[int, AxisOverlap], dict[int, AxisOverlap]]:
        """Overlaps of the windows along each axis, keyed by the first voxel of the window."""
        z, y, x = (
            _compute_overlaps(starts, window_length)
            for starts, window_length in zip(self.starts, self.window_size, strict=True)
        )
        return z, y, x

    @property
    def max_overlap(self) -> Size:
        """Maximum number of voxels along each axis that a window shares with the previous one."""
        return as_size([max(overlap.num_shared for overlap in axis.values()) for axis in self.overlaps])

    def compute_max_skipped_rows(self, num_outputs: int, batch_size: int) -> int:
        """Return the maximum number of rows that may be skipped between two computed windows of a batch.

        The limit keeps the slabs of these rows within `MAX_SKIPPED_SLAB_BYTES`.
        """
        row_bytes = 4 * num_outputs * self.window_size[0] * self.window_size[1] * self.padded_size[2]
        return max(MAX_SKIPPED_SLAB_BYTES // (row_bytes * batch_size), 1)

    def positions(self) -> Iterator[Size]:
        """Yield the first voxel (z, y, x) of each window. The z index changes slowest."""
        return itertools.product(*self.starts)


def split_runs(positions: Sequence[Size]) -> Iterator[Run]:
    """Split windows into runs that are as long as possible. `positions` are the first voxels of the windows, in order.

    The step of a run with a single window is 1.
    """
    start, count, step = positions[0], 1, 1
    for position in positions[1:]:
        offset = position[2] - start[2]
        if position[:2] == start[:2] and offset > 0 and (count == 1 or offset == count * step):
            step = offset if count == 1 else step
            count += 1
        else:
            yield Run(start, count, step)
            start, count, step = position, 1, 1
    yield Run(start, count, step)


def _compute_starts(length: int, window_length: int, overlap: float) -> tuple[int, ...]:
    """Return equally spaced starts. The last one is moved back so that its window ends at the end of the volume."""
    step = window_length if length == window_length else max(int(window_length * (1 - overlap)), 1)
    count = -(-(length - window_length) // step) + 1
    return tuple(min(index * step, length - window_length) for index in range(count))


def _compute_even_starts(length: int, window_length: int, overlap: float) -> tuple[int, ...]:
    """Return starts whose distances differ by rounding only. Source: `compute_steps_for_sliding_window` in nnU-Net."""
    last = length - window_length
    count = math.ceil(last / max(window_length * (1 - overlap), 1))
    return tuple(round(last / count * index) for index in range(count + 1)) if count else (0,)


def _compute_even_starts_with_overlap(length: int, window_length: int, overlap: float) -> tuple[int, ...]:
    """Return starts whose distances differ by at most 1, for windows with at least this overlap."""
    last = length - window_length
    count = -(-last // max(int(window_length * (1 - overlap)), 1))
    return tuple(index * last // max(count, 1) for index in range(count + 1))


def _compute_tile_starts(length: int, window_length: int, overlap: float) -> tuple[int, ...]:
    """Return evenly spaced starts, rounded down. Source: `make_tiles` in Cellpose."""
    if length <= window_length:
        return (0,)
    count = math.ceil((1 + 2 * overlap) * length / window_length)
    last, intervals = length - window_length, max(count - 1, 1)
    return tuple(int(last / intervals * index) if index < intervals else last for index in range(intervals + 1))


def _pad_planes(size: Size, tile: Size, tiling: Tiling) -> Size:
    """Return the size of a stack whose planes are padded for a tile, as in `get_pad_yx` in Cellpose."""
    padded = list[int]()
    for length, tile_length in zip(size[1:], tile[1:], strict=True):
        is_short = tiling.is_fixed and length < tile_length
        padded.append((length if is_short else -(-length // PLANE_PADDING) * PLANE_PADDING) + PLANE_PADDING)
    return size[0], padded[0], padded[1]


def fit_tile(size: Size, tile: Size, tiling: Tiling) -> Size:
    """Return the tile for a stack of planes with this `size` (planes, rows, columns).

    If a plane is smaller than `tile` and tiles are not fixed, the tile is the padded plane. The style of Cellpose's
    residual network is a mean over the tile, so its tiles must not contain additional padding.
    """
    return tile if tiling.is_fixed else as_size([tile[0], *map(min, tile[1:], _pad_planes(size, tile, tiling)[1:])])


def cover_planes(size: Size, tile: Size, overlap: float, tiling: Tiling) -> list[Grid]:
    """Return the tiles of the planes of each orientation in a volume of `size` (Z, Y, X)."""
    sizes = [as_size([size[axis] for axis in axes]) for axes in PLANE_ORIENTATIONS]
    return [Grid.cover(rotated, fit_tile(rotated, tile, tiling), overlap, tiling) for rotated in sizes]


_START_FUNCTIONS: dict[TilingName, Callable[[int, int, float], tuple[int, ...]]] = {
    "monai": _compute_starts,
    "nnunet": _compute_even_starts,
    "stardist": _compute_even_starts_with_overlap,
    "cellpose": _compute_tile_starts,
}


def _compute_overlaps(starts: tuple[int, ...], window_length: int) -> dict[int, AxisOverlap]:
    steps = [next_start - start for start, next_start in itertools.pairwise(starts)]
    columns = zip(starts, [0, *(window_length - step for step in steps)], [*steps, window_length], strict=True)
    return {
        start: AxisOverlap(index, num_shared, num_final) for index, (start, num_shared, num_final) in enumerate(columns)
    }


def fit_window_length(length: int, window_length: int, overlap: float, multiple: int) -> int:
    """Return a window length, up to `window_length`, for which evenly spaced windows overlap by about this fraction.

    If the volume is only slightly longer than the window, two windows would almost coincide, so smaller ones are used.
    """
    if not window_length < length < window_length * (1 + max(overlap, 0.5) / 2):
        return min(window_length, length)
    return min(math.ceil(length / (2 - overlap) / multiple) * multiple, window_length)


def scale_positions(positions: Sequence[Size], step: Size) -> Sequence[Size]:
    """Return the positions of windows, their first voxels, on a grid of scores that stand for `step` voxels each."""
    if step == (1, 1, 1):
        return positions
    return [as_size([start // n for start, n in zip(position, step, strict=True)]) for position in positions]


def round_up(size: Size, multiples: Size) -> Size:
    """Return the smallest multiples that are not smaller than `size`."""
    return as_size([-(-length // multiple) * multiple for length, multiple in zip(size, multiples, strict=True)])


def as_size(values: Sequence[int]) -> Size:
    """Return three integers as a tuple whose length the type checker knows."""
    z, y, x = values
    return z, y, x
