"""Segments of Zeiss CZI files: the directory of subblocks, the metadata, and the tiles of pixels in subblocks.

Format: ZISRAW (CZI) File Format, and its open-source implementation libCZI, https://github.com/ZEISS/libczi
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import imagecodecs
import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.types import Array

MAX_SUBBLOCKS = 2**20
MAX_METADATA_BYTES = 2**25

# Dtype and number of samples of each supported pixel type. Samples are stored in the order blue, green, red, alpha.
_PIXEL_TYPES = {
    0: ("<u1", 1),
    1: ("<u2", 1),
    2: ("<f4", 1),
    3: ("<u1", 3),
    4: ("<u2", 3),
    8: ("<f4", 3),
    9: ("<u1", 4),
}
_JPEG = 1
_JPEG_XR = 4
# Compressions that can change pixel values.
LOSSY_COMPRESSIONS = {_JPEG: "JPEG", _JPEG_XR: "JPEG XR"}
_ZSTD1 = 6
_SEGMENT_HEADER = struct.Struct("<16sqq")
# Position of the directory and of the metadata in the file, after versions, GUIDs and the number of the file part.
_FILE_HEADER = struct.Struct("<48x i qq")
_DIRECTORY_HEADER = struct.Struct("<i 124x")
_METADATA_HEADER = struct.Struct("<i 252x")
_SUBBLOCK_HEADER = struct.Struct("<i i q")
# The fixed part of a subblock, which includes its directory entry, has at least this size.
_MIN_SUBBLOCK_HEADER_BYTES = 256
_ENTRY = np.dtype(
    [
        ("schema", "S2"),
        ("pixel_type", "<i4"),
        ("position", "<i8"),
        ("file_part", "<i4"),
        ("compression", "<i4"),
        ("reserved", "V6"),
        ("num_dimensions", "<i4"),
    ]
)
_DIMENSION = np.dtype(
    [("axis", "S4"), ("start", "<i4"), ("size", "<i4"), ("coordinate", "<f4"), ("stored_size", "<i4")]
)


@dataclass(frozen=True)
class Directory:
    """Subblocks of a file.

    pixel_types, positions  pixel type and offset in the file of each subblock, arrays [n]
    compressions            compression of each subblock, array [n]
    starts, sizes           first index and number of indices of each subblock along each axis, arrays [n] by axis
    stored_sizes            like `sizes`, but the number of stored pixels; smaller for a downsampled subblock
    """

    pixel_types: Array
    positions: Array
    compressions: Array
    starts: dict[str, Array]
    sizes: dict[str, Array]
    stored_sizes: dict[str, Array]

    def select(self, selection: Array) -> Directory:
        """Return the subblocks at some indices, or those for which an array of booleans is true."""
        return Directory(
            self.pixel_types[selection],
            self.positions[selection],
            self.compressions[selection],
            *(
                {axis: values[selection] for axis, values in columns.items()}
                for columns in (self.starts, self.sizes, self.stored_sizes)
            ),
        )

    def find_lossy_compression(self) -> str:
        """Return the name of a compression that can change pixel values, or "" if no subblock has one."""
        return next((name for code, name in LOSSY_COMPRESSIONS.items() if (self.compressions == code).any()), "")

    def get_start(self, axis: str) -> Array:
        """Return the first index of each subblock along an axis, or zeros if the file does not have the axis."""
        return self.starts.get(axis, np.zeros(len(self.positions), np.int64))

    def get_range(self, axis: str) -> tuple[int, int]:
        """Return the first index of all subblocks along an axis, and the index after the last one."""
        if axis not in self.starts:
            return 0, 1
        return int(self.starts[axis].min()), int((self.starts[axis] + self.sizes[axis]).max())


class SegmentReader:
    """Reads the segments of an open file, which must stay open. No segment extends beyond the end of the file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._file_bytes = stream.seek(0, os.SEEK_END)
        file_part, self._directory_position, self._metadata_position = _FILE_HEADER.unpack(
            self.read(_SEGMENT_HEADER.size, _FILE_HEADER.size)
        )
        if file_part:
            raise BadFile("The file is one of several files of an image. Save the image as one CZI file in ZEN.")

    def read(self, start: int, size: int) -> bytes:
        """Read a range of the file. Raises BadFile if the file ends before the end of the range."""
        if not 0 <= start <= start + size <= self._file_bytes or size < 0:
            raise BadFile(
                f"The file is truncated or damaged: it has {self._file_bytes} bytes, and {size} bytes at {start} are"
                " missing. Copy or export the file again."
            )
        self._stream.seek(start)
        return self._stream.read(size)

    def _open_segment(self, start: int, name: bytes) -> tuple[int, int]:
        """Return the offset and the size of the content of a segment. Raises BadFile for another kind of segment."""
        found, allocated_bytes, used_bytes = _SEGMENT_HEADER.unpack(self.read(start, _SEGMENT_HEADER.size))
        if found.rstrip(b"\0") != name:
            raise BadFile(f"The file is damaged: it has no {name.decode()} at {start}. Copy or export the file again.")
        return start + _SEGMENT_HEADER.size, used_bytes or allocated_bytes

    def read_metadata(self) -> bytes:
        """Return the metadata as XML, or b"" if there is none. Raises BadFile, TooLarge."""
        if not self._metadata_position:
            return b""
        start, _ = self._open_segment(self._metadata_position, b"ZISRAWMETADATA")
        (size,) = _METADATA_HEADER.unpack(self.read(start, _METADATA_HEADER.size))
        if size > MAX_METADATA_BYTES:
            raise TooLarge(f"The metadata of the file has {size} bytes. At most {MAX_METADATA_BYTES} are supported.")
        return self.read(start + _METADATA_HEADER.size, size)

    def read_directory(self) -> Directory:
        """Return all subblocks. Raises BadFile, TooLarge."""
        if not self._directory_position:
            raise BadFile("The file has no directory of its pixels: it was not saved completely. Save it again in ZEN.")
        start, size = self._open_segment(self._directory_position, b"ZISRAWDIRECTORY")
        (count,) = _DIRECTORY_HEADER.unpack(self.read(start, _DIRECTORY_HEADER.size))
        if count > MAX_SUBBLOCKS:
            raise TooLarge(f"The file has {count} subblocks. At most {MAX_SUBBLOCKS} are supported.")
        content = self.read(start + _DIRECTORY_HEADER.size, size - _DIRECTORY_HEADER.size)
        # Entries have different sizes, but only a few of them.
        entries_by_dimensions = dict[int, list[bytes]]()
        offset = 0
        for _ in range(count):
            num_dimensions = struct.unpack_from("<i", content, offset + _ENTRY.itemsize - 4)[0]
            end = offset + _ENTRY.itemsize + num_dimensions * _DIMENSION.itemsize
            if content[offset : offset + 2] != b"DV" or not 1 <= num_dimensions <= 64 or end > len(content):
                raise BadFile("The directory of the subblocks is damaged. Copy or export the file again.")
            entries_by_dimensions.setdefault(num_dimensions, []).append(content[offset:end])
            offset = end
        tables = [
            np.frombuffer(b"".join(entries), [("entry", _ENTRY), ("dimensions", _DIMENSION, (num_dimensions,))])
            for num_dimensions, entries in entries_by_dimensions.items()
        ]
        return _combine_tables(tables)

    def read_tile(self, position: int, pixel_type: int, height: int, width: int) -> Array:
        """Return the pixels [Y, X, S] of the subblock at a position. The samples are red, green, blue and alpha.

        Raises BadFile if the pixels are damaged or do not have the expected size.
        """
        start, _ = self._open_segment(position, b"ZISRAWSUBBLOCK")
        metadata_bytes, _, data_bytes = _SUBBLOCK_HEADER.unpack(self.read(start, _SUBBLOCK_HEADER.size))
        entry = np.frombuffer(self.read(start + _SUBBLOCK_HEADER.size, _ENTRY.itemsize), _ENTRY)[0]
        if entry["pixel_type"] != pixel_type or metadata_bytes < 0:
            raise BadFile("A subblock contradicts the directory of the file. Copy or export the file again.")
        entry_bytes = _ENTRY.itemsize + max(0, int(entry["num_dimensions"])) * _DIMENSION.itemsize
        header_bytes = max(_MIN_SUBBLOCK_HEADER_BYTES, _SUBBLOCK_HEADER.size + entry_bytes)
        data = self.read(start + header_bytes + metadata_bytes, data_bytes)
        dtype, num_samples = get_pixel_format(pixel_type)
        return _decode_tile(data, int(entry["compression"]), dtype, (height, width, num_samples))


