"""Positions of the sliding windows on an image."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from service.core.quantities import Size

Box = tuple[int, slice, slice, slice, slice]
"""Index of a region of an image: (0, channels, z, y, x)."""

# Scores of skipped windows become final together. Maximum size of their slabs that are created in one batch.
MAX_SKIPPED_BYTES = 2**26


class AxisOverlap(NamedTuple):
    """Overlap of a window with its two neighbors along one axis.

    number  number of the window along the axis, from 0
    shared  number of leading voxels that the previous window also covers
    final   number of leading voxels that the next window does not cover
    """

    number: int
    shared: int
    final: int


class Run(NamedTuple):
    """Equally spaced windows along x: first voxel (z, y, x) of the first window, number of windows, step in voxels."""

    start: Size
    windows: int
    step: int


@dataclass(frozen=True)
class Grid:
    """Positions of the windows on a volume of `size` (Z, Y, X), padded to at least one window.

    roi         edge lengths of a window
    pad_before  number of padding voxels in front of each axis
    padded      edge lengths of the padded volume
    starts      first voxels of the windows along each axis of the padded volume
    """

    size: Size
    roi: Size
    pad_before: Size
    padded: Size
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @classmethod
    def cover(cls, size: Size, roi: Size, overlap: float) -> Grid:
        """Return MONAI's window positions for an overlap, which is a fraction of the window (0 <= overlap < 1)."""
        missing = [max(edge - length, 0) for edge, length in zip(roi, size, strict=True)]
        padded = as_size([length + m for length, m in zip(size, missing, strict=True)])
        z, y, x = (_starts(length, edge, overlap) for length, edge in zip(padded, roi, strict=True))
        return cls(size, roi, as_size([m // 2 for m in missing]), padded, (z, y, x))

    @property
    def inside_window(self) -> tuple[slice, slice, slice]:
        """Voxels of a window that are not padding. An axis that is shorter than the window is centered in it."""
        lengths = (min(edge, length) for edge, length in zip(self.roi, self.size, strict=True))
        z, y, x = (slice(first, first + n) for first, n in zip(self.pad_before, lengths, strict=True))
        return z, y, x

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.rows * len(self.starts[2])

    @property
    def rows(self) -> int:
        """Number of rows of windows along x."""
        return len(self.starts[0]) * len(self.starts[1])

    @cached_property
    def overlaps(self) -> tuple[dict[int, AxisOverlap], dict[int, AxisOverlap], dict[int, AxisOverlap]]:
        """Overlaps of the windows along each axis, by the first voxel of the window."""
        z, y, x = (_overlaps(starts, edge) for starts, edge in zip(self.starts, self.roi, strict=True))
        return z, y, x

    @property
    def max_shared(self) -> Size:
        """Maximum number of voxels along each axis that a window shares with the previous one."""
        return as_size([max(overlap.shared for overlap in axis.values()) for axis in self.overlaps])

    def max_skipped_rows(self, outputs: int, batch_size: int) -> int:
        """Return the maximum number of rows to skip between computed rows, whose slabs are all created in one batch."""
        row = 4 * outputs * self.roi[0] * self.roi[1] * self.padded[2]
        return max(MAX_SKIPPED_BYTES // (row * batch_size), 1)

    def positions(self) -> Iterator[Size]:
        """Yield the first voxel (z, y, x) of each window, z slowest."""
        return itertools.product(*self.starts)


def split_runs(positions: Sequence[Size]) -> Iterator[Run]:
    """Split windows, given by their first voxels in order, into the longest runs. The step of a single window is 1."""
    start, count, step = positions[0], 1, 1
    for position in positions[1:]:
        ahead = position[2] - start[2]
        if position[:2] == start[:2] and ahead > 0 and (count == 1 or ahead == count * step):
            step = ahead if count == 1 else step
            count += 1
        else:
            yield Run(start, count, step)
            start, count, step = position, 1, 1
    yield Run(start, count, step)


def _starts(length: int, edge: int, overlap: float) -> tuple[int, ...]:
    """Return equally spaced starts from 0. The last start is moved back so that its window ends with the volume."""
    step = edge if length == edge else max(int(edge * (1 - overlap)), 1)
    count = -(-(length - edge) // step) + 1
    return tuple(min(index * step, length - edge) for index in range(count))


def _overlaps(starts: tuple[int, ...], edge: int) -> dict[int, AxisOverlap]:
    steps = [after - start for start, after in itertools.pairwise(starts)]
    columns = zip(starts, [0, *(edge - step for step in steps)], [*steps, edge], strict=True)
    return {start: AxisOverlap(number, shared, final) for number, (start, shared, final) in enumerate(columns)}


def as_size(values: Sequence[int]) -> Size:
    """Return three integers as a tuple of known length, for the type checker."""
    z, y, x = values
    return z, y, x
