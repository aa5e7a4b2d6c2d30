"""How a volume is cut: groups of windows whose scores one worker computes, and tiles that one worker decodes.

The windows are those of the whole volume. A tile has as many voxels as the windows of its group advance; it ends a few
voxels before the next group begins, so that it is decoded from its own windows and those of groups before it alone.
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
"""First and end along an axis."""
Box = tuple[Span, Span, Span]
"""First and end along (z, y, x), of voxels or of windows."""

# Windows of a group at most: those of two outputs in float32 take 128 MiB for windows of 64^3 voxels.
MOST_WINDOWS = 64
# Groups for each worker, so that none waits long for the others at the end.
GROUPS_PER_WORKER = 6
# Voxels of a tile with what surrounds it; each takes some 30 bytes while it is decoded.
MOST_VOXELS = 2**24
# Voxels of the stack that a voxel of a tile is made from, above which tiles are smaller.
USUAL_SOURCE = 4


@dataclass(frozen=True)
class Layout:
    """Groups of windows on a grid.

    size, roi, overlap  as of `Grid.cover`
    windows  of a group at most, along (z, y, x)
    margin   voxels around a tile that decoding it looks at
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

    def place(self, number: int) -> Size:
        """Return which group along (z, y, x) has a number; z is slowest."""
        _, rows, columns = self.groups
        return number // (rows * columns), number // columns % rows, number % columns

    def number(self, place: Sequence[int]) -> int:
        """Invert `place`."""
        return (place[0] * self.groups[1] + place[1]) * self.groups[2] + place[2]

    def group(self, number: int) -> Box:
        """Return the windows of a group, by their numbers along each axis."""
        return _box(
            (at * n, min((at + 1) * n, len(starts)))
            for at, n, starts in zip(self.place(number), self.windows, self.grid.starts, strict=True)
        )

    def voxels(self, windows: Box) -> Box:
        """Return the voxels under some windows; padding does not count."""
        return _box(
            (starts[first], min(starts[end - 1] + edge, length))
            for (first, end), starts, edge, length in zip(windows, self.grid.starts, self.roi, self.size, strict=True)
        )

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """First voxels of the tiles along each axis, and the end of the last."""
        z, y, x = (
            _edges([starts[first] - self.margin for first in range(n, len(starts), n)], length)
            for starts, n, length in zip(self.grid.starts, self.windows, self.size, strict=True)
        )
        return z, y, x

    def tile(self, number: int) -> Box:
        """Return the voxels of a tile."""
        return _box(edges[at : at + 2] for at, edges in zip(self.place(number), self.edges, strict=True))

    def surroundings(self, number: int) -> Box:
        """Return the voxels of a tile and of the margin around it, as far as the volume has them."""
        return _box(
            (max(first - self.margin, 0), min(end + self.margin, length))
            for (first, end), length in zip(self.tile(number), self.size, strict=True)
        )

    def tiles_of(self, box: Box) -> list[int]:
        """Return the tiles that have a voxel of a box."""
        ranges = [
            range(bisect_right(edges, first) - 1, bisect_left(edges, end))
            for (first, end), edges in zip(box, self.edges, strict=True)
        ]
        return [self.number(place) for place in itertools.product(*ranges)]

    def windows_over(self, box: Box) -> Box:
        """Return the windows that cover any voxel of a box, by their numbers along each axis."""
        return _box(
            (
                sum(start + edge <= first + before for start in starts),
                sum(start < end + before for start in starts),
            )
            for (first, end), starts, edge, before in zip(
                box, self.grid.starts, self.roi, self.grid.pad_before, strict=True
            )
        )

    def needs(self, number: int) -> list[int]:
        """Return the groups whose scores a tile is decoded from."""
        windows = self.windows_over(self.surroundings(number))
        spans = [range(first // n, -(-end // n)) for (first, end), n in zip(windows, self.windows, strict=True)]
        return [self.number(place) for place in itertools.product(*spans)]

    def subgrid(self, windows: Box) -> Grid:
        """Return the grid of some windows, whose first voxel is that of the first of them."""
        grid = self.grid
        starts = [axis[first:end] for (first, end), axis in zip(windows, grid.starts, strict=True)]
        spans = [axis[-1] + edge - axis[0] for axis, edge in zip(starts, self.roi, strict=True)]
        z, y, x = (tuple(start - axis[0] for start in axis) for axis in starts)
        size = [min(span, length) for span, length in zip(spans, self.size, strict=True)]
        return Grid(as_size(size), self.roi, grid.pad_before, as_size(spans), (z, y, x))


@dataclass(frozen=True)
class Blocks:
    """Blocks of up to `edges` voxels that a volume of `size` (z, y, x) is cut into, numbered with z slowest."""

    size: Size
    edges: Size

    @property
    def _counts(self) -> Size:
        return as_size([-(-n // edge) for n, edge in zip(self.size, self.edges, strict=True)])

    def __len__(self) -> int:
        return math.prod(self._counts)

    def box(self, number: int) -> Box:
        """Return the voxels of a block."""
        place = np.unravel_index(number, self._counts)
        return _box(
            (int(at) * edge, min((int(at) + 1) * edge, n))
            for at, edge, n in zip(place, self.edges, self.size, strict=True)
        )


def choose_windows(size: Size, roi: Size, overlap: float, workers: int, stack: Size) -> Size:
    """Return the windows of a group along (z, y, x): near a cube, and as many as suit so many workers.

    stack  voxels that are resampled to `size`
    """
    largest = min(MOST_VOXELS, USUAL_SOURCE * MOST_VOXELS * math.prod(size) // math.prod(stack))
    counts = [len(starts) for starts in Grid.cover(size, roi, overlap).starts]
    steps = [max(int(edge * (1 - overlap)), 1) for edge in roi]
    most = min(MOST_WINDOWS, max(math.prod(counts) // (GROUPS_PER_WORKER * workers), 1))
    chosen = [1, 1, 1]
    while True:
        # The shortest axis grows first, x before z.
        for axis in sorted(range(3), key=lambda axis: (chosen[axis] * steps[axis], -axis)):
            larger = [n + (index == axis) for index, n in enumerate(chosen)]
            voxels = math.prod(n * step + edge for n, step, edge in zip(larger, steps, roi, strict=True))
            if larger[axis] <= counts[axis] and math.prod(larger) <= most and voxels <= largest:
                chosen = larger
                break
        else:
            return as_size(chosen)


def _edges(wanted: Sequence[int], length: int) -> tuple[int, ...]:
    """Return edges from 0 to `length` near those that are wanted, each greater than the one before."""
    edges = [0]
    for edge in wanted:
        edges.append(max(edge, edges[-1] + 1))
    return (*edges, length)


def _box(spans: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> Box:
    z, y, x = ((first, end) for first, end in spans)
    return z, y, x


def slices(box: Box, origin: Sequence[int] = (0, 0, 0)) -> tuple[slice, slice, slice]:
    """Return the slices of a box in an array whose first voxel is `origin`."""
    z, y, x = (slice(first - start, end - start) for (first, end), start in zip(box, origin, strict=True))
    return z, y, x


def ranges(box: Box) -> tuple[range, range, range]:
    """Return the voxels of a box along (z, y, x)."""
    z, y, x = (range(first, end) for first, end in box)
    return z, y, x


def lengths(box: Box) -> Size:
    """Return the edges of a box."""
    return as_size([end - first for first, end in box])


def firsts(box: Box) -> Size:
    """Return the first voxel of a box."""
    return as_size([first for first, _ in box])
