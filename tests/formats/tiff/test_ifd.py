"""Validation of the chain of page directories in a TIFF."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
import tifffile

from service.core.errors import BadFile, RequestError, TooLarge, UnsupportedMedia
from service.formats.tiff import ifd


def write_pages(pages: list[np.ndarray], **options: Any) -> io.BytesIO:
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.stack(pages), photometric="minisblack", metadata=None, **options)
    return stream


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_scan_finds_every_page(bigtiff: bool, byteorder: str) -> None:
    stream = write_pages([np.zeros((4, 5), np.uint16)] * 3, bigtiff=bigtiff, byteorder=byteorder)

    structure = ifd.scan(stream)

    assert len(structure.offsets) == 3
    assert structure.size == len(stream.getvalue())
    assert len(set(structure.layouts.values())) == 1


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (np.zeros((4, 5), np.uint16), np.zeros((4, 6), np.uint16), {}),
        (np.zeros((4, 5), np.uint16), np.zeros((4, 5), np.int16), {}),
        (np.zeros((4, 5), np.uint16), np.zeros((4, 5), np.uint8), {}),
        (np.zeros((4, 5), np.uint16), np.zeros((4, 5), np.uint16), {"compression": "zlib"}),
        (np.zeros((4, 5), np.uint16), np.zeros((4, 5), np.uint16), {"rowsperstrip": 2}),
        # The bits per sample of three samples are stored outside the directory.
        (np.zeros((4, 5, 3), np.uint8), np.zeros((4, 5, 3), np.uint16), {}),
    ],
)
def test_different_pages_have_different_layouts(first: np.ndarray, second: np.ndarray, options: dict[str, Any]) -> None:
    stream, photometric = io.BytesIO(), "rgb" if first.ndim > 2 else "minisblack"
    with tifffile.TiffWriter(stream) as writer:
        writer.write(first, photometric=photometric, metadata=None)
        writer.write(second, photometric=photometric, metadata=None, **options)

    assert len(set(ifd.scan(stream).layouts.values())) == 2


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.7])
def test_chain_beyond_the_end_of_the_file_is_rejected(fraction: float) -> None:
    data = write_pages([np.arange(200, dtype=np.uint16).reshape(10, 20)] * 5).getvalue()

    with pytest.raises(BadFile, match="truncated"):
        ifd.scan(io.BytesIO(data[: int(len(data) * fraction)]))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", UnsupportedMedia, "Send a TIFF"),
        (b"I", UnsupportedMedia, "Send a TIFF"),
        (b"II\x2c\x00" + bytes(20), UnsupportedMedia, "Send a TIFF"),
        (b"II*\x00", BadFile, "truncated"),
        (b"II*\x00\x08\x00\x00\x00", BadFile, "truncated"),
        (b"II+\x00\x08\x00\x00\x00", BadFile, "truncated"),
        (b"II*\x00" + bytes(8), BadFile, "without pages"),
        (b"II*\x00" + struct.pack("<IHI", 8, 0, 8), BadFile, "loop"),
        (b"II*\x00" + struct.pack("<IH", 8, 5000) + bytes(100), BadFile, "5000 tags"),
    ],
)
def test_other_files_and_damaged_tiffs_are_rejected(data: bytes, error: type[RequestError], words: str) -> None:
    with pytest.raises(error, match=words):
        ifd.scan(io.BytesIO(data))


def test_number_of_pages_is_limited() -> None:
    stream = write_pages([np.zeros((1, 1), np.uint8)] * 4)

    assert len(ifd.scan(stream, max_pages=4).offsets) == 4
    with pytest.raises(TooLarge, match="more than 3 pages"):
        ifd.scan(stream, max_pages=3)


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("tag", [256, 259, 262])
def test_page_that_differs_in_one_tag_has_a_different_layout(bigtiff: bool, byteorder: str, tag: int) -> None:
    stream = write_pages([np.zeros((4, 5), np.uint16)] * 5, bigtiff=bigtiff, byteorder=byteorder)
    with tifffile.TiffFile(io.BytesIO(stream.getvalue())) as tiff:
        position = tiff.pages[2].tags[tag].valueoffset
    content = bytearray(stream.getvalue())
    content[position if byteorder == "<" else position + 1] += 1

    layouts = list(ifd.scan(io.BytesIO(content)).layouts.values())

    assert [layout == layouts[0] for layout in layouts] == [True, True, False, True, True]


def test_tag_values_beyond_the_end_of_the_file_are_rejected() -> None:
    stream = write_pages([np.zeros((4, 5), np.uint16)] * 5, resolution=(3.5, 4.5))
    with tifffile.TiffFile(io.BytesIO(stream.getvalue())) as tiff:
        entry_offset = tiff.pages[3].tags["YResolution"].offset
    content = bytearray(stream.getvalue())
    content[entry_offset + 8 : entry_offset + 12] = struct.pack("<I", len(content) - 4)

    with pytest.raises(BadFile, match="tag 283 of page 3 is beyond the end"):
        ifd.scan(io.BytesIO(content))
