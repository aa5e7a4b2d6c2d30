"""Division of a volume into groups of windows, which workers score, and into tiles, which workers decode.

The windows are the same as if the whole volume were processed at once. The size of a tile equals the distance
between adjacent groups. A tile ends a few voxels before the next group starts, so that only its own group and earlier
groups are needed to decode it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.core.quantities import Size
from service.inference.windows.grid import Grid, as_size
from service.models.spec_parts import MONAI_TILING, Tiling

Span = tuple[int, int]
"""First index and exclusive end index along an axis."""
Box = tuple[Span, Span, Span]
"""First index and exclusive end index along (z, y, x), in voxels or windows."""

# Maximum number of windows in a group. With windows of 64 x 64 x 64 voxels and two float32 outputs, the scores of a
# group take 128 MiB.
MAX_GROUP_WINDOWS = 64
# Minimum number of groups per worker. With many groups, no worker waits long for other workers at the end.
MIN_GROUPS_PER_WORKER = 6
# Maximum number of voxels of a tile including its margin. Decoding takes about 30 bytes per voxel.
MAX_TILE_VOXELS = 2**24
# Number of tiles in a region. All pieces of a region are in memory at the same time.
TILES_PER_REGION = 16
# Tiles are made smaller if more than this number of stack voxels is resampled to one tile voxel.
MAX_SOURCE_VOXELS_PER_VOXEL = 4


@dataclass(frozen=True)
class Layout:
    """Groups of windows on a grid.

    size, roi, overlap  as in `Grid.cover`
    group_shape         maximum number of windows in a group along (z, y, x)
    margin              number of voxels around a tile that are needed to decode it
    tiling              as in `Grid.cover`
    """

    size: Size
    roi: Size
    overlap: float
    group_shape: Size
    margin: int
    tiling: Tiling = MONAI_TILING

    @cached_property
    def grid(self) -> Grid:
        """Windows of the whole volume."""
        return Grid.cover(self.size, self.roi, self.overlap, self.tiling)

    @cached_property
    def num_groups(self) -> Size:
        """Number of groups along (z, y, x)."""
        return as_size([-(-len(starts) // n) for starts, n in zip(self.grid.starts, self.group_shape, strict=True)])

    @property
    def total_groups(self) -> int:
        """Total number of groups, which equals the number of tiles."""
        return math.prod(self.num_groups)

    def get_position(self, number: int) -> Size:
        """Return the position of a group along (z, y, x). Groups are numbered in order of z, then y, then x."""
        _, rows, columns = self.num_groups
        return number // (rows * columns), number // columns % rows, number % columns

    def get_number(self, position: Sequence[int]) -> int:
        """Return the number of the group at a position. This is the inverse of `get_position`."""
        return (position[0] * self.num_groups[1] + position[1]) * self.num_groups[2] + position[2]

    @property
    def num_regions(self) -> int:
        """Number of regions of consecutive tiles, each of which is joined by one worker."""
        return -(-self.total_groups // TILES_PER_REGION)

    def list_tiles(self, region: int) -> range:
        """Return the tiles of a region."""
        return range(self.total_groups)[region * TILES_PER_REGION : (region + 1) * TILES_PER_REGION]

    def get_group(self, number: int) -> Box:
        """Return the windows of a group as ranges of window numbers along each axis."""
        return _make_box(
            (index * n, min((index + 1) * n, len(starts)))
            for index, n, starts in zip(self.get_position(number), self.group_shape, self.grid.starts, strict=True)
        )

    def get_voxels(self, windows: Box) -> Box:
        """Return the voxels of the volume that a box of windows covers, excluding padding."""
        return _make_box(
            (starts[first], min(starts[end - 1] + window_length, length))
            for (first, end), starts, window_length, length in zip(
                windows, self.grid.starts, self.roi, self.size, strict=True
            )
        )

    @cached_property
    def tile_bounds(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """First voxels of the tiles along each axis, and the end of the last tile."""
        z, y, x = (
            _make_bounds([starts[first] - self.margin for first in range(n, len(starts), n)], length)
            for starts, n, length in zip(self.grid.starts, self.group_shape, self.size, strict=True)
        )
        return z, y, x

    def get_tile(self, number: int) -> Box:
        """Return the voxels of a tile."""
        return _make_box(
            bounds[index : index + 2] for index, bounds in zip(self.get_position(number), self.tile_bounds, strict=True)
        )

    def get_tile_with_margin(self, number: int) -> Box:
        """Return the voxels of a tile with its margin, clipped to the volume."""
        return _make_box(
            (max(first - self.margin, 0), min(end + self.margin, length))
            for (first, end), length in zip(self.get_tile(number), self.size, strict=True)
        )

    def find_tiles(self, box: Box) -> list[int]:
        """Return the numbers of the tiles that overlap a box."""
        tile_ranges = [
            range(bisect_right(bounds, first) - 1, bisect_left(bounds, end))
            for (first, end), bounds in zip(box, self.tile_bounds, strict=True)
        ]
        return [self.get_number(position) for position in itertools.product(*tile_ranges)]

    def find_windows(self, box: Box) -> Box:
        """Return the windows that overlap a box, as ranges of window numbers along each axis."""
        return _make_box(
            (
                sum(start + window_length <= first + padding for start in starts),
                sum(start < end + padding for start in starts),
            )
            for (first, end), starts, window_length, padding in zip(
                box, self.grid.starts, self.roi, self.grid.pad_before, strict=True
            )
        )

    def find_required_groups(self, number: int) -> list[int]:
        """Return the numbers of the groups whose scores are needed to decode a tile."""
        windows = self.find_windows(self.get_tile_with_margin(number))
        group_ranges = [
            range(first // n, -(-end // n)) for (first, end), n in zip(windows, self.group_shape, strict=True)
        ]
        return [self.get_number(position) for position in itertools.product(*group_ranges)]

    def make_subgrid(self, windows: Box) -> Grid:
        """Return the grid of a box of windows. The origin of the grid is the first voxel of the first window."""
        grid = self.grid
        starts = [axis[first:end] for (first, end), axis in zip(windows, grid.starts, strict=True)]
        padded_size = [axis[-1] + window_length - axis[0] for axis, window_length in zip(starts, self.roi, strict=True)]
        z, y, x = (tuple(start - axis[0] for start in axis) for axis in starts)
        size = [min(padded_length, length) for padded_length, length in zip(padded_size, self.size, strict=True)]
        return Grid(as_size(size), self.roi, grid.pad_before, as_size(padded_size), (z, y, x), as_size(size))


@dataclass(frozen=True)
class Blocks:
    """Blocks of up to `block_size` voxels that cover a volume of `size` (z, y, x).

    Blocks are numbered in order of z, then y, then x.
    """

    size: Size
    block_size: Size

    @property
    def _num_blocks(self) -> Size:
        return as_size([-(-n // block_length) for n, block_length in zip(self.size, self.block_size, strict=True)])

    def __len__(self) -> int:
        return math.prod(self._num_blocks)

    def get_box(self, number: int) -> Box:
        """Return the voxels of a block."""
        position = np.unravel_index(number, self._num_blocks)
        return _make_box(
            (int(index) * block_length, min((int(index) + 1) * block_length, n))
            for index, block_length, n in zip(position, self.block_size, self.size, strict=True)
        )


def choose_group_shape(size: Size, roi: Size, overlap: float, num_workers: int, stack_size: Size) -> Size:
    """Return the maximum number of windows in a group along (z, y, x).

    Groups are nearly cubic, and there are enough groups to keep all workers busy.

    stack_size  size of the stack that is resampled to `size`
    """
    max_voxels = min(
        MAX_TILE_VOXELS, MAX_SOURCE_VOXELS_PER_VOXEL * MAX_TILE_VOXELS * math.prod(size) // math.prod(stack_size)
    )
    window_counts = [len(starts) for starts in Grid.cover(size, roi, overlap).starts]
    steps = [max(int(window_length * (1 - overlap)), 1) for window_length in roi]
    max_windows = min(MAX_GROUP_WINDOWS, max(math.prod(window_counts) // (MIN_GROUPS_PER_WORKER * num_workers), 1))
    group_shape = [1, 1, 1]
    while True:
        # Extend the shortest axis first. If axes are equally short, extend x before y, and y before z.
        for axis in sorted(range(3), key=lambda axis: (group_shape[axis] * steps[axis], -axis)):
            extended_shape = [n + (index == axis) for index, n in enumerate(group_shape)]
            num_voxels = math.prod(
                n * step + window_length for n, step, window_length in zip(extended_shape, steps, roi, strict=True)
            )
            if (
                extended_shape[axis] <= window_counts[axis]
                and math.prod(extended_shape) <= max_windows
                and num_voxels <= max_voxels
            ):
                group_shape = extended_shape
                break
        else:
            return as_size(group_shape)


def _make_bounds(preferred_bounds: Sequence[int], length: int) -> tuple[int, ...]:
    """Return strictly increasing bounds from 0 to `length` that are close to the preferred bounds."""
    bounds = [0]
    for bound in preferred_bounds:
        bounds.append(max(bound, bounds[-1] + 1))
    return (*bounds, length)


def _make_box(spans: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> Box:
    z, y, x = ((first, end) for first, end in spans)
    return z, y, x


def to_slices(box: Box, origin: Sequence[int] = (0, 0, 0)) -> tuple[slice, slice, slice]:
    """Return the slices of a box in an array whose first voxel is at `origin`."""
    z, y, x = (slice(first - start, end - start) for (first, end), start in zip(box, origin, strict=True))
    return z, y, x


def to_ranges(box: Box) -> tuple[range, range, range]:
    """Return the ranges of voxels of a box along (z, y, x)."""
    z, y, x = (range(first, end) for first, end in box)
    return z, y, x


def get_lengths(box: Box) -> Size:
    """Return the edge lengths of a box."""
    return as_size([end - first for first, end in box])


def get_first_voxel(box: Box) -> Size:
    """Return the first voxel of a box."""
    return as_size([first for first, _ in box])
