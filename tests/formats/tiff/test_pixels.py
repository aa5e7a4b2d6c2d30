"""Refuse planes whose pixels are incomplete or cannot be decoded correctly, instead of reading other bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from pixels import noise

from service.core.errors import BadFile
from service.core.types import Selection
from service.formats import stack_reader

LIMIT = 2**28
STACK = noise(4, 16, 20)


def write_pages(path: Path, changed_tags: Mapping[int, Mapping[str, Any]], **options: Any) -> Path:
    """Write one page per plane of `STACK`, and change tags by the index of the page."""
    with tifffile.TiffWriter(path) as writer:
        for plane in STACK:
            writer.write(plane, photometric="minisblack", metadata=None, contiguous=False, **options)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        for index, tags in changed_tags.items():
            for name, value in tags.items():
                tiff.pages[index].tags[name].overwrite(value)
    return path


def remove_tag(path: Path, name: str) -> None:
    """Give a tag of all pages the number of a tag that is not read."""
    with tifffile.TiffFile(path) as tiff:
        positions = [page.tags[name].offset for page in tiff.pages]
    content = bytearray(path.read_bytes())
    for position in positions:
        content[position : position + 2] = (263).to_bytes(2, "little")
    path.write_bytes(content)


@pytest.mark.parametrize("index", range(4))
def test_plane_with_too_few_bytes_is_rejected_if_other_data_follows(index: int, tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", {})
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        page = tiff.pages[index]
        page.tags["StripOffsets"].overwrite(page.dataoffsets[0] + 40)
        page.tags["StripByteCounts"].overwrite(page.nbytes - 40)

    # Nothing follows the last plane.
    message = f"Plane {index} is incomplete: it has 600 of 640 bytes" if index < 3 else "truncated: plane 3"
    with pytest.raises(BadFile, match=message):
        stack_reader.inspect(path, Selection(), LIMIT)


def test_wrong_byte_counts_of_complete_planes_are_ignored(tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", {index: {"StripByteCounts": 320 + index} for index in range(4)})

    np.testing.assert_array_equal(stack_reader.read(path, Selection(), LIMIT).read_all()[0], STACK)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(
    ("counts", "options"),
    [(0, {}), (0, {"compression": "zlib"}), ([0, 40, 40, 40], {"compression": "zlib", "rowsperstrip": 4})],
)
def test_plane_without_bytes_is_not_filled_with_zeros(
    index: int, counts: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    path = write_pages(tmp_path / "a.tif", {index: {"StripByteCounts": counts}}, **options)

    with pytest.raises(BadFile, match=rf"byte count is 0|strips or tiles of plane {index} are missing"):
        stack_reader.inspect(path, Selection(), LIMIT)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"ImageWidth": 10, "BitsPerSample": 25}, "integers of 25 bits"),
        ({"ImageWidth": 16, "BitsPerSample": 20}, "integers of 20 bits"),
    ],
)
def test_packed_integers_of_more_than_16_bits_are_rejected(tags: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", dict.fromkeys(range(4), tags))

    with pytest.raises(BadFile, match=message):
        stack_reader.inspect(path, Selection(), LIMIT)


def test_integers_of_24_bits_are_read_with_the_most_significant_byte_first_and_noted(tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", {index: {"ImageWidth": 10, "BitsPerSample": 24} for index in range(4)})
    stored = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages[1].dataoffsets[0]

    volume = stack_reader.read(path, Selection(), LIMIT)

    assert volume.read_all()[0, 1, 0, 0] == int.from_bytes(stored[offset : offset + 3], "big")
    assert "most significant byte first" in " ".join(stack_reader.inspect(path, Selection(), LIMIT).notes)


@pytest.mark.parametrize(
    ("photometric", "note"),
    [(0, "stored inverted"), (1, ""), (32803, "raw mosaic of a color camera"), (32844, "logarithms"), (None, "")],
)
def test_pixels_that_are_not_brightness_are_noted(photometric: int | None, note: str, tmp_path: Path) -> None:
    tags = {} if photometric is None else {"PhotometricInterpretation": photometric}
    path = write_pages(tmp_path / "a.tif", dict.fromkeys(range(4), tags))
    if photometric is None:
        # A missing tag is not a statement about the pixels.
        remove_tag(path, "PhotometricInterpretation")

    notes = [text for text in stack_reader.inspect(path, Selection(), LIMIT).notes if "stored" in text]

    assert len(notes) == bool(note)
    assert note in " ".join(notes)


@pytest.mark.parametrize("compression", ["zlib", "packbits", "lzw"])
def test_bytes_after_the_last_row_are_ignored(compression: str, tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", {}, compression=compression, rowsperstrip=6)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        for page in tiff.pages:
            # The last strip has 3 rows, but 4 are stored.
            page.tags["ImageLength"].overwrite(15)

    np.testing.assert_array_equal(stack_reader.read(path, Selection(), LIMIT).read_all()[0], STACK[:, :15])


@pytest.mark.parametrize("compression", ["zlib", "packbits"])
def test_truncated_strips_are_rejected(compression: str, tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", {}, compression=compression)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        for page in tiff.pages:
            page.tags["StripByteCounts"].overwrite(page.databytecounts[0] - 50)

    with pytest.raises(BadFile, match="decoding the pixels failed"):
        stack_reader.read(path, Selection(), LIMIT)


@pytest.mark.parametrize("slices", ["4.0", "2.5", "four"])
def test_numbers_of_slices_that_are_not_integers_are_rejected(slices: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    description = f"ImageJ=1.54f\nimages=4\nslices={slices}\n"
    tifffile.imwrite(path, STACK, photometric="minisblack", description=description, metadata=None)

    with pytest.raises(BadFile, match=f"slices={slices}, which is not an integer"):
        stack_reader.read(path, Selection(), LIMIT)


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}])
def test_pages_without_bits_per_sample_must_have_one_bit_per_pixel(options: dict[str, Any], tmp_path: Path) -> None:
    # tifffile writes the tag only if there is more than one bit.
    mask = STACK.mean() < STACK
    tifffile.imwrite(tmp_path / "mask.tif", mask, photometric="minisblack", metadata=None)
    path = write_pages(tmp_path / "a.tif", {}, **options)
    remove_tag(path, "BitsPerSample")

    np.testing.assert_array_equal(stack_reader.read(tmp_path / "mask.tif", Selection(), LIMIT).read_all()[0], mask)
    with pytest.raises(BadFile, match="lack the tag BitsPerSample"):
        stack_reader.read(path, Selection(), LIMIT)
