"""The skeleton of a TIFF file, walked before anything else is believed: header and chain of page directories.

TIFF readers take a chain that leaves the file for its end, and so read half a stack as a whole one; and they take
every page for a copy of the first. Here both are looked at. Layout: TIFF revision 6.0 (1992) and BigTIFF (libtiff).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from service.core.errors import BadFile, TooLarge, UnsupportedMedia

MAX_PAGES = 1_000_000
MAX_TAGS = 4096

# What decides how the bytes of a page become pixels: size, bits, compression, colour, order, strips, tiles, format.
_LAYOUT_TAGS = frozenset(
    (254, 256, 257, 258, 259, 262, 266, 277, 278, 284, 317, 322, 323, 338, 339, 32996, 32997, 32998)
)
_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_LONGEST_VALUE = 1024


@dataclass(frozen=True)
class Structure:
    """Where the pages are and which are alike.

    size     of the file in bytes
    offsets  of the page directories, in the order of the chain
    layouts  directory offset -> everything that decides how that page is decoded; equal for interchangeable pages
    """

    size: int
    offsets: tuple[int, ...]
    layouts: dict[int, bytes]


@dataclass(frozen=True)
class Flavour:
    """How a page directory is packed: number of entries, then tag, type, count, value each, then the next offset."""

    count: struct.Struct
    entry: struct.Struct
    offset: struct.Struct


def scan(stream: BinaryIO, max_pages: int = MAX_PAGES) -> Structure:
    """Walk the chain of page directories of a classic or Big TIFF, of either byte order.

    Raises UnsupportedMedia where the file is no TIFF, BadFile where the chain leaves the file or bites its tail, and
    TooLarge for more than `max_pages` pages.
    """
    size = stream.seek(0, os.SEEK_END)
    flavour, offset = header(stream)
    offsets: list[int] = []
    layouts: dict[int, bytes] = {}
    directories = _Directories(stream, flavour, size)
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


def header(stream: BinaryIO) -> tuple[Flavour, int]:
    """Byte order and offset width of a TIFF, and where its first directory is; raises as `scan` does."""
    stream.seek(0)
    header = stream.read(16)
    order = {b"II": "<", b"MM": ">"}.get(header[:2])
    version = struct.unpack(f"{order}H", header[2:4])[0] if order and len(header) >= 4 else None
    if version == 42 and len(header) >= 8:
        flavour = Flavour(struct.Struct(f"{order}H"), struct.Struct(f"{order}HHI4s"), struct.Struct(f"{order}I"))
        return flavour, flavour.offset.unpack(header[4:8])[0]
    if version == 43 and len(header) == 16:
        flavour = Flavour(struct.Struct(f"{order}Q"), struct.Struct(f"{order}HHQ8s"), struct.Struct(f"{order}Q"))
        return flavour, flavour.offset.unpack(header[8:16])[0]
    if version in {42, 43}:
        raise BadFile(f"The file is cut short: a TIFF header and nothing else, {len(header)} bytes.")
    what = "is empty" if not header else f"begins with {header[:4]!r}, which no TIFF does"
    raise UnsupportedMedia(f"The file {what}. Send a TIFF: ImageJ, OME-TIFF, BigTIFF or plain pages.")


class _Pattern(NamedTuple):
    """What decides in a page directory, and what has to be looked at nevertheless in another one that has it too.

    length  of the directory in bytes
    mask    those bits of it, as one number, that decide about the layout, and about how long values are
    bits    the directory under that mask
    layout  of the page
    far     tags whose values lie elsewhere, where in the directory it says where, and how many bytes they have
    """

    length: int
    mask: int
    bits: int
    layout: bytes
    far: tuple[tuple[int, int, int], ...]

    def fits(self, data: bytes) -> bool:
        """Whether another directory has the same layout, and values of the same lengths in the same places."""
        return len(data) == self.length and int.from_bytes(data, "little") & self.mask == self.bits


class _Directories:
    """Reads the page directories of one file of `size` bytes.

    Pages of a stack have directories that differ in places alone, so that only the first is looked at entry by entry.
    """

    def __init__(self, stream: BinaryIO, flavour: Flavour, size: int) -> None:
        self._stream, self._flavour, self._size = stream, flavour, size
        self._last: _Pattern | None = None

    def read(self, offset: int, index: int) -> tuple[bytes, int]:
        """Layout of one page, and the offset of the next directory (0 after the last)."""
        data = self._bytes(offset, index)
        pattern = self._last
        if pattern is not None and pattern.fits(data):
            for tag, place, length in pattern.far:
                self._check(data, place, length, tag, index)
        else:
            pattern = self._last = self._look(data, index)
        return pattern.layout, self._flavour.offset.unpack_from(data, len(data) - self._flavour.offset.size)[0]

    def _bytes(self, offset: int, index: int) -> bytes:
        """The entries, and behind them the offset of the next directory."""
        stream, flavour = self._stream, self._flavour
        cut = BadFile(
            f"The file is cut short or damaged: the directory of page {index}, at byte {offset}, is not within its"
            f" {self._size} bytes. Copy or export it again."
        )
        if offset + flavour.count.size > self._size:
            raise cut
        stream.seek(offset)
        count = flavour.count.unpack(stream.read(flavour.count.size))[0]
        if count > MAX_TAGS:
            raise BadFile(f"The directory of page {index} claims {count} entries: the file is damaged.")
        length = count * flavour.entry.size + flavour.offset.size
        data = stream.read(length)
        if len(data) < length:
            raise cut
        return data

    def _look(self, data: bytes, index: int) -> _Pattern:
        """Entry by entry."""
        entry, width = self._flavour.entry, self._flavour.offset.size
        parts, far, mask = [], [], bytearray()
        for start in range(0, len(data) - width, entry.size):
            tag, kind, number, value = entry.unpack_from(data, start)
            place, length = start + entry.size - width, number * _TYPE_SIZES.get(kind, 0)
            if length > width:
                self._check(data, place, length, tag, index)
                far.append((tag, place, length))
            decides = tag in _LAYOUT_TAGS
            mask += b"\xff" * (entry.size - width) + (b"\xff" if decides else b"\0") * width
            if decides:
                parts.append(
                    struct.pack("=HHQ", tag, kind, number) + _value(self._stream, self._flavour, value, length)
                )
        bits = int.from_bytes(mask, "little")
        return _Pattern(len(data), bits, int.from_bytes(data, "little") & bits, b"".join(sorted(parts)), tuple(far))

    def _check(self, data: bytes, place: int, length: int, tag: int, index: int) -> None:
        if self._flavour.offset.unpack_from(data, place)[0] + length > self._size:
            raise BadFile(f"The file is cut short: tag {tag} of page {index} lies beyond its end. Copy it again.")


def _value(stream: BinaryIO, flavour: Flavour, value: bytes, length: int) -> bytes:
    """The value itself, where the entry holds only its place."""
    if not len(value) < length <= _LONGEST_VALUE:
        return value
    stream.seek(flavour.offset.unpack(value)[0])
    return stream.read(length)
