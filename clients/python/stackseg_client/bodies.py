"""Request bodies: files that are read block by block, and arrays that are sent as TIFF without a copy."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stackseg_client.body_protocol import Body
from stackseg_client.errors import StackChanged
from stackseg_client.zip_body import ZipBody

# Size of the blocks in which bodies are read and sent.
BLOCK_BYTES = 2**20
# Size of the header of a BigTIFF, and types of tags.
_HEADER_BYTES = 16
_ASCII, _SHORT, _LONG, _LONG8 = 2, 3, 4, 16
# Kinds of NumPy dtypes that a TIFF can store: booleans, signed and unsigned integers, and floats.
_DTYPE_KINDS = "biuf"
MAX_ITEM_BYTES = 8
# Letters of the axes by the names that arrays may have for them, in lower case.
_AXES_BY_NAME = {
    **{letter.lower(): letter for letter in "TZCYXS"},
    **{"time": "T", "channel": "C", "depth": "Z", "height": "Y", "width": "X"},
}
# Letter of an axis whose name is unknown. The server asks for the axes, unless it is the first of three.
_UNKNOWN_AXIS = "Q"
# Lengths of a last axis with colors, and the minimum lengths of the others, by which color images are recognized.
COLOR_COUNTS, MIN_COLOR_IMAGE_LENGTH = (3, 4), 16
# A folder with one of these files is an image or another group of Zarr.
_ZARR_FILES = ("zarr.json", ".zattrs", ".zgroup", ".zarray")


class ArrayLike(Protocol):
    """An array that is read slab by slab: NumPy, memory-mapped files, Zarr, Dask, HDF5, PyTorch."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Source = str | os.PathLike[str] | bytes | bytearray | memoryview | ArrayLike


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

    content: bytes | bytearray | memoryview
    name: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the content."""
        return memoryview(self.content).nbytes

    def read_blocks(self) -> Iterator[memoryview]:
        """Return views of the content."""
        yield from _split(memoryview(self.content).cast("B"))


class ArrayBody:
    """An array as an uncompressed TIFF, whose pixels are the memory of the array.

    Arrays that are not contiguous, have another byte order or are computed on access are converted slab by slab.
    The axes are those that the array names, as arrays of xarray do, or YXS for color images, or ZYX for up to three
    dimensions. Raises TypeError for other objects and if a TIFF cannot store the dtype, and ValueError for an array
    without planes or voxels, of unknown size, or with masked voxels, which may be found while the array is sent.
    """

    name = ""

    def __init__(self, array: ArrayLike) -> None:
        if not hasattr(array, "shape"):
            raise TypeError(
                f"A stack is the path of a file, the content of a file, or an array, not {type(array).__name__}."
                " Convert a list with numpy.asarray(), and pass the path of an open file."
            )
        if any(map(math.isnan, array.shape)):
            raise ValueError(f"The array has the unknown shape {array.shape}. Call array.compute_chunk_sizes() first.")
        shape = tuple(map(int, array.shape))
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"A stack needs at least two dimensions and one voxel, but its shape is {shape}.")
        _check_mask(array)
        # Arrays of other libraries, such as PyTorch, have dtypes that NumPy does not know.
        dtype = np.asarray(array[(slice(0, 1),) * len(shape)]).dtype
        if dtype.kind not in _DTYPE_KINDS or dtype.itemsize > MAX_ITEM_BYTES:
            raise TypeError(
                f"A stack consists of integers or floats of up to 64 bits, but this array has the dtype {dtype}."
            )
        self._array, self._shape = array, shape
        # TIFF stores booleans as bits.
        self._dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("<")
        self._head, self._tail = _make_tiff_frame(shape, self._dtype, _find_axes(array, shape))

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
    """Return the request body for a path, the bytes of a file, or an array. Raises the errors of `ArrayBody`.

    A folder of OME-Zarr is sent as a zip archive. Raises IsADirectoryError for other folders, and ValueError for pipes
    and devices.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return BytesBody(source)
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if is_zarr(path):
            return _make_archive(path)
        if path.is_dir():
            raise IsADirectoryError(
                f"{path} is a folder, but not an OME-Zarr. Use segment_folder() for a folder of stacks, or name a"
                " folder on the host of the server with input=."
            )
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a pipe or a device, not a file. Read it, and pass its content as bytes.")
        return FileBody(path, path.stat().st_size)
    return ArrayBody(source)


def is_zarr(path: Path) -> bool:
    """Return whether a path is a folder of Zarr."""
    return any((path / name).is_file() for name in _ZARR_FILES)


def find_file(source: Source | None) -> Path | None:
    """Return the file or folder of a stack: that of a path or a memory-mapped array; None for other stacks."""
    name = source if isinstance(source, str | os.PathLike) else getattr(source, "filename", None)
    return Path(name).expanduser() if isinstance(name, str | os.PathLike) else None


def _make_archive(folder: Path) -> ZipBody:
    """Return an archive of the files in a folder. They are not copied, and must not change."""
    paths = _list_files(folder, frozenset())
    members = {path.relative_to(folder).as_posix(): FileBody(path, path.stat().st_size) for path in paths}
    return ZipBody(f"{folder.resolve().name}.zip", members)


