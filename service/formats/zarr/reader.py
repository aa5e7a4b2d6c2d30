"""Read OME-Zarr 0.4 and 0.5, and earlier ones: the finest resolution, chunk by chunk, with what its metadata state.

https://ngff.openmicroscopy.org. Stores that cannot be trusted are read through `service.formats.sandbox.reader`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core.errors import TooLarge
from service.core.hardware import host
from service.core.types import Array, Selection
from service.formats import axes
from service.formats.axes import Layout
from service.formats.open_stack import OpenStack
from service.formats.placement import Placement, StoreBlock, check_size, store_into
from service.formats.zarr.image import ZarrImage, find_image
from service.formats.zarr.store import Store

# Chunks of a selection; each is a file to open, or a part of one.
_MAX_CHUNKS = 2**21
_MAX_CHANNELS = 2**16
# Of chunks along X that are decoded together, so that what is stored of them is whole planes or rows.
_ROW_BYTES = 2**26
# Of chunks that are asked for at a time, once they are decoded, and their number.
_BATCH_BYTES, _BATCH_CHUNKS = 2**25, 64
# Of all that threads hold at a time.
_DECODING_BYTES = 2**29

Place = tuple[int, ...]
"""Place of a chunk in the grid."""

Region = tuple[range, range, range]
"""Voxels along Z, Y and X, one after the other."""


@dataclass(frozen=True)
class ZarrStack(OpenStack):
    """An image with its axes and the selected part."""

    image: ZarrImage

    @property
    def colours(self) -> tuple[str, ...]:
        """One colour per stored channel."""
        return self.image.colours if len(self.image.colours) == len(self.names) else ("",) * len(self.names)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all chunks that hold a part of the selection."""
        return math.prod(len(indices) for indices in self._grid) * self.image.array.chunk_bytes

    def locate(self) -> Placement | None:
        """Return None: chunks lie in files of their own."""
        return None

    def check(self, limit_bytes: int) -> None:
        """Check what decoding takes. Raises TooLarge."""
        try:
            check_size(math.prod(self.shape) * self.dtype.itemsize, limit_bytes)
        except TooLarge as error:
            raise TooLarge(f"{error} An OME-Zarr of any size: stackseg segment IN OUT --workers N.") from None
        check_size(self.image.array.chunk_bytes, limit_bytes, "A chunk on the way to the selected volume")
        chunks = math.prod(len(indices) for indices in self._grid)
        if chunks > _MAX_CHUNKS:
            size = "x".join(map(str, self.image.array.chunks))
            raise TooLarge(f"The selected volume is in {chunks} chunks of {size}; write it with larger ones.")

    def decode(self, store: StoreBlock) -> None:
        """Decode the selected part, rows of chunks along X at a time, or chunk by chunk where rows are large."""
        self._decode(self._whole, store)

    def read_region(self, region: Region) -> Array:
        """Decode a part of the selection, [C, Z, Y, X] in native byte order, and read no chunk outside of it.

        `region` has the voxels along Z, Y and X. Raises BadFile.
        """
        decoded: Array = np.empty((self.shape[0], *map(len, region)), self.dtype)
        self._decode(region, store_into(decoded))
        return decoded

    @property
    def _whole(self) -> Region:
        z, y, x = map(range, self.shape[1:])
        return z, y, x

    def _decode(self, region: Region, store: StoreBlock) -> None:
        """Decode a part of the selection; places that `store` gets are relative to it."""
        array, x = self.image.array, self._axes.index("X")
        grid = self._grid_of(region)
        count = len(grid[x]) if len(grid[x]) * array.chunk_bytes <= _ROW_BYTES else 1
        rows = _split_rows(grid, x, count)
        # Stores that are far away are asked for many chunks at a time.
        step = max(1, min(_BATCH_BYTES // array.chunk_bytes, _BATCH_CHUNKS) // count)
        batches = [rows[first : first + step] for first in range(0, len(rows), step)]

        def decode_batch(batch: list[list[Place]]) -> None:
            stored = iter(array.read_chunks([place for row in batch for place in row]))
            for row in batch:
                self._decode_row(row, list(itertools.islice(stored, len(row))), region, store)

        # A thread holds a batch as it is stored, and a row of it.
        most = max(1, _DECODING_BYTES // ((step + 2) * count * array.chunk_bytes))
        host.run_in_threads(decode_batch, batches, math.prod(map(len, region)) * self.dtype.itemsize, most)

    @property
    def chunk_size(self) -> tuple[int, int, int]:
        """Voxels of a chunk along Z, Y and X."""
        edges = dict(zip(self._axes, self.image.array.chunks, strict=True))
        return edges.get("Z", 1), edges.get("Y", 1), edges.get("X", 1)

    @property
    def _axes(self) -> str:
        """One letter per stored dimension, of those of length 1 that the layout leaves out a dot."""
        return _spread(self.layout, self.image.array.shape)

    @property
    def _grid(self) -> list[Sequence[int]]:
        """Places of the chunks along each dimension that hold a part of the selection."""
        return self._grid_of(self._whole)

    def _grid_of(self, region: Region) -> list[Sequence[int]]:
        """Places of the chunks along each dimension that hold a part of a region of the selection."""
        samples = self.layout.length("S")
        channels = [divmod(number, samples) for number in self.part.channels]
        wanted = {"T": {self.part.time or 0}, "C": {c for c, _ in channels}, "S": {s for _, s in channels}}
        extent = dict(zip("ZYX", region, strict=True))
        array = self.image.array
        return [
            sorted({index // step for index in wanted[axis]})
            if axis in wanted
            else range(extent[axis].start // step, -(-extent[axis].stop // step))
            if axis in extent
            else range(-(-length // step))
            for axis, length, step in zip(self._axes, array.shape, array.chunks, strict=True)
        ]

    def _decode_row(
        self, row: Sequence[Place], stored: Sequence[bytes | None], region: Region, store: StoreBlock
    ) -> None:
        """Decode neighbours along X, and store what lies in the region."""
        blocks = [self._decode_chunk(place, data) for place, data in zip(row, stored, strict=True)]
        joined = np.concatenate(blocks, axis=4) if len(blocks) > 1 else blocks[0]
        steps = zip(self._axes, row[0], self.image.array.chunks, strict=True)
        first = {axis: index * step for axis, index, step in steps}
        start, inside = list[int](), list[slice]()
        for axis, extent, length in zip("ZYX", region, joined.shape[2:], strict=True):
            begin = max(first.get(axis, 0), extent.start)
            start.append(begin - extent.start)
            inside.append(slice(begin - first.get(axis, 0), min(length, extent.stop - first.get(axis, 0))))
        z, y, x = start
        cropped: Array = joined[:, :, inside[0], inside[1], inside[2]]
        start_of_channels = first.get("C", 0), first.get("S", 0)
        for number, channel in axes.find_channels(self.layout, self.part, start_of_channels, joined):
            store(number, (z, y, x), np.ascontiguousarray(cropped[channel]))

    def _decode_chunk(self, place: Place, stored: bytes | None) -> Array:
        """Decode one chunk without what lies beyond the array, [C, S, Z, Y, X] at the selected time."""
        array, letters = self.image.array, self._axes
        inside = tuple(min(step, n - i * step) for i, n, step in zip(place, array.shape, array.chunks, strict=True))
        if stored is None:
            chunk: Array = np.broadcast_to(array.fill, inside)
        else:
            chunk = array.coding.decode(stored, array.chunks)
        chunk = chunk[tuple(slice(length) for length in inside)].astype(self.dtype, copy=False)
        for axis in reversed(range(len(letters))):
            if letters[axis] in ".T":
                time = (self.part.time or 0) - place[axis] * array.chunks[axis] if letters[axis] == "T" else 0
                chunk = chunk.take(time, axis)
        return axes.expand(chunk, letters.replace(".", "").replace("T", ""))


def open_stack(store: Store, selection: Selection, limit_bytes: int) -> ZarrStack:
    """Find the image of a store and check the selected part. Raises BadFile, AmbiguousAxes, BadParameter, TooLarge."""
    image = find_image(store)
    layout = axes.resolve_axes(image.axes, image.array.shape, selection.axes)
    channels = layout.length("C") * layout.length("S")
    if channels > _MAX_CHANNELS:
        raise TooLarge(f"The image has {channels} channels; send one with at most {_MAX_CHANNELS}.")
    names = image.channels if len(image.channels) == channels else ("",) * channels
    stack = ZarrStack(image, layout, axes.select(layout, names, selection), names)
    stack.check(limit_bytes)
    return stack


def _split_rows(grid: Sequence[Sequence[int]], x: int, count: int) -> list[list[Place]]:
    """Return the places of chunks in rows of up to `count` along the dimension `x`."""
    return [
        [(*place[:x], index, *place[x + 1 :]) for index in grid[x][first : first + count]]
        for place in itertools.product(*(indices if axis != x else range(1) for axis, indices in enumerate(grid)))
        for first in range(0, len(grid[x]), count)
    ]


def _spread(layout: Layout, shape: Sequence[int]) -> str:
    """Return a letter per stored dimension, where the layout may leave out those of length 1."""
    letters, rest = "", list(zip(layout.axes, layout.shape, strict=True))
    for length in shape:
        is_next = bool(rest) and rest[0][1] == length
        letters += rest.pop(0)[0] if is_next else "."
    return letters
