"""Where the windows of an image lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from service.core.volume import Size


class Along(NamedTuple):
    """What a window has in common with others along one axis.

    nth      of all that begin elsewhere on it
    known    first voxels that the window before reaches
    leaving  first voxels that the window behind does not reach
    """

    nth: int
    known: int
    leaving: int


Place = tuple[Along, Along, Along]


@dataclass(frozen=True)
class Grid:
    """Where the windows lie on a volume of `size` (Z, Y, X) that is padded to at least one window.

    roi       edges of a window
    before    voxels of padding in front of each axis
    padded    edges of the padded volume
    starts    first voxel of the windows along each axis, in the padded volume
    """

    size: Size
    roi: Size
    before: Size
    padded: Size
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @classmethod
    def cover(cls, size: Size, roi: Size, overlap: float) -> Grid:
        """The positions that MONAI would take for this overlap (a share of the window, 0 <= overlap < 1)."""
        missing = [max(edge - length, 0) for edge, length in zip(roi, size, strict=True)]
        padded = triple([length + m for length, m in zip(size, missing, strict=True)])
        steps = [_step(length, edge, overlap) for length, edge in zip(padded, roi, strict=True)]
        z, y, x = (_starts(length, edge, step) for length, edge, step in zip(padded, roi, steps, strict=True))
        return cls(size, roi, triple([m // 2 for m in missing]), padded, (z, y, x))

    @property
    def count(self) -> int:
        """Number of windows."""
        z, y, x = self.starts
        return len(z) * len(y) * len(x)

    @property
    def rows(self) -> int:
        """Number of rows of windows along x."""
        return len(self.starts[0]) * len(self.starts[1])

    @cached_property
    def along(self) -> tuple[dict[int, Along], dict[int, Along], dict[int, Along]]:
        """What windows have in common with others along each axis, by their first voxel."""
        z, y, x = (_along(starts, edge) for starts, edge in zip(self.starts, self.roi, strict=True))
        return z, y, x

    @property
    def shared(self) -> Size:
        """Most voxels along each axis that a window has in common with the one before."""
        return triple([max(window.known for window in axis.values()) for axis in self.along])

    def rows_to_skip(self, outputs: int, batch_size: int) -> int:
        """Most rows without a window that is computed between two that are: their slabs leave with one batch."""
        row = 4 * outputs * self.roi[0] * self.roi[1] * self.padded[2]
        return max(SKIPPED_BYTES // (row * batch_size), 1)

    def positions(self) -> Iterator[Size]:
        """First voxels of the windows, z slowest."""
        return itertools.product(*self.starts)


def _starts(length: int, edge: int, step: int) -> tuple[int, ...]:
    """Every `step` voxels from 0, the last window moved back so that it ends where the volume ends."""
    count = -(-(length - edge) // step) + 1
    return tuple(min(index * step, length - edge) for index in range(count))


def _along(starts: tuple[int, ...], edge: int) -> dict[int, Along]:
    steps = [after - start for start, after in itertools.pairwise(starts)]
    ends = zip(starts, [0, *(edge - step for step in steps)], [*steps, edge], strict=True)
    return {start: Along(nth, known, leaving) for nth, (start, known, leaving) in enumerate(ends)}


def _step(length: int, edge: int, overlap: float) -> int:
    return edge if length == edge else max(int(edge * (1 - overlap)), 1)


def triple(values: Sequence[int]) -> Size:
    z, y, x = values
    return z, y, x


# Scores of windows that are not computed become final all at once: no more bytes of them than these at a time.
SKIPPED_BYTES = 2**26