def _list_files(folder: Path, outer_folders: frozenset[Path]) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, also in folders to which symbolic links point.

    Raises FileNotFoundError for a broken link, whose chunk would be empty, and ValueError for a folder in itself.
    """
    resolved = folder.resolve()
    if resolved in outer_folders:
        raise ValueError(f"{folder} is a link to a folder that contains it. Delete the link.")
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _list_files(path, outer_folders | {resolved})
        elif path.is_file():
            yield path
        elif path.is_symlink():
            raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which does not exist.")


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
            # Dask arrays lose their masks if NumPy converts them.
            slab = slab.compute() if hasattr(slab, "compute") else slab
            _check_mask(slab)
            slab = np.asarray(slab)
            _check_slab(slab, (min(step, shape[axis] - start), *shape[axis + 1 :]), np.dtype(dtype))
            yield np.ascontiguousarray(slab, dtype=dtype)


def _check_mask(array: Any) -> None:
    if np.ma.is_masked(array):
        raise ValueError("A TIFF cannot store a mask. Replace the masked voxels, for example with array.filled(0).")


def _check_slab(slab: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse a part that a lazy array computed with another shape or dtype, whose values would be wrong in the TIFF."""
    if slab.shape != shape:
        raise ValueError(f"A part of the array has the shape {slab.shape} instead of {shape}. Check its chunks.")
    if not np.can_cast(slab.dtype, dtype, "safe"):
        raise ValueError(
            f"A part of the array has the dtype {slab.dtype}, which does not fit in the dtype {dtype} of its first"
            " voxel. Convert the array with astype()."
        )


def _find_axes(array: ArrayLike, shape: tuple[int, ...]) -> str:
    """Return the axes that an array names, or else those that its shape suggests, or else "".

    Axes with unknown or repeated names become `Q`, unless no name is that of time, depth, height or width.
    """
    letters = [_AXES_BY_NAME.get(name.lower(), _UNKNOWN_AXIS) for name in _list_axis_names(array)]
    if len(letters) == len(shape) and not set("TZYX").isdisjoint(letters):
        return "".join(_UNKNOWN_AXIS if letter in letters[:index] else letter for index, letter in enumerate(letters))
    if len(shape) == 3 and shape[2] in COLOR_COUNTS and min(shape[:2]) >= MIN_COLOR_IMAGE_LENGTH:
        return "YXS"
    return "ZYX"[-len(shape) :] if len(shape) <= 3 else ""


def _list_axis_names(array: Any) -> list[str]:
    """Return the names that an array of xarray, HDF5, netCDF or Zarr has for its dimensions. Empty if it has none."""
    get_attribute = getattr(getattr(array, "attrs", None), "get", None)
    for names in (
        getattr(array, "dims", None),
        getattr(array, "dimensions", None),
        getattr(getattr(array, "metadata", None), "dimension_names", None),
        # Zarr before version 3, as xarray writes it.
        get_attribute and get_attribute("_ARRAY_DIMENSIONS"),
    ):
        if isinstance(names, Iterable) and not isinstance(names, str):
            # The dimensions of HDF5 are objects with a label, which is empty by default.
            return [str(getattr(name, "label", name)) for name in names]
    return []


def _make_tiff_frame(shape: tuple[int, ...], dtype: np.dtype[Any], axes: str) -> tuple[bytes, bytes]:
    """Return the bytes of an uncompressed BigTIFF before and after its pixels.

    The TIFF has one page for the last two dimensions, which is one strip. The description of the first page has the
    shape and, if they are known, the axes in the format of tifffile.
    """
    *leading, height, width = shape
    count, page_bytes = math.prod(leading), height * width * dtype.itemsize
    start = _HEADER_BYTES + count * page_bytes + count * page_bytes % 2
    metadata = {"shape": shape} | ({"axes": axes} if axes else {})
    description = json.dumps(metadata).encode() + b"\0"
    sample_format = "uif".index(dtype.kind) + 1
    tags = [
        (256, _LONG, 1, width),
        (257, _LONG, 1, height),
        (258, _SHORT, 1, 8 * dtype.itemsize),
        (259, _SHORT, 1, 1),  # no compression
        (262, _SHORT, 1, 1),  # 0 is black
        (270, _ASCII, len(description), start),
        (273, _LONG8, 1, _HEADER_BYTES),
        (277, _SHORT, 1, 1),  # samples per pixel
        (278, _LONG, 1, height),  # rows per strip
        (279, _LONG8, 1, page_bytes),
        (339, _SHORT, 1, sample_format),
    ]
    first_start = start + len(description) + len(description) % 2
    first = _make_directories(tags, 1)
    others = _make_directories([tag for tag in tags if tag[0] != 270], count - 1)
    others_start = first_start + first.nbytes
    # The tag 273 of each page.
    others["tags"]["value"][:, 5] += page_bytes * np.arange(1, count, dtype=np.uint64)
    others["next"] = others_start + others.itemsize * np.arange(1, count)
    # The last directory has no successor.
    first["next"], others["next"][-1:] = others_start if count > 1 else 0, 0
    header = struct.pack("<2sHHHQ", b"II", 43, 8, 0, first_start)
    parts = bytes(start - _HEADER_BYTES - count * page_bytes), description.ljust(first_start - start, b"\0")
    return header, b"".join([*parts, first.tobytes(), others.tobytes()])


def _make_directories(tags: list[tuple[int, int, int, int]], count: int) -> NDArray[np.void]:
    """Return the directories of pages with the same tags, each of which has a number, type, length and value."""
    tag_dtype = np.dtype([("number", "<u2"), ("type", "<u2"), ("length", "<u8"), ("value", "<u8")])
    directories = np.zeros(count, [("count", "<u8"), ("tags", tag_dtype, len(tags)), ("next", "<u8")])
    directories["count"], directories["tags"] = len(tags), np.array(tags, tag_dtype)
    return directories
