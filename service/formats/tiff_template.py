"""A TIFF whose pages are laid out once and then only filled, as a writer's work takes longer than small pages do."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from service.formats import ifd, imagej

STRIP_OFFSETS, STRIP_BYTE_COUNTS = 273, 279
# What each file has of its own instead.
NUMBER = "00000000-0000-4000-8000-000000000000"

# Streams of pages, one after the other, and where each ends, int64 [P].
Streams = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True)
class TiffTemplate:
    """A classic TIFF of little-endian order, complete but for its pixels and what differs from file to file.

    offsets, counts  where in `content` the file says, in 32 bits, where each page's pixels are and how many bytes
    remark           where the description for ImageJ is, and for how many letters there is room
    """

    content: bytes
    offsets: NDArray[np.intp]
    counts: NDArray[np.intp]
    remark: tuple[int, int]

    @cached_property
    def _places(self) -> NDArray[np.intp]:
        """Of each byte of the offsets and of the counts, [2, P, 4]."""
        return np.stack((self.offsets, self.counts))[..., None] + np.arange(4)

    @classmethod
    def cut(cls, write: Callable[[BinaryIO], None], remark: str) -> TiffTemplate:
        """From what `write` writes, with any pixels of one strip per page, and a description as long as can be."""
        stream = io.BytesIO()
        write(stream)
        place = imagej.append(stream, remark)
        entries = [_entries(stream, offset) for offset in ifd.scan(stream).offsets]
        offsets, counts = (
            np.array([entry[tag] for entry in entries], np.intp) for tag in (STRIP_OFFSETS, STRIP_BYTE_COUNTS)
        )
        return cls(stream.getvalue(), offsets, counts, (place, len(remark)))

    def filled(self, streams: Streams, number: str, remark: str) -> bytes:
        """The whole file, with these pixels, a UUID of its own, and a description for ImageJ, empty lines behind it."""
        pixels, ends = streams
        file = bytearray(self.content.replace(NUMBER.encode(), number.encode()))
        place, room = self.remark
        file[place : place + room] = remark.ljust(room, "\n").encode("ascii")
        starts = np.empty_like(ends)
        starts[0], starts[1:] = 0, ends[:-1]
        np.frombuffer(file, np.uint8)[self._places] = (
            np.array((starts + len(file), ends - starts), "<u4").view(np.uint8).reshape(2, -1, 4)
        )
        return b"".join((file, pixels.data))


def _entries(stream: BinaryIO, offset: int) -> dict[int, int]:
    """By tag where the values in a page directory are, which are short enough to be there."""
    flavour, _ = ifd.header(stream)
    stream.seek(offset)
    count = flavour.count.unpack(stream.read(flavour.count.size))[0]
    first = offset + flavour.count.size
    found: dict[int, int] = {}
    for index in range(count):
        tag, *_ = flavour.entry.unpack(stream.read(flavour.entry.size))
        found[tag] = first + (index + 1) * flavour.entry.size - flavour.offset.size
    return found
