"""Location of a volume's pixels in a file, and volumes that read the pixels from the file.

Uncompressed pixels with constant strides are not copied: a `Placement` locates them, and the volume memory-maps the
file or reads slabs from it. Decoded pixels are written to a separate file, which is read in the same way.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.quantities import VoxelSize
from service.core.types import Array, StackShape, Volume, slice_range

# Maximum number of bytes that `Volume.read_part` reads from a file at a time.
MAX_BLOCK_BYTES = 2**22

StoreBlock = Callable[[int, tuple[int, int, int], Array], None]
"""store_block(channel, (z0, y0, x0), block): store a block [z, y, x] of a channel.

The channel is given by its position in the selection. The function is called from several threads.
"""


def make_block_writer(pixels: Array) -> StoreBlock:
    """Return a `StoreBlock` function that writes to an array [C, Z, Y, X]."""

    def write_block(channel: int, start: tuple[int, int, int], block: Array) -> None:
        z, y, x = (slice(first, first + length) for first, length in zip(start, block.shape, strict=True))
        pixels[channel, z, y, x] = block

    return write_block


def make_temporary_file(folder: Path, nbytes: int) -> IO[bytes]:
    """Create an unnamed file in a folder, which is created if it does not exist. Closing the file deletes it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as cleanup:
        file = cleanup.enter_context(tempfile.TemporaryFile(dir=folder))
        file.truncate(nbytes)
        cleanup.pop_all()
    return file


