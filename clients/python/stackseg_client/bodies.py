"""Request bodies: files that are read block by block, and arrays that are sent as TIFF without a copy."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import tifffile
from numpy.typing import DTypeLike, NDArray

from stackseg_client.errors import StackChanged

# Size of the blocks in which bodies are read and sent.
BLOCK_BYTES = 2**20
# Maximum size of the pixels in a classic TIFF, which has 32-bit offsets. The remaining bytes are for the tags.
MAX_CLASSIC_TIFF_BYTES = 2**32 - 2**26
# Kinds of NumPy dtypes that a TIFF can store: booleans, signed and unsigned integers, and floats.
_DTYPE_KINDS = "biuf"


class ArrayLike(Protocol):
    """An array that is read slab by slab: NumPy, memory-mapped files, Zarr, Dask, HDF5, PyTorch."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Source = str | os.PathLike[str] | bytes | ArrayLike


class Body(Protocol):
    """A request body that can be read several times, for retries.

    name    file name that the server shows; "" if unknown
    nbytes  size in bytes
    """

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read_blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the content in blocks of about `BLOCK_BYTES`."""


@dataclass(frozen=True)
class FileBody:
    """A file on disk, whose size must not change."""

    path: Path
    nbytes: int

    @property
    def name(self) -> str:
        """The name of the file without its folder."""
        return self.path.name

    def read_blocks(self) -> Iterator[bytes]:
        """Read the file block by block. Raises StackChanged if it is shorter or longer than before."""
        with self.path.open("rb", buffering=0) as file:
            for position in range(0, self.nbytes, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, self.nbytes - position))
            if file.tell() != self.nbytes or file.read(1):
                raise StackChanged(f"{self.path} changed while it was sent. Send it again when it is complete.")


@dataclass(frozen=True)
class BytesBody:
    """The content of a file in memory."""

    content: bytes
    name: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the content."""
        return len(self.content)

    def read_blocks(self) -> Iterator[memoryview]:
        """Return views of the content."""
        yield from _split(memoryview(self.content))


class ArrayBody:
    """An array as an uncompressed TIFF, whose pixels are the memory of the array.

    Arrays that are not contiguous, have another byte order or are computed on access are converted slab by slab.
    Raises TypeError if a TIFF cannot store the dtype, and ValueError for an array without planes or voxels.
    """

    name = ""

    def __init__(self, array: ArrayLike) -> None:
        shape = tuple(map(int, array.shape))
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"A stack needs at least two dimensions and one voxel, but its shape is {shape}.")
        # Arrays of other libraries, such as PyTorch, have dtypes that NumPy does not know.
        dtype = np.asarray(array[(slice(0, 1),) * len(shape)]).dtype
        if dtype.kind not in _DTYPE_KINDS:
            raise TypeError(f"A stack consists of integers or floats, but this array has the dtype {dtype}.")
        self._array, self._shape = array, shape
        # TIFF stores booleans as bits.
        self._dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("<")
        self._head, self._tail = _make_tiff_frame(shape, self._dtype)

    @property
    def nbytes(self) -> int:
        """The size of the TIFF."""
        return len(self._head) + math.prod(self._shape) * self._dtype.itemsize + len(self._tail)

    def read_blocks(self) -> Iterator[bytes | memoryview]:
        """Return the parts of the TIFF before the pixels, views of the pixels, and the directory of the planes."""
        yield self._head
        for slab in _read_slabs(self._array, self._shape, self._dtype):
            yield from _split(slab.reshape(-1).view(np.uint8).data)
        yield self._tail


def make_body(source: Source) -> Body:
    """Return the request body for a path, the bytes of a file, or an array. Raises the errors of `ArrayBody`."""
    if isinstance(source, bytes):
        return BytesBody(source)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            raise IsADirectoryError(
                f"{path} is a folder. Use segment_folder() for a folder of stacks, pass an OME-Zarr as a zip file or"
                " as an array, or name a folder on the host of the server with input=."
            )
        return FileBody(path, path.stat().st_size)
    return ArrayBody(source)


def _split(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def _read_slabs(array: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike) -> Iterator[NDArray[Any]]:
    """Yield contiguous parts of an array in C order: about one block each, or a chunk of a chunked array."""
    itemsize = np.dtype(dtype).itemsize
    lengths = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape) - 1)]
    # The first axis along which the array is split.
    axis = next((axis for axis, length in enumerate(lengths) if length <= BLOCK_BYTES), len(lengths) - 1)
    step = max(1, BLOCK_BYTES // lengths[axis])
    # Decode each chunk of Zarr, HDF5 and Dask arrays only once along this axis.
    chunks = getattr(array, "chunks", None)
    if chunks:
        step = max(step, int(np.max(chunks[axis])))
    for index in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], step):
            slab = array[(*index, slice(start, start + step))]
            yield np.ascontiguousarray(slab, dtype=dtype)


class _SparseFile(io.RawIOBase):
    """A file in memory that stores the bytes before and after one gap, which is skipped with `seek`."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.gap_end: int | None = None
        self._position = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        end = len(self.head) if self.gap_end is None else self.gap_end + len(self.tail)
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: end}[whence]
        return self._position

    def write(self, data: Any, /) -> int:
        length = memoryview(data).nbytes
        if self.gap_end is None and self._position > len(self.head):
            # The last byte of the gap.
            self.gap_end = self._position + length
        elif self.gap_end is None or self._position < self.gap_end:
            self.head[self._position : self._position + length] = data
        else:
            start = self._position - self.gap_end
            self.tail[start : start + length] = data
        self._position += length
        return length


def _make_tiff_frame(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[bytes, bytes]:
    """Return the bytes of an uncompressed TIFF before and after its pixels.

    The TIFF has one page per plane [Y, X], and records the shape as tifffile does. Arrays with up to three dimensions
    have the axes ZYX.
    """
    file, nbytes = _SparseFile(), math.prod(shape) * dtype.itemsize
    is_big = nbytes > MAX_CLASSIC_TIFF_BYTES
    with tifffile.TiffWriter(cast(BinaryIO, file), byteorder="<", bigtiff=is_big) as writer:
        options: dict[str, Any] = {"photometric": "minisblack", "software": False, "returnoffset": True}
        if len(shape) <= 3:
            options["metadata"] = {"axes": "ZYX"[-len(shape) :]}
        offset, _ = writer.write(shape=shape, dtype=dtype, contiguous=True, **options) or (0, 0)
    if len(file.head) > offset or file.gap_end != offset + nbytes:
        raise RuntimeError(f"tifffile {tifffile.__version__} is not supported. Write the array to a TIFF file first.")
    return bytes(file.head).ljust(offset, b"\0"), bytes(file.tail)
