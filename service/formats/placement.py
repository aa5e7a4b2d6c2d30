"""Location of a volume's pixels in a file, and volumes that read the pixels from the file.

Uncompressed pixels with constant strides are not copied: a `Placement` locates them, and the volume memory-maps the
file. Decoded pixels are written to a separate file, which is read in the same way.
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
from service.core.types import Array, StackShape, Volume

StoreBlock = Callable[[int, tuple[int, int, int], Array], None]
"""store_block(channel, (z0, y0, x0), block): store a block [z, y, x] of a channel.

The channel is given by its position in the selection. The function is called from several threads.
"""


def make_block_writer(pixels: Array) -> StoreBlock:
    """Return a `StoreBlock` function that writes to an array [C, Z, Y, X]."""

    def store(channel: int, start: tuple[int, int, int], block: Array) -> None:
        z, y, x = (slice(first, first + length) for first, length in zip(start, block.shape, strict=True))
        pixels[channel, z, y, x] = block

    return store


def make_temporary_file(folder: Path, nbytes: int) -> IO[bytes]:
    """Create an unnamed file in a folder, which is created if it does not exist. Closing the file deletes it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile(dir=folder))
        file.truncate(nbytes)
        undo.pop_all()
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

        return Volume(self.shape, dtype, read, voxel_size, channels, notes)

    def stream_volume(
        self, file: int, voxel_size: VoxelSize | None, channels: tuple[str, ...], notes: tuple[str, ...]
    ) -> Volume:
        """Return a volume that reads each slab from an open file into new memory.

        The volume owns a duplicate of the descriptor. Reading a slab raises BadFile if the file has been truncated.

        Raises ValueError if the placement extends beyond the file.
        """
        stored_dtype = np.dtype(self.dtype)
        dtype = stored_dtype.newbyteorder("=")
        if min(self.offset, *self.strides) < 0 or self.offset + self._compute_extent(0) > os.fstat(file).st_size:
            raise ValueError("the pixels extend beyond the end of the file")
        file = os.dup(file)
        can_read_directly = (
            stored_dtype == dtype and self.strides[2:] == Placement.make_dense(dtype, self.shape).strides[2:]
        )

        def read(z0: int, z1: int) -> Array:
            slab = np.empty((self.shape[0], z1 - z0, *self.shape[2:]), dtype)
            block = np.empty(0 if can_read_directly else self._compute_extent(2), np.uint8)
            for channel, z in np.ndindex(slab.shape[:2]):
                start = self.offset + channel * self.strides[0] + (z0 + z) * self.strides[1]
                _fill_buffer(file, slab[channel, z] if can_read_directly else block, start)
                if not can_read_directly:
                    slab[channel, z] = np.ndarray(self.shape[2:], stored_dtype, block, 0, self.strides[2:])
            return slab

        weakref.finalize(read, os.close, file)
        return Volume(self.shape, dtype, read, voxel_size, channels, notes)

    def _compute_extent(self, axis: int) -> int:
        """Return the number of bytes from the first to the last pixel, inclusive, along `axis` and all later axes."""
        steps = zip(self.shape[axis:], self.strides[axis:], strict=True)
        return sum((length - 1) * stride for length, stride in steps) + np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class VolumeLocation:
    """Location and metadata of a volume, in the source file or in the file to which it was decoded."""

    placement: Placement
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]
    notes: tuple[str, ...]
    is_decoded: bool


def _fill_buffer(file: int, buffer: Array, offset: int) -> None:
    unfilled_part = memoryview(buffer.data).cast("B")
    while unfilled_part:
        read_bytes = os.preadv(file, [unfilled_part], offset)
        if not read_bytes:
            raise BadFile(
                "The file was truncated while it was being read. Send the request again when the file is complete."
            )
        unfilled_part, offset = unfilled_part[read_bytes:], offset + read_bytes


def get_native_dtype(stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a volume: the stored dtype in native byte order, or uint8 (0 and 1) for 1-bit pixels."""
    dtype = stored_dtype.newbyteorder("=")
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype


def check_size(nbytes: int, limit_bytes: int, subject: str = "The selected volume") -> None:
    """Raise TooLarge, with a message about `subject`, if its decoded size exceeds the limit."""
    if nbytes > limit_bytes:
        raise TooLarge(
            f"{subject} decodes to {_format_bytes(nbytes)}, but this service reads up to {_format_bytes(limit_bytes)}."
            " Select a single channel or time point, or crop or downsample the stack."
        )


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count} bytes"
