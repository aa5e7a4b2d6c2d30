"""Validate the header and the chain of image file directories (IFDs) of a TIFF before anything else is read.

Common TIFF readers treat a chain that points beyond the end of the file as complete, and therefore read only a part of
the stack without an error. They also assume that all pages have the layout of the first one. Both cases are detected
here. The file layout is that of TIFF revision 6.0 (1992) and BigTIFF (libtiff).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from service.core.errors import BadFile, TooLarge, UnsupportedMedia
from service.formats.tiff import unsupported_formats

MAX_PAGES = 2**18
MAX_TAGS = 4096
# Maximum number of different layouts of pages. Only pages of the same layout share parsed tags.
MAX_LAYOUTS = 2**10
# Maximum number of strips and tiles in all pages. Directories can share lists of strips, so that a small file declares
# more strips than its size suggests.
MAX_SEGMENTS = 2**24

# Tags that define how a page is decoded: size, bits, compression, color, order, strips, tiles, sample format.
_LAYOUT_TAGS = frozenset(
    (254, 256, 257, 258, 259, 262, 266, 277, 278, 284, 317, 322, 323, 338, 339, 32996, 32997, 32998)
)
_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_MAX_LAYOUT_VALUE_BYTES = 1024
# Tags that list the offsets of strips and of tiles.
_OFFSET_TAGS = frozenset((273, 324))
# Tags that list the byte counts of strips and of tiles, and the `struct` codes of the types that they can have.
_BYTE_COUNT_TAGS = frozenset((279, 325))
_UNSIGNED_CODES = {3: "H", 4: "I", 16: "Q"}
# `struct` codes of the fields of `DirectoryFormat` by the version in the header: classic TIFF and BigTIFF.
_DIRECTORY_FORMATS = {42: ("H", "HHI4s", "I"), 43: ("Q", "HHQ8s", "Q")}


@dataclass(frozen=True)
class Structure:
    """Offsets and layouts of the pages of a file.

    size     size of the file in bytes
    offsets  offsets of the page directories in bytes, in the order of the chain
    layouts  layout key of each page by the offset of its directory; pages with the same key are decoded in the same way
    byte_counts  stored size in bytes of each page with a single strip or tile by the offset of its directory
    """

    size: int
    offsets: tuple[int, ...]
    layouts: dict[int, bytes]
    byte_counts: dict[int, int]


@dataclass(frozen=True)
class DirectoryFormat:
    """Binary format of a page directory: entry count, entries (tag, type, count, value), and the next offset."""

    count: struct.Struct
    entry: struct.Struct
    offset: struct.Struct


def scan(stream: BinaryIO, max_pages: int = MAX_PAGES) -> Structure:
    """Follow the chain of page directories of a classic TIFF or BigTIFF in either byte order.

    Raises UnsupportedMedia if the file is not a TIFF, BadFile if the chain points outside the file or contains a loop,
    and TooLarge if there are more than `max_pages` pages, or too many layouts, strips or tiles.
    """
    size = stream.seek(0, os.SEEK_END)
    directory_format, offset = _read_header(stream)
    offsets: list[int] = []
    layouts: dict[int, bytes] = {}
    byte_counts: dict[int, int] = {}
    distinct_layouts: set[bytes] = set()
    segment_count = 0
    directories = _DirectoryReader(stream, directory_format, size)
    while offset:
        if offset in layouts:
            raise BadFile(
                "The file is damaged: its list of pages contains a loop. Save the file again with another program."
            )
        if len(offsets) == max_pages:
            raise TooLarge(f"The file has more than {max_pages} pages. Split it into smaller files.")
        pattern, byte_count, next_offset = directories.read(offset, len(offsets))
        if byte_count is not None:
            byte_counts[offset] = byte_count
        layouts[offset] = pattern.layout
        distinct_layouts.add(pattern.layout)
        segment_count += pattern.segment_count
        if len(distinct_layouts) > MAX_LAYOUTS:
            raise TooLarge(f"The pages of the file have more than {MAX_LAYOUTS} different layouts. Export it again.")
        if segment_count > MAX_SEGMENTS:
            raise TooLarge(f"The file has more than {MAX_SEGMENTS} strips or tiles. Save it with larger ones.")
        offsets.append(offset)
        offset = next_offset
    if not offsets:
        raise BadFile("The file is a TIFF without pages. Export the file again.")
    return Structure(size, tuple(offsets), layouts, byte_counts)


def _read_header(stream: BinaryIO) -> tuple[DirectoryFormat, int]:
    """Return the directory format and the offset of the first directory. Raises UnsupportedMedia, BadFile."""
    stream.seek(0)
    header = stream.read(16)
    byte_order = {b"II": "<", b"MM": ">"}.get(header[:2])
    version = struct.unpack(f"{byte_order}H", header[2:4])[0] if byte_order and len(header) >= 4 else None
    if version in _DIRECTORY_FORMATS:
        directory_format = DirectoryFormat(
            *(struct.Struct(f"{byte_order}{code}") for code in _DIRECTORY_FORMATS[version])
        )
        offset_bytes = directory_format.offset.size
        if len(header) >= 2 * offset_bytes:
            return directory_format, directory_format.offset.unpack_from(header, offset_bytes)[0]
        raise BadFile(
            f"The file is truncated: it contains only a part of a TIFF header ({len(header)} bytes). Copy the file"
            " again."
        )
    raise UnsupportedMedia(
        unsupported_formats.describe_file(header + stream.read(unsupported_formats.HEAD_BYTES - len(header)))
    )


class _DirectoryPattern(NamedTuple):
    """Bits of a page directory that define the layout of the page, for comparison with other directories.

    length           length of the directory in bytes
    mask             little-endian number that selects the bits that define the layout and the lengths of values
    bits             the selected bits of the directory
    layout           layout key of the page in `Structure.layouts`
    segment_count    number of strips and tiles
    byte_count       `struct` code and position in the directory of the byte count of a single strip or tile, or None
    external_values  (tag, position of the offset in the directory, size in bytes) of each value outside the directory
    """

    length: int
    mask: int
    bits: int
    layout: bytes
    segment_count: int
    byte_count: tuple[str, int] | None
    external_values: tuple[tuple[int, int, int], ...]

    def matches(self, directory: bytes) -> bool:
        """Return whether another directory has the same layout, and values of the same sizes at the same positions."""
        return len(directory) == self.length and int.from_bytes(directory, "little") & self.mask == self.bits


class _DirectoryReader:
    """Reader of the page directories of one file of `size` bytes.

    The directories of a stack usually differ only in offsets. A directory that matches the pattern of the previous one
    is not parsed again.
    """

    def __init__(self, stream: BinaryIO, directory_format: DirectoryFormat, size: int) -> None:
        self._stream, self._format, self._size = stream, directory_format, size
        self._last_pattern: _DirectoryPattern | None = None

    def read(self, offset: int, page_index: int) -> tuple[_DirectoryPattern, int | None, int]:
        """Return the pattern of one page, the byte count of its only strip or tile, and the offset of the next page.

        The byte count is None if there are several strips or tiles, and the offset is 0 after the last page.
        """
        pattern = self._last_pattern
        directory = b"" if pattern is None else self._read_bytes(offset, pattern.length)
        if pattern is None or not pattern.matches(directory):
            directory = self._read_directory(offset, page_index)
            pattern = self._last_pattern = self._parse(directory, page_index)
        else:
            for tag, position, length in pattern.external_values:
                self._check_value_inside_file(directory, position, length, tag, page_index)
        byte_count = (
            None
            if pattern.byte_count is None
            else struct.unpack_from(pattern.byte_count[0], directory, pattern.byte_count[1])[0]
        )
        next_offset = self._format.offset.unpack_from(directory, len(directory) - self._format.offset.size)[0]
        return pattern, byte_count, next_offset

    def _read_bytes(self, offset: int, length: int) -> bytes:
        """Read `length` bytes, or fewer at the end of the file."""
        if offset >= self._size:
            return b""
        self._stream.seek(offset)
        return self._stream.read(length)

    def _read_directory(self, offset: int, page_index: int) -> bytes:
        """Read the entry count, the entries, and the offset of the next directory."""
        directory_format = self._format
        directory = self._read_bytes(offset, directory_format.count.size)
        count = directory_format.count.unpack(directory)[0] if len(directory) == directory_format.count.size else 0
        if count > MAX_TAGS:
            raise BadFile(
                f"The file is damaged: page {page_index} declares {count} tags, but at most {MAX_TAGS} are"
                " accepted. Export the file again."
            )
        length = directory_format.count.size + count * directory_format.entry.size + directory_format.offset.size
        directory = self._read_bytes(offset, length)
        if len(directory) < length:
            raise BadFile(
                f"The file is truncated or damaged: the tags of page {page_index}, at byte {offset}, are outside"
                f" the file of {self._size} bytes. Copy or export the file again."
            )
        return directory

    def _parse(self, directory: bytes, page_index: int) -> _DirectoryPattern:
        """Parse a directory, one entry at a time."""
        entry, offset_bytes, entries_start = (
            self._format.entry,
            self._format.offset.size,
            self._format.count.size,
        )
        layout, external_values, mask_bytes = [], [], bytearray(b"\xff" * entries_start)
        segment_count, byte_count = 0, None
        byte_order = self._format.count.format[0]
        for start in range(entries_start, len(directory) - offset_bytes, entry.size):
            tag, type_code, value_count, value = entry.unpack_from(directory, start)
            value_position, value_bytes = start + entry.size - offset_bytes, value_count * _TYPE_SIZES.get(type_code, 0)
            if value_bytes > offset_bytes:
                self._check_value_inside_file(directory, value_position, value_bytes, tag, page_index)
                external_values.append((tag, value_position, value_bytes))
            segment_count += value_count * (tag in _OFFSET_TAGS)
            if tag in _BYTE_COUNT_TAGS and value_count == 1 and type_code in _UNSIGNED_CODES:
                byte_count = byte_order + _UNSIGNED_CODES[type_code], value_position
            defines_layout = tag in _LAYOUT_TAGS
            mask_bytes += b"\xff" * (entry.size - offset_bytes) + (b"\xff" if defines_layout else b"\0") * offset_bytes
            if defines_layout:
                if offset_bytes < value_bytes <= _MAX_LAYOUT_VALUE_BYTES:
                    value = self._read_bytes(self._format.offset.unpack(value)[0], value_bytes)
                layout.append(struct.pack("=HHQ", tag, type_code, value_count) + value)
        mask = int.from_bytes(mask_bytes, "little")
        return _DirectoryPattern(
            len(directory),
            mask,
            int.from_bytes(directory, "little") & mask,
            b"".join(sorted(layout)),
            segment_count,
            byte_count,
            tuple(external_values),
        )

    def _check_value_inside_file(self, directory: bytes, position: int, length: int, tag: int, page_index: int) -> None:
        if self._format.offset.unpack_from(directory, position)[0] + length > self._size:
            raise BadFile(
                f"The file is truncated: the value of tag {tag} of page {page_index} is beyond the end of the file."
                " Copy the file again."
            )