def get_pixel_format(pixel_type: int) -> tuple[np.dtype[Any], int]:
    """Return the dtype and the number of samples of a pixel type. Raises BadFile if it is not supported."""
    if pixel_type not in _PIXEL_TYPES:
        raise BadFile(f"The pixel type {pixel_type} of the CZI file is not supported. Export it as an OME-TIFF.")
    dtype, num_samples = _PIXEL_TYPES[pixel_type]
    return np.dtype(dtype), num_samples


def _combine_tables(tables: Sequence[Array]) -> Directory:
    """Combine the entries with different numbers of dimensions."""
    columns = _combine_columns(tables)
    entries = np.concatenate([table["entry"] for table in tables]) if tables else np.empty(0, _ENTRY)
    if entries["file_part"].any():
        raise BadFile("The image is stored in several files. Save it as one CZI file in ZEN.")
    sizes = columns["size"]
    stored_sizes = {axis: np.where(stored == 0, sizes[axis], stored) for axis, stored in columns["stored_size"].items()}
    if any((size < 1).any() for size in sizes.values()):
        raise BadFile("The directory of the subblocks is damaged: a subblock is empty. Copy or export the file again.")
    pixel_types, positions, compressions = (entries[name] for name in ("pixel_type", "position", "compression"))
    return Directory(pixel_types, positions, compressions, columns["start"], sizes, stored_sizes)


