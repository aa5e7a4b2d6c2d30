"""Header and chain of page directories (IFDs) of a TIFF, checked before anything else is read.

TIFF readers take a chain that leaves the file for a complete one, and so read half a stack as a whole; and they take
every page for a copy of the first. Both are checked here. Layout: TIFF revision 6.0 (1992) and BigTIFF (libtiff).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from service.core.errors import BadFile, TooLarge, UnsupportedMedia
from service.formats.tiff import foreign_formats

MAX_PAGES = 1_000_000
MAX_TAGS = 4096

# Tags that decide how a page is decoded: size, bits, compression, colour, order, strips, tiles, format.
_LAYOUT_TAGS = frozenset(
    (254, 256, 257, 258, 259, 262, 266, 277, 278, 284, 317, 322, 323, 338, 339, 32996, 32997, 32998)
)
_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_LONGEST_VALUE = 1024
# Codes of `struct` for the fields of `Packing`, by the version in the header: classic TIFF and BigTIFF.
_PACKINGS = {42: ("H", "HHI4s", "I"), 43: ("Q", "HHQ8s", "Q")}


@dataclass(frozen=True)
class Structure:
    """Pages of a file, and which of them are decoded alike.

    size     of the file in bytes
    offsets  of the page directories in bytes, in the order of the chain
    layouts  directory offset -> key of everything that decides how the page is decoded
    """

    size: int
    offsets: tuple[int, ...]
    layouts: dict[int, bytes]


@dataclass(frozen=True)
class Packing:
    """Binary form of a page directory: number of entries, then tag, type, count, value each, then the next offset."""

    count: struct.Struct
    entry: struct.Struct
    offset: struct.Struct


def scan(stream: BinaryIO, max_pages: int = MAX_PAGES) -> Structure:
    """Walk the chain of page directories of a classic or Big TIFF of either byte order.

    Raises UnsupportedMedia where the file is no TIFF, BadFile where the chain leaves the file or is a circle, and
    TooLarge for more than `max_pages` pages.
    """
    size = stream.seek(0, os.SEEK_END)
    packing, offset = _read_header(stream)
    offsets: list[int] = []
    layouts: dict[int, bytes] = {}
    directories = _DirectoryReader(stream, packing, size)
    while offset:
        if offset in layouts:
            raise BadFile("The file's chain of pages runs in a circle. Save it again with another program.")
        if len(offsets) == max_pages:
            raise TooLarge(f"The file has more than {max_pages} pages. Send a part of it.")
        layouts[offset], following = directories.read(offset, len(offsets))
        offsets.append(offset)
        offset = following
    if not offsets:
        raise BadFile("The file is a TIFF without a single page.")
    return Structure(size, tuple(offsets), layouts)


def _read_header(stream: BinaryIO) -> tuple[Packing, int]:
    """Return the packing of a TIFF's directories and the offset of the first. Raises UnsupportedMedia, BadFile."""
    stream.seek(0)
    header = stream.read(16)
    order = {b"II": "<", b"MM": ">"}.get(header[:2])
    version = struct.unpack(f"{order}H", header[2:4])[0] if order and len(header) >= 4 else None
    if version in _PACKINGS:
        packing = Packing(*(struct.Struct(f"{order}{code}") for code in _PACKINGS[version]))
        width = packing.offset.size
        if len(header) >= 2 * width:
            return packing, packing.offset.unpack_from(header, width)[0]
        raise BadFile(f"The file is cut short: a TIFF header and nothing else, {len(header)} bytes.")
    raise UnsupportedMedia(foreign_formats.explain(header + stream.read(foreign_formats.HEAD_BYTES - len(header))))


class _Pattern(NamedTuple):
    """The part of a page directory that decides about the page's layout, for comparison with other directories.

    length  of the directory in bytes
    mask    bits that decide about the layout and the lengths of values, as one little-endian number
    bits    the directory under that mask
    layout  key of the page in `Structure.layouts`
    far     (tag, position of the offset in the directory, bytes) of each value outside of the directory
    """

    length: int
    mask: int
    bits: int
    layout: bytes
    far: tuple[tuple[int, int, int], ...]

    def fits(self, data: bytes) -> bool:
        """Whether another directory has the same layout, and values of the same lengths in the same places."""
        return len(data) == self.length and int.from_bytes(data, "little") & self.mask == self.bits


class _DirectoryReader:
    """Reader of the page directories of one file of `size` bytes.

    Directories of a stack differ only in offsets, so one that fits the pattern of the last is not parsed again.
    """

    def __init__(self, stream: BinaryIO, packing: Packing, size: int) -> None:
        self._stream, self._packing, self._size = stream, packing, size
        self._last: _Pattern | None = None

    def read(self, offset: int, index: int) -> tuple[bytes, int]:
        """Return the layout of one page, and the offset of the next directory (0 after the last)."""
        pattern = self._last
        data = b"" if pattern is None else self._read_bytes(offset, pattern.length)
        if pattern is None or not pattern.fits(data):
            data = self._read_directory(offset, index)
            pattern = self._last = self._parse(data, index)
        else:
            for tag, position, length in pattern.far:
                self._check_inside(data, position, length, tag, index)
        return pattern.layout, self._packing.offset.unpack_from(data, len(data) - self._packing.offset.size)[0]

    def _read_bytes(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes, fewer at the end of the file."""
        if offset >= self._size:
            return b""
        self._stream.seek(offset)
        return self._stream.read(length)

    def _read_directory(self, offset: int, index: int) -> bytes:
        """Read the number of entries of a directory, the entries, and the offset of the next."""
        packing = self._packing
        data = self._read_bytes(offset, packing.count.size)
        count = packing.count.unpack(data)[0] if len(data) == packing.count.size else 0
        if count > MAX_TAGS:
            raise BadFile(f"The directory of page {index} claims {count} entries: the file is damaged.")
        length = packing.count.size + count * packing.entry.size + packing.offset.size
        data = self._read_bytes(offset, length)
        if len(data) < length:
            raise BadFile(
                f"The file is cut short or damaged: the directory of page {index}, at byte {offset}, is not within its"
                f" {self._size} bytes. Copy or export it again."
            )
        return data

    def _parse(self, data: bytes, index: int) -> _Pattern:
        """Parse a directory entry by entry."""
        entry, width, first = self._packing.entry, self._packing.offset.size, self._packing.count.size
        layout, far, mask = [], [], bytearray(b"\xff" * first)
        for start in range(first, len(data) - width, entry.size):
            tag, kind, number, value = entry.unpack_from(data, start)
            position, length = start + entry.size - width, number * _TYPE_SIZES.get(kind, 0)
            if length > width:
                self._check_inside(data, position, length, tag, index)
                far.append((tag, position, length))
            decides_layout = tag in _LAYOUT_TAGS
            mask += b"\xff" * (entry.size - width) + (b"\xff" if decides_layout else b"\0") * width
            if decides_layout:
                if width < length <= _LONGEST_VALUE:
                    value = self._read_bytes(self._packing.offset.unpack(value)[0], length)
                layout.append(struct.pack("=HHQ", tag, kind, number) + value)
        bits = int.from_bytes(mask, "little")
        return _Pattern(len(data), bits, int.from_bytes(data, "little") & bits, b"".join(sorted(layout)), tuple(far))

    def _check_inside(self, data: bytes, position: int, length: int, tag: int, index: int) -> None:
        if self._packing.offset.unpack_from(data, position)[0] + length > self._size:
            raise BadFile(f"The file is cut short: tag {tag} of page {index} lies beyond its end. Copy it again.")
