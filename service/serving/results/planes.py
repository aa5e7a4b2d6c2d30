"""Planes of a volume: a range of planes, every n-th voxel, and a bounded size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from service.core.errors import BadParameter
from service.core.types import Array, Volume
from service.serving.storage.memory_budget import MemoryBudget

MAX_BYTES = 2**25
# Memory of this process for planes that are being read and sent.
MEMORY = MemoryBudget(4 * MAX_BYTES)
# What typed arrays of browsers hold; other numbers are read as float32.
SENT_TYPES = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"}


class PlaneRange(NamedTuple):
    """Planes `start` to `stop` (None: the last) of a volume along an axis (0: z), in steps along (z, y, x)."""

    start: int
    stop: int | None
    step: tuple[int, int, int]
    axis: int = 0


@dataclass(frozen=True)
class Planes:
    """Voxels of the first channel of a volume that are to be read, [z, y, x], and their type, little-endian."""

    volume: Volume
    ranges: tuple[range, range, range]
    dtype: np.dtype[Any]

    @classmethod
    def select(cls, volume: Volume, wanted: PlaneRange) -> Planes:
        """Select planes. Raises BadParameter for planes that the volume lacks, and for more than `MAX_BYTES`."""
        dtype = volume.dtype if volume.dtype.name in SENT_TYPES else np.dtype(np.float32)
        planes = cls(volume, _find_ranges(volume, wanted), dtype.newbyteorder("<"))
        if planes.nbytes > MAX_BYTES:
            raise BadParameter(
                f"from, to, step: more than {MAX_BYTES:,} bytes; ask for fewer planes, or larger steps.",
                parameter="from",
            )
        return planes

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(map(len, self.ranges)) * self.dtype.itemsize

    def read(self) -> Array:
        """Read the voxels; [z, y, x]. Blocks."""
        planes = np.empty(tuple(map(len, self.ranges)), self.dtype)
        rows, columns = (slice(numbers.start, numbers.stop, numbers.step) for numbers in self.ranges[1:])
        for place, z in enumerate(self.ranges[0]):
            planes[place] = self.volume.read(z, z + 1)[0, 0, rows, columns]
        return planes


def _find_ranges(volume: Volume, wanted: PlaneRange) -> tuple[range, range, range]:
    """Return the voxels along z, y and x. Raises BadParameter for planes that the volume has not."""
    count = volume.shape[1 + wanted.axis]
    stop = count if wanted.stop is None else wanted.stop
    if not wanted.start < stop <= count:
        raise BadParameter(f"from, to: planes {wanted.start} to {stop} of {count} cannot be had.", parameter="from")
    whole = [range(0, size, step) for size, step in zip(volume.shape[1:], wanted.step, strict=True)]
    whole[wanted.axis] = range(wanted.start, stop, wanted.step[wanted.axis])
    z, y, x = whole
    return z, y, x
