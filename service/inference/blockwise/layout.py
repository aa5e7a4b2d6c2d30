"""Division of a volume into groups of windows, scored by one worker each, and tiles, decoded by one worker each.

The windows are those of the whole volume. A tile is as large as the distance between adjacent groups. It ends a few
voxels before the next group starts, so that it can be decoded from its own group and earlier ones only.
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

Span = tuple[int, int]
"""First index and end along an axis."""
Box = tuple[Span, Span, Span]
"""First index and end along (z, y, x), in voxels or windows."""

# Maximum number of windows in a group. For windows of 64^3 voxels and two float32 outputs, they take 128 MiB.
MAX_GROUP_WINDOWS = 64
# Minimum number of groups per worker, so that no worker waits long for the others at the end.
GROUPS_PER_WORKER = 6
# Maximum number of voxels of a tile and its margin. Decoding takes about 30 bytes per voxel.
MAX_TILE_VOXELS = 2**24
# Tiles are smaller if more voxels of the stack than this are resampled to one voxel of a tile.
MAX_SOURCE_VOXELS_PER_VOXEL = 4


@dataclass(frozen=True)
class Layout:
    """Groups of windows on a grid.

    size, roi, overlap  as in `Grid.cover`
    windows             maximum number of windows of a group along (z, y, x)
    margin              voxels around a tile that its decoding needs
    """

    size: Size
    roi: Size
    overlap: float
    windows: Size
    margin: int

    @cached_property
    def grid(self) -> Grid:
        """Windows of the whole volume."""
        return Grid.cover(self.size, self.roi, self.overlap)

    @cached_property
    def groups(self) -> Size:
        """Number of groups along (z, y, x)."""
        return as_size([-(-len(starts) // n) for starts, n in zip(self.grid.starts, self.windows, strict=True)])

    @property
    def count(self) -> int:
        """Number of groups, and of tiles."""
        return math.prod(self.groups)

    def position(self, number: int) -> Size:
        """Return the position of a group along (z, y, x). Groups are numbered with z slowest."""
        _, rows, columns = self.groups
        return number // (rows * columns), number // columns % rows, number % columns

    def number(self, position: Sequence[int]) -> int:
        """Return the number of the group at a position; the inverse of `position`."""
        return (position[0] * self.groups[1] + position[1]) * self.groups[2] + position[2]

    def group(self, number: int) -> Box:
        """Return the windows of a group as ranges of window numbers along each axis."""
        return _box(
            (index * n, min((index + 1) * n, len(starts)))
            for index, n, starts in zip(self.position(number), self.windows, self.grid.starts, strict=True)
        )

    def voxels(self, windows: Box) -> Box:
        """Return the voxels of the volume that some windows cover, without padding."""
        return _box(
            (starts[first], min(starts[end - 1] + edge, length))
            for (first, end), starts, edge, length in zip(windows, self.grid.starts, self.roi, self.size, strict=True)
        )

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """First voxels of the tiles along each axis, and the end of the last tile."""
        z, y, x = (
            _edges([starts[first] - self.margin for first in range(n, len(starts), n)], length)
            for starts, n, length in zip(self.grid.starts, self.windows, self.size, strict=True)
        )
        return z, y, x

    def tile(self, number: int) -> Box:
        """Return the voxels of a tile."""
        return _box(edges[index : index + 2] for index, edges in zip(self.position(number), self.edges, strict=True))

    def surroundings(self, number: int) -> Box:
        """Return the voxels of a tile and its margin, clipped to the volume."""
        return _box(
            (max(first - self.margin, 0), min(end + self.margin, length))
            for (first, end), length in zip(self.tile(number), self.size, strict=True)
        )

    def tiles_of(self, box: Box) -> list[int]:
        """Return the tiles that overlap a box."""
        ranges = [
            range(bisect_right(edges, first) - 1, bisect_left(edges, end))
            for (first, end), edges in zip(box, self.edges, strict=True)
        ]
        return [self.number(position) for position in itertools.product(*ranges)]

    def windows_over(self, box: Box) -> Box:
        """Return the windows that overlap a box, as ranges of window numbers along each axis."""
        return _box(
            (
                sum(start + edge <= first + padding for start in starts),
                sum(start < end + padding for start in starts),
            )
            for (first, end), starts, edge, padding in zip(
                box, self.grid.starts, self.roi, self.grid.pad_before, strict=True
            )
        )

    def required_groups(self, number: int) -> list[int]:
        """Return the groups whose scores are needed to decode a tile."""
        windows = self.windows_over(self.surroundings(number))
        spans = [range(first // n, -(-end // n)) for (first, end), n in zip(windows, self.windows, strict=True)]
        return [self.number(position) for position in itertools.product(*spans)]

    def subgrid(self, windows: Box) -> Grid:
        """Return the grid of some windows, with the first voxel of the first window as its origin."""
        grid = self.grid
        starts = [axis[first:end] for (first, end), axis in zip(windows, grid.starts, strict=True)]
        spans = [axis[-1] + edge - axis[0] for axis, edge in zip(starts, self.roi, strict=True)]
        z, y, x = (tuple(start - axis[0] for start in axis) for axis in starts)
        size = [min(span, length) for span, length in zip(spans, self.size, strict=True)]
        return Grid(as_size(size), self.roi, grid.pad_before, as_size(spans), (z, y, x))


@dataclass(frozen=True)
class Blocks:
    """Blocks of up to `edges` voxels that cover a volume of `size` (z, y, x), numbered with z slowest."""

    size: Size
    edges: Size

    @property
    def _counts(self) -> Size:
        return as_size([-(-n // edge) for n, edge in zip(self.size, self.edges, strict=True)])

    def __len__(self) -> int:
        return math.prod(self._counts)

    def box(self, number: int) -> Box:
        """Return the voxels of a block."""
        position = np.unravel_index(number, self._counts)
        return _box(
            (int(index) * edge, min((int(index) + 1) * edge, n))
            for index, edge, n in zip(position, self.edges, self.size, strict=True)
        )


def choose_windows(size: Size, roi: Size, overlap: float, workers: int, stack: Size) -> Size:
    """Return the number of windows of a group along (z, y, x), so that groups are nearly cubic and suit the workers.

    stack  size of the stack that is resampled to `size`
    """
    largest = min(MAX_TILE_VOXELS, MAX_SOURCE_VOXELS_PER_VOXEL * MAX_TILE_VOXELS * math.prod(size) // math.prod(stack))
    counts = [len(starts) for starts in Grid.cover(size, roi, overlap).starts]
    steps = [max(int(edge * (1 - overlap)), 1) for edge in roi]
    max_windows = min(MAX_GROUP_WINDOWS, max(math.prod(counts) // (GROUPS_PER_WORKER * workers), 1))
    chosen = [1, 1, 1]
    while True:
        # Extend the shortest axis first, and of equal axes x before y before z.
        for axis in sorted(range(3), key=lambda axis: (chosen[axis] * steps[axis], -axis)):
            larger = [n + (index == axis) for index, n in enumerate(chosen)]
            voxels = math.prod(n * step + edge for n, step, edge in zip(larger, steps, roi, strict=True))
            if larger[axis] <= counts[axis] and math.prod(larger) <= max_windows and voxels <= largest:
                chosen = larger
                break
        else:
            return as_size(chosen)


def _edges(preferred: Sequence[int], length: int) -> tuple[int, ...]:
    """Return strictly increasing edges from 0 to `length`, close to the preferred ones."""
    edges = [0]
    for edge in preferred:
        edges.append(max(edge, edges[-1] + 1))
    return (*edges, length)


def _box(spans: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> Box:
    z, y, x = ((first, end) for first, end in spans)
    return z, y, x


def slices(box: Box, origin: Sequence[int] = (0, 0, 0)) -> tuple[slice, slice, slice]:
    """Return the slices of a box in an array whose first voxel is at `origin`."""
    z, y, x = (slice(first - start, end - start) for (first, end), start in zip(box, origin, strict=True))
    return z, y, x


def ranges(box: Box) -> tuple[range, range, range]:
    """Return the ranges of the voxels of a box along (z, y, x)."""
    z, y, x = (range(first, end) for first, end in box)
    return z, y, x


def lengths(box: Box) -> Size:
    """Return the edge lengths of a box."""
    return as_size([end - first for first, end in box])


def firsts(box: Box) -> Size:
    """Return the first voxel of a box."""
    return as_size([first for first, _ in box])
