"""Read the full resolution of OME-Zarr images chunk by chunk. Versions up to 0.5 are supported.

Specification: https://ngff.openmicroscopy.org. Read untrusted stores with `service.formats.sandbox.reader` instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from service.core.errors import TooLarge
from service.core.hardware import host
from service.core.types import Array, Description, Selection
from service.formats import axes
from service.formats.axes import Layout
from service.formats.open_stack import OpenStack
from service.formats.placement import Placement, StoreBlock, check_size, make_block_writer
from service.formats.zarr.image import ZarrImage, find_image
from service.formats.zarr.store import Store

# Maximum number of chunks in a selection. Each chunk is a file or a byte range of a file.
MAX_CHUNKS = 2**19
# Maximum decoded size of a row of chunks along X. The chunks of a row are joined, so that complete rows are written.
_MAX_ROW_BYTES = 2**26
# Limits for the chunks that are read from the store together: their total decoded size, and their number.
_MAX_BATCH_BYTES = 2**25
_MAX_BATCH_CHUNKS = 64
# Maximum total memory of the decoding threads.
_MAX_DECODING_BYTES = 2**29

ChunkIndex = tuple[int, ...]
"""Index of a chunk along each dimension of the chunk grid."""

Region = tuple[range, range, range]
"""Contiguous ranges of voxels along Z, Y and X."""


@dataclass(frozen=True)
class ZarrStack(OpenStack):
    """An OME-Zarr image with its axes and the selected part.

    missing_chunks  indices of the chunks that have been read, but are not stored
    """

    image: ZarrImage
    missing_chunks: set[ChunkIndex] = field(default_factory=set)

    @property
    def colors(self) -> tuple[str, ...]:
        """One color per stored channel, or "" if unknown."""
        return axes.match_channels(self.image.colors, len(self.channel_names))

    @property
    def scenes(self) -> tuple[str, ...]:
        """Names of the images of a collection."""
        return self.image.scenes

    def list_notes(self, selection: Selection) -> tuple[str, ...]:
        """Return notes for the user, including the number of missing chunks after the selection was decoded."""
        notes = super().list_notes(selection)
        if not self.missing_chunks:
            return notes
        chunk_count = math.prod(len(indices) for indices in self._selected_chunks)
        return (
            *notes,
            f"{len(self.missing_chunks)} of {chunk_count} chunks of the selection are not stored, and were read as the"
            f" fill value {self.image.array.fill_value}. If the store was not copied completely, copy it again.",
        )

    def describe(self, selection: Selection) -> Description:
        """Describe the image and the selected part. Raises BadFile if the array does not have a single chunk."""
        self.image.array.find_stored_keys()
        return super().describe(selection)

    @property
    def decoded_bytes(self) -> int:
        """Decoded size of all chunks that contain a part of the selection."""
        return math.prod(len(indices) for indices in self._selected_chunks) * self.image.array.chunk_bytes

    def locate(self) -> Placement | None:
        """Return None, because the pixels of a chunked image are not stored in one file with constant strides."""
        return None

    def check_selection_size(self, limit_bytes: int) -> None:
        """Check the size of the selection and of its chunks. Raises TooLarge."""
        try:
            check_size(math.prod(self.shape) * self.dtype.itemsize, limit_bytes)
        except TooLarge as error:
            raise TooLarge(
                f"{error} To segment an OME-Zarr image of any size, run `stackseg segment IN OUT --workers N`."
            ) from None
        check_size(self.image.array.chunk_bytes, limit_bytes, "A chunk of the selected volume")
        chunk_count = math.prod(len(indices) for indices in self._selected_chunks)
        if chunk_count > MAX_CHUNKS:
            chunk_size = "x".join(map(str, self.image.array.chunk_shape))
            raise TooLarge(
                f"The selected volume has {chunk_count} chunks of {chunk_size} voxels, but at most"
                f" {MAX_CHUNKS} are supported. Save the image with larger chunks."
            )

    def decode(self, store_block: StoreBlock) -> None:
        """Decode the selected part by rows of chunks along X, or chunk by chunk if rows are too large."""
        self._decode(self._full_region, store_block)

    def read_region(self, region: Region) -> Array:
        """Decode a region of the selection as [C, Z, Y, X] in native byte order. Raises BadFile.

        Chunks outside the region are not read.
        """
        decoded: Array = np.empty((self.shape[0], *map(len, region)), self.dtype)
        self._decode(region, make_block_writer(decoded))
        return decoded

    @property
    def _full_region(self) -> Region:
        z, y, x = map(range, self.shape[1:])
        return z, y, x

    def _decode(self, region: Region, store_block: StoreBlock) -> None:
        """Decode a region of the selection. Positions passed to `store_block` are relative to the region."""
        array, x_axis = self.image.array, self._axes.index("X")
        chunks_by_axis = self._find_chunks(region)
        chunks_per_row = (
            len(chunks_by_axis[x_axis]) if len(chunks_by_axis[x_axis]) * array.chunk_bytes <= _MAX_ROW_BYTES else 1
        )
        rows = _split_rows(chunks_by_axis, x_axis, chunks_per_row)
        # Reading many chunks together hides the latency of remote stores.
        rows_per_batch = max(1, min(_MAX_BATCH_BYTES // array.chunk_bytes, _MAX_BATCH_CHUNKS) // chunks_per_row)
        batches = [rows[first : first + rows_per_batch] for first in range(0, len(rows), rows_per_batch)]

        def decode_batch(batch: list[list[ChunkIndex]]) -> None:
            encoded_chunks = iter(array.read_chunks([chunk_index for row in batch for chunk_index in row]))
            for row in batch:
                self._decode_row(row, list(itertools.islice(encoded_chunks, len(row))), region, store_block)

        # Each thread holds an encoded batch and a decoded row of chunks in memory.
        max_threads = max(1, _MAX_DECODING_BYTES // ((rows_per_batch + 2) * chunks_per_row * array.chunk_bytes))
        host.run_in_threads(decode_batch, batches, math.prod(map(len, region)) * self.dtype.itemsize, max_threads)

    @property
    def chunk_size(self) -> tuple[int, int, int]:
        """Shape of a chunk along Z, Y and X in voxels."""
        sizes = dict(zip(self._axes, self.image.array.chunk_shape, strict=True))
        return sizes.get("Z", 1), sizes.get("Y", 1), sizes.get("X", 1)

    @property
    def _axes(self) -> str:
        """One letter per stored dimension, or a dot for dimensions of length 1 that the layout leaves out."""
        return _align_axes(self.layout, self.image.array.shape)

    @property
    def _selected_chunks(self) -> list[Sequence[int]]:
        """Indices of the chunks along each dimension that contain a part of the selection."""
        return self._find_chunks(self._full_region)

    def _find_chunks(self, region: Region) -> list[Sequence[int]]:
        """Return the indices of the chunks along each dimension that contain a part of a region of the selection."""
        sample_count = self.layout.get_length("S")
        channels = [divmod(channel_number, sample_count) for channel_number in self.part.channels]
        selected_indices = {"T": {self.part.time or 0}, "C": {c for c, _ in channels}, "S": {s for _, s in channels}}
        extent = dict(zip("ZYX", region, strict=True))
        array = self.image.array
        return [
            sorted({index // step for index in selected_indices[axis]})
            if axis in selected_indices
            else range(extent[axis].start // step, -(-extent[axis].stop // step))
            if axis in extent
            else range(-(-length // step))
            for axis, length, step in zip(self._axes, array.shape, array.chunk_shape, strict=True)
        ]

    def _decode_row(
        self, row: Sequence[ChunkIndex], encoded_chunks: Sequence[bytes | None], region: Region, store_block: StoreBlock
    ) -> None:
        """Decode neighboring chunks along X, and store the pixels inside the region."""
        blocks = [self._decode_chunk(chunk_index, data) for chunk_index, data in zip(row, encoded_chunks, strict=True)]
        row_pixels = np.concatenate(blocks, axis=4) if len(blocks) > 1 else blocks[0]
        steps = zip(self._axes, row[0], self.image.array.chunk_shape, strict=True)
        first_indices = {axis: index * step for axis, index, step in steps}
        start, slices = list[int](), list[slice]()
        for axis, extent, length in zip("ZYX", region, row_pixels.shape[2:], strict=True):
            first_voxel = max(first_indices.get(axis, 0), extent.start)
            start.append(first_voxel - extent.start)
            slices.append(
                slice(first_voxel - first_indices.get(axis, 0), min(length, extent.stop - first_indices.get(axis, 0)))
            )
        z, y, x = start
        cropped_pixels: Array = row_pixels[:, :, slices[0], slices[1], slices[2]]
        first_channel = first_indices.get("C", 0), first_indices.get("S", 0)
        for position, channel in axes.find_channels(self.layout, self.part, first_channel, row_pixels):
            store_block(position, (z, y, x), np.ascontiguousarray(cropped_pixels[channel]))

    def _decode_chunk(self, chunk_index: ChunkIndex, encoded_chunk: bytes | None) -> Array:
        """Decode one chunk at the selected time as [C, S, Z, Y, X], without the padding beyond the end of the array."""
        array, letters = self.image.array, self._axes
        inner_shape = tuple(
            min(step, n - i * step) for i, n, step in zip(chunk_index, array.shape, array.chunk_shape, strict=True)
        )
        if encoded_chunk is None:
            self.missing_chunks.add(chunk_index)
            chunk: Array = np.broadcast_to(array.fill_value, inner_shape)
        else:
            chunk = array.codec.decode(encoded_chunk, array.chunk_shape)
        chunk = chunk[tuple(slice(length) for length in inner_shape)].astype(self.dtype, copy=False)
        for axis in reversed(range(len(letters))):
            if letters[axis] in ".T":
                time = (
                    (self.part.time or 0) - chunk_index[axis] * array.chunk_shape[axis] if letters[axis] == "T" else 0
                )
                chunk = chunk.take(time, axis)
        return axes.expand_to_cszyx(chunk, letters.replace(".", "").replace("T", ""))


def open_stack(store: Store, selection: Selection, limit_bytes: int | None) -> ZarrStack:
    """Find the image in a store and check the selected part. Raises BadFile, AmbiguousAxes, BadParameter, TooLarge.

    `limit_bytes` is None if the part is read region by region, so that its size and its number of chunks do not matter.
    """
    image = find_image(store, selection.scene)
    layout = axes.resolve_axes(image.axes, image.array.shape, selection.axes, image.metadata_problem)
    channel_names = axes.match_channels(image.channel_names, layout.get_length("C") * layout.get_length("S"))
    stack = ZarrStack(image, layout, axes.select_part(layout, channel_names, selection), channel_names)
    if limit_bytes is not None:
        stack.check_selection_size(limit_bytes)
    return stack


def _split_rows(chunks_by_axis: Sequence[Sequence[int]], x_axis: int, chunks_per_row: int) -> list[list[ChunkIndex]]:
    """Return the indices of chunks in rows of up to `chunks_per_row` chunks along the dimension `x_axis`."""
    return [
        [
            (*chunk_index[:x_axis], index, *chunk_index[x_axis + 1 :])
            for index in chunks_by_axis[x_axis][first : first + chunks_per_row]
        ]
        for chunk_index in itertools.product(
            *(indices if axis != x_axis else range(1) for axis, indices in enumerate(chunks_by_axis))
        )
        for first in range(0, len(chunks_by_axis[x_axis]), chunks_per_row)
    ]


def _align_axes(layout: Layout, shape: Sequence[int]) -> str:
    """Return one letter per stored dimension, or a dot for dimensions of length 1 that the layout leaves out."""
    letters, remaining_axes = "", list(zip(layout.axes, layout.shape, strict=True))
    for length in shape:
        is_next = bool(remaining_axes) and remaining_axes[0][1] == length
        letters += remaining_axes.pop(0)[0] if is_next else "."
    return letters
