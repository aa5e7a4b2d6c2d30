"""Positions of the sliding windows on an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from service.core.quantities import Size
from service.models.spec import Tiling

Box = tuple[int, slice, slice, slice, slice]
"""Index of a region of an image: (0, channels, z, y, x)."""

# Maximum total size of the slabs of skipped windows that are created for one batch. The slabs of consecutive skipped
# rows all become final at the same time.
MAX_SKIPPED_SLAB_BYTES = 2**26


class AxisOverlap(NamedTuple):
    """Overlap of a window with its two neighbors along one axis.

    window_index  zero-based index of the window along the axis
    num_shared    number of leading voxels that the previous window also covers
    num_final     number of leading voxels that the next window does not cover
    """

    window_index: int
    num_shared: int
    num_final: int


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

    window_size  edge lengths of a window
    pad_before   number of padding voxels before the first voxel along each axis
    padded_size  edge lengths of the padded volume
    starts       first voxels of the windows along each axis of the padded volume
    """

    size: Size
    window_size: Size
    pad_before: Size
    padded_size: Size
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @classmethod
    def cover(cls, size: Size, window_size: Size, overlap: float, tiling: Tiling = "monai") -> Grid:
        """Return the window positions for this overlap, a fraction of the window (0 <= overlap < 1).

        tiling  program whose positions are used. nnU-Net increases the overlap so that all windows overlap equally,
                and MONAI only the overlap of the last window.
        """
        compute_starts = _compute_even_starts if tiling == "nnunet" else _compute_starts
        padding = [max(window_length - length, 0) for window_length, length in zip(window_size, size, strict=True)]
        padded_size = as_size([length + pad_length for length, pad_length in zip(size, padding, strict=True)])
        z, y, x = (
            compute_starts(length, window_length, overlap)
            for length, window_length in zip(padded_size, window_size, strict=True)
        )
        return cls(size, window_size, as_size([pad_length // 2 for pad_length in padding]), padded_size, (z, y, x))

    @property
    def valid_region(self) -> tuple[slice, slice, slice]:
        """Voxels of a window that are not padding. A volume that is shorter than the window is centered in it."""
        lengths = (
            min(window_length, length) for window_length, length in zip(self.window_size, self.size, strict=True)
        )
        z, y, x = (slice(first, first + n) for first, n in zip(self.pad_before, lengths, strict=True))
        return z, y, x

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


def _compute_overlaps(starts: tuple[int, ...], window_length: int) -> dict[int, AxisOverlap]:
    steps = [next_start - start for start, next_start in itertools.pairwise(starts)]
    columns = zip(starts, [0, *(window_length - step for step in steps)], [*steps, window_length], strict=True)
    return {
        start: AxisOverlap(index, num_shared, num_final) for index, (start, num_shared, num_final) in enumerate(columns)
    }


def as_size(values: Sequence[int]) -> Size:
    """Return three integers as a tuple whose length the type checker knows."""
    z, y, x = values
    return z, y, x
