"""Selection of planes of a volume. The planes can be subsampled, and their total size is limited."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from service.core.errors import BadParameter, Cancelled
from service.core.types import Array, CancellationCheck, Volume, never_cancelled
from service.serving.storage.memory_budget import FairMemoryBudget

# Maximum size of the planes in one response.
MAX_PLANE_BYTES = 2**25
# Maximum memory for all planes that are being read and sent. A single client can use half of this memory.
PLANE_MEMORY_BUDGET = FairMemoryBudget(4 * MAX_PLANE_BYTES)
# Dtypes that JavaScript typed arrays support. Other dtypes are converted to float32.
PLANE_DTYPES = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"}


class PlaneRange(NamedTuple):
    """Planes from `start` to `stop` along an axis (0 for z), with steps along (z, y, x).

    `stop` is exclusive; None selects all planes from `start`.
    """

    start: int
    stop: int | None
    step: tuple[int, int, int]
    axis: int = 0


@dataclass(frozen=True)
class PlaneSelection:
    """A selection [z, y, x] from the first channel of a volume, and the little-endian dtype of the returned voxels."""

    volume: Volume
    ranges: tuple[range, range, range]
    dtype: np.dtype[Any]

    @classmethod
    def select(cls, volume: Volume, plane_range: PlaneRange) -> PlaneSelection:
        """Select planes. Raises BadParameter if they are outside the volume or exceed `MAX_PLANE_BYTES`."""
        dtype = volume.dtype if volume.dtype.name in PLANE_DTYPES else np.dtype(np.float32)
        planes = cls(volume, _compute_ranges(volume, plane_range), dtype.newbyteorder("<"))
        if planes.nbytes > MAX_PLANE_BYTES:
            raise BadParameter(
                f"from, to, step: the planes are larger than the limit of {MAX_PLANE_BYTES:,} bytes. Request fewer"
                " planes, or use larger steps.",
                parameter="from",
            )
        return planes

    @property
    def nbytes(self) -> int:
        """Size of the returned voxels in bytes."""
        return math.prod(map(len, self.ranges)) * self.dtype.itemsize

    def read(self, cancelled: CancellationCheck = never_cancelled) -> Array:
        """Read the voxels as an array [z, y, x]. Blocks during file access. Raises Cancelled."""
        planes = np.empty(tuple(map(len, self.ranges)), self.dtype)
        for index, z in enumerate(self.ranges[0]):
            if cancelled():
                raise Cancelled("The client disconnected before the planes were read.")
            planes[index] = self.volume.read_pixels(z, *self.ranges[1:])
        return planes


def _compute_ranges(volume: Volume, plane_range: PlaneRange) -> tuple[range, range, range]:
    """Return the selected indices along z, y and x. Raises BadParameter for planes outside the volume."""
    plane_count = volume.shape[1 + plane_range.axis]
    stop = plane_count if plane_range.stop is None else plane_range.stop
    if not plane_range.start < stop <= plane_count:
        raise BadParameter(
            f"from, to: planes {plane_range.start} to {stop} are outside the volume, which has {plane_count} planes.",
            parameter="from",
        )
    ranges = [range(0, size, step) for size, step in zip(volume.shape[1:], plane_range.step, strict=True)]
    ranges[plane_range.axis] = range(plane_range.start, stop, plane_range.step[plane_range.axis])
    z, y, x = ranges
    return z, y, x