def map_file(file: Path | int) -> mmap.mmap:
    """Memory-map a whole file copy-on-write. This is several times as fast as `numpy.memmap`.

    `file` is a path, or a descriptor, which stays open. Raises ValueError for an empty file.
    """
    if isinstance(file, int):
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    with file.open("rb", buffering=0) as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True)
class Placement:
    """Location of pixels [C, Z, Y, X] in a file: offset and strides in bytes, and the dtype with its byte order."""

    dtype: str
    offset: int
    shape: StackShape
    strides: StackShape

    @classmethod
    def make_dense(cls, dtype: np.dtype[Any], shape: StackShape) -> Placement:
        """Return the placement of C-ordered pixels that fill a whole file."""
        _, z, y, x = shape
        size = dtype.itemsize
        return cls(dtype.str, 0, shape, (z * y * x * size, y * x * size, x * size, size))

    @property
    def nbytes(self) -> int:
        """Size of the pixels in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def map_volume(
        self,
        content: mmap.mmap | bytearray,
        voxel_size: VoxelSize | None,
        channels: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> Volume:
        """Return a volume that reads from the content of a whole file, which is memory-mapped or held in memory.

        Slabs are views. They are copied only if the stored byte order is not native or the pixels are not aligned.
        Raises ValueError if the placement extends beyond the file.
        """
        pixels: Array = np.ndarray(self.shape, np.dtype(self.dtype), content, self.offset, self.strides)
        dtype = pixels.dtype.newbyteorder("=")

        def read(z0: int, z1: int) -> Array:
            return np.require(pixels[:, z0:z1], dtype, ["ALIGNED"])

        def read_part(z: int, rows: range, columns: range) -> Array:
            return np.require(pixels[0, z, slice_range(rows), slice_range(columns)], dtype, ["ALIGNED"])

        return Volume(self.shape, dtype, read, voxel_size, channels, notes, read_part)

    def stream_volume(
        self, file: int, voxel_size: VoxelSize | None, channels: tuple[str, ...], notes: tuple[str, ...]
    ) -> Volume:
        """Return a volume that reads each slab from an open file into new memory.

        The volume owns a duplicate of the descriptor. Reading from the volume raises BadFile if the file has been
        truncated. Raises ValueError if the placement extends beyond the file.
        """
        stored_dtype = np.dtype(self.dtype)
        dtype = stored_dtype.newbyteorder("=")
        if min(self.offset, *self.strides) < 0 or self.offset + self._compute_extent(0) > os.fstat(file).st_size:
            raise ValueError("the pixels extend beyond the end of the file")
        open_file = _OpenFile(file)
        can_read_directly = (
            stored_dtype == dtype and self.strides[2:] == Placement.make_dense(dtype, self.shape).strides[2:]
        )

        def read(z0: int, z1: int) -> Array:
            slab = np.empty((self.shape[0], z1 - z0, *self.shape[2:]), dtype)
            block = np.empty(0 if can_read_directly else self._compute_extent(2), np.uint8)
            for channel, z in np.ndindex(slab.shape[:2]):
                start = self.offset + channel * self.strides[0] + (z0 + z) * self.strides[1]
                _fill_buffer(open_file.descriptor, slab[channel, z] if can_read_directly else block, start)
                if not can_read_directly:
                    slab[channel, z] = np.ndarray(self.shape[2:], stored_dtype, block, 0, self.strides[2:])
            return slab

        def read_part(z: int, rows: range, columns: range) -> Array:
            start, strides = self.offset + z * self.strides[1], self.strides[2:]
            part = _read_blocks(open_file.descriptor, stored_dtype, start, (rows, columns), strides)
            return part.astype(dtype, copy=False)

        return Volume(self.shape, dtype, read, voxel_size, channels, notes, read_part)

    def _compute_extent(self, axis: int) -> int:
        """Return the number of bytes from the first to the last pixel, inclusive, along `axis` and all later axes."""
        steps = zip(self.shape[axis:], self.strides[axis:], strict=True)
        return sum((length - 1) * stride for length, stride in steps) + np.dtype(self.dtype).itemsize


class _OpenFile:
    """A duplicate of a file descriptor, which is closed when the last reference to this object is deleted."""

    def __init__(self, file: int) -> None:
        self.descriptor = os.dup(file)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class VolumeLocation:
    """Location and metadata of a volume, in the source file or in the file to which it was decoded."""

    placement: Placement
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]
    notes: tuple[str, ...]
    is_decoded: bool


def _read_blocks(
    file: int, dtype: np.dtype[Any], start: int, indices: tuple[range, range], strides: tuple[int, ...]
) -> Array:
    """Read elements of a 2D array in a file by their row and column indices, up to `MAX_BLOCK_BYTES` at a time.

    start    position of the first element of the array in the file, in bytes
    indices  indices of the rows and of the columns to read
    strides  strides of the rows and of the columns in bytes
    """
    if strides[0] < strides[1]:
        return _read_blocks(file, dtype, start, indices[::-1], strides[::-1]).T
    elements = np.empty((len(indices[0]), len(indices[1])), dtype)
    steps = [index.step * stride for index, stride in zip(indices, strides, strict=True)]
    row_bytes = (len(indices[1]) - 1) * steps[1] + dtype.itemsize
    # Read several rows at a time if they fit, otherwise a part of one row.
    row_count = max((MAX_BLOCK_BYTES - row_bytes) // steps[0] + 1, 1) if steps[0] else 1
    column_count = len(indices[1]) if row_bytes <= MAX_BLOCK_BYTES else max(MAX_BLOCK_BYTES // steps[1], 1)
    for row in range(0, elements.shape[0], row_count):
        for column in range(0, elements.shape[1], column_count):
            block = elements[row : row + row_count, column : column + column_count]
            extent = sum((length - 1) * step for length, step in zip(block.shape, steps, strict=True)) + dtype.itemsize
            content = np.empty(extent, np.uint8)
            _fill_buffer(file, content, start + indices[0][row] * strides[0] + indices[1][column] * strides[1])
            block[...] = np.ndarray(block.shape, dtype, content, 0, tuple(steps))
    return elements


def _fill_buffer(file: int, buffer: Array, offset: int) -> None:
    unfilled_part = memoryview(buffer.data).cast("B")
    while unfilled_part:
        byte_count = os.preadv(file, [unfilled_part], offset)
        if not byte_count:
            raise BadFile(
                "The file was truncated while it was being read. Send the request again when the file is complete."
            )
        unfilled_part, offset = unfilled_part[byte_count:], offset + byte_count


def get_native_dtype(stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a volume: the stored dtype in native byte order, or uint8 (0 and 1) for 1-bit pixels."""
    dtype = stored_dtype.newbyteorder("=")
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype


def check_size(nbytes: int, limit_bytes: int, subject: str = "The selected volume") -> None:
    """Raise TooLarge if the decoded size exceeds the limit. The error message begins with `subject`."""
    if nbytes > limit_bytes:
        raise TooLarge(
            f"{subject} decodes to {_format_bytes(nbytes)}, but this service reads up to {_format_bytes(limit_bytes)}."
            " Select a single channel or time point, or crop or downsample the stack."
        )


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count} bytes"