def _combine_columns(tables: Sequence[Array]) -> dict[str, dict[str, Array]]:
    """Return the start, size and stored size of all entries by axis. Axes that an entry lacks have the size 1."""
    count = sum(map(len, tables))
    columns = dict[str, dict[str, Array]](start={}, size={}, stored_size={})
    offsets = itertools.accumulate(map(len, tables), initial=0)
    for table, offset in zip(tables, offsets, strict=False):
        for dimension in table["dimensions"].T:
            for name in np.unique(dimension["axis"]):
                rows = np.flatnonzero(dimension["axis"] == name)
                for column, values in columns.items():
                    default = np.full(count, column != "start", np.int64)
                    values.setdefault(name.decode("ascii", "replace"), default)[rows + offset] = dimension[column][rows]
    return columns


def _decode_tile(data: bytes, compression: int, dtype: np.dtype[Any], shape: tuple[int, int, int]) -> Array:
    if compression in LOSSY_COMPRESSIONS:
        if compression == _JPEG and shape[2] > 1:
            raise BadFile("Color images with JPEG compression are not supported. Export the image as an OME-TIFF.")
        decode = imagecodecs.jpeg8_decode if compression == _JPEG else imagecodecs.jpegxr_decode
        tile: Array = np.empty(shape if shape[2] > 1 else shape[:2], dtype)
        # The decoders refuse images of other sizes, and return red, green and blue.
        return np.asarray(decode(data, out=tile)).reshape(shape)
    nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
    content = _decompress(data, compression, nbytes)
    if len(content) < nbytes:
        raise BadFile(f"A tile has {len(content)} bytes instead of {nbytes}. Copy or export the file again.")
    pixels = np.frombuffer(content, np.uint8, nbytes)
    if compression == _ZSTD1 and _has_split_bytes(data):
        pixels = np.ascontiguousarray(pixels.reshape(2, -1).T)
    return _reorder_samples(pixels.reshape(-1).view(dtype).reshape(shape))


def _decompress(data: bytes, compression: int, nbytes: int) -> bytes | bytearray:
    match compression:
        case 0:
            return data
        case 2:
            content: bytes | bytearray = imagecodecs.lzw_decode(data, out=bytearray(nbytes))
        case 5:
            content = imagecodecs.zstd_decode(data, out=bytearray(nbytes))
        case 6:
            # Data begins with a header, and its first byte is the size of the header.
            content = imagecodecs.zstd_decode(data[data[0] :], out=bytearray(nbytes))
        case _:
            raise BadFile(f"Compression {compression} of CZI is not supported. Export the image as an OME-TIFF.")
    return content


def _has_split_bytes(data: bytes) -> bool:
    """Return whether the low bytes of all 16-bit pixels are stored before the high bytes.

    The header in front of data with the compression `zstd1` has one byte with its size, or three bytes: its size, the
    kind of the next part, and flags.
    """
    if data[0] == 1:
        return False
    if data[0] != 3 or data[1] != 1:
        raise BadFile("The header of a compressed tile is not supported. Export the image as an OME-TIFF.")
    return bool(data[2] & 1)


def _reorder_samples(tile: Array) -> Array:
    """Reorder samples from blue, green, red, alpha to red, green, blue, alpha."""
    return tile[..., [2, 1, 0, 3][: tile.shape[2]]] if tile.shape[2] > 1 else tile
