"""The skeleton of a TIFF file, walked before anything else is believed: header and chain of page directories.

TIFF readers take a chain that leaves the file for its end, and so read half a stack as a whole one; and they take
every page for a copy of the first. Here both are looked at. Layout: TIFF revision 6.0 (1992) and BigTIFF (libtiff).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

from service.errors import BadFile, TooLarge, UnsupportedMedia

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
    while offset:
        if offset in layouts:
            raise BadFile("The file's chain of pages runs in a circle. Save it again with another program.")
        if len(offsets) == max_pages:
            raise TooLarge(f"The file has more than {max_pages} pages. Send a part of it.")
        layouts[offset], following = _directory(stream, flavour, offset, len(offsets), size)
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


def _directory(stream: BinaryIO, flavour: Flavour, offset: int, index: int, size: int) -> tuple[bytes, int]:
    """Layout of one page, and the offset of the next directory (0 after the last)."""
    cut = BadFile(
        f"The file is cut short or damaged: the directory of page {index}, at byte {offset}, is not within its {size}"
        " bytes. Copy or export it again."
    )
    if offset + flavour.count.size > size:
        raise cut
    stream.seek(offset)
    count = flavour.count.unpack(stream.read(flavour.count.size))[0]
    if count > MAX_TAGS:
        raise BadFile(f"The directory of page {index} claims {count} entries: the file is damaged.")
    length = count * flavour.entry.size
    data = stream.read(length + flavour.offset.size)
    if len(data) < length + flavour.offset.size:
        raise cut
    parts = []
    for tag, kind, number, value in flavour.entry.iter_unpack(data[:length]):
        long = number * _TYPE_SIZES.get(kind, 0)
        if long > len(value) and flavour.offset.unpack(value)[0] + long > size:
            raise BadFile(f"The file is cut short: tag {tag} of page {index} lies beyond its end. Copy it again.")
        if tag in _LAYOUT_TAGS:
            parts.append(struct.pack("=HHQ", tag, kind, number) + _value(stream, flavour, value, long))
    return b"".join(sorted(parts)), flavour.offset.unpack(data[length:])[0]


def _value(stream: BinaryIO, flavour: Flavour, value: bytes, length: int) -> bytes:
    """The value itself, where the entry holds only its place."""
    if not len(value) < length <= _LONGEST_VALUE:
        return value
    stream.seek(flavour.offset.unpack(value)[0])
    return stream.read(length)
