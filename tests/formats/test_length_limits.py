"""Small files that declare many planes, channels, strips or chunks are refused before they are read."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from service.core.errors import TooLarge
from service.core.quantities import TimeRange
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.axes import MAX_CHANNELS
from service.formats.open_stack import MAX_PLANES, MAX_SERIES_PLANES
from service.formats.tiff import ifd, writer
from service.formats.zarr import reader as zarr_reader

LIMIT_BYTES = 2**30


def make_array(shape: tuple[int, ...], axes: str) -> bytes:
    """Return a TIFF with all pixels in one page."""
    return writer.make_uncompressed_header(shape, np.dtype(np.uint8), axes) + bytes(int(np.prod(shape)))


def make_pages(count: int, rows_per_strip: Callable[[int], int], strip_count: int = 1) -> bytes:
    """Return a BigTIFF whose pages of one column share their pixels and their lists of strips."""
    lists = np.full(strip_count, 16, "<u8").tobytes()
    offset = 16 + len(lists)
    parts = [struct.pack("<2sHHHQ", b"II", 43, 8, 0, offset), lists]
    for index in range(count):
        tags = [
            (256, 4, 1, 1), (257, 4, 1, strip_count), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1),
            (273, 16, strip_count, 16), (277, 3, 1, 1), (278, 4, 1, rows_per_strip(index)), (279, 16, strip_count, 16),
        ]  # fmt: skip
        offset += 16 + 20 * len(tags)
        entries = b"".join(struct.pack("<HHQQ", *tag) for tag in tags)
        parts.append(struct.pack("<Q", len(tags)) + entries + struct.pack("<Q", offset if index < count - 1 else 0))
    return b"".join(parts)


def write_sparse_zarr(path: Path, axes: str, shape: list[int], chunks: list[int]) -> Path:
    """Write an OME-Zarr with a single chunk."""
    dataset = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1] * len(axes)}]}
    types = {"c": "channel", "t": "time"}
    named_axes = [{"name": axis, "type": types.get(axis, "space")} for axis in axes]
    attributes = {"multiscales": [{"version": "0.4", "axes": named_axes, "datasets": [dataset]}]}
    array = {
        "zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "|u1", "compressor": None, "filters": None,
        "fill_value": 0, "order": "C", "dimension_separator": "/",
    }  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(".zgroup", '{"zarr_format": 2}')
        archive.writestr(".zattrs", json.dumps(attributes))
        archive.writestr("0/.zarray", json.dumps(array))
        archive.writestr("/".join("0" for _ in ("", *axes)), bytes(int(np.prod(chunks))))
    return path


TIFFS = {
    "planes": (make_array((MAX_PLANES + 1, 1, 1), "ZYX"), Selection(), r"65537 planes.*axes=TYX"),
    "planes of a series": (make_array((2, MAX_PLANES + 1, 1, 1), "TZYX"), Selection(time=0), r"65537 planes"),
    "channels": (make_array((MAX_CHANNELS + 1, 1, 1), "CYX"), Selection(channel=0), r"65537 channels"),
    "time points": (
        make_array((MAX_SERIES_PLANES + 1, 1, 1), "TYX"), Selection(time=TimeRange()), r"262145 planes in total"
    ),
    "layouts": (make_pages(ifd.MAX_LAYOUTS + 1, lambda index: index + 1), Selection(), r"1024 different layouts"),
    "strips": (make_pages(2**11 + 1, lambda _: 1, 2**13), Selection(), r"16777216 strips"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TIFFS)
def test_tiff_is_refused(kind: str, tmp_path: Path) -> None:
    content, selection, message = TIFFS[kind]
    path = tmp_path / "stack.tif"
    path.write_bytes(content)
    for read in (stack_reader.inspect, stack_reader.read):
        with pytest.raises(TooLarge, match=message):
            read(path, selection, LIMIT_BYTES)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        ("zyx", [MAX_PLANES + 1, 1, 1], "65537 planes"),
        ("cyx", [2**60, 1, 1], f"{2**60} channels"),
        ("zyx", [2, 2, zarr_reader.MAX_CHUNKS], f"{4 * zarr_reader.MAX_CHUNKS} chunks"),
    ],
)
def test_zarr_archive_is_refused(axes: str, shape: list[int], message: str, tmp_path: Path) -> None:
    path = write_sparse_zarr(tmp_path / "stack.zip", axes, shape, [1, 1, 1])
    with pytest.raises(TooLarge, match=message):
        stack_reader.inspect(path, Selection(), LIMIT_BYTES)


def test_number_of_chunks_is_not_limited_if_regions_are_read(tmp_path: Path) -> None:
    path = write_sparse_zarr(tmp_path / "stack.zip", "zyx", [2, 2, zarr_reader.MAX_CHUNKS], [1, 1, 1])
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "stack.zarr")
    with stack_reader.open_blocks(tmp_path / "stack.zarr", Selection()) as stack:
        region = range(1, 2), range(2), range(zarr_reader.MAX_CHUNKS - 3, zarr_reader.MAX_CHUNKS)
        assert stack.read_region(region).shape == (1, 1, 2, 3)


def test_largest_numbers_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    path.write_bytes(make_array((MAX_PLANES, 1, 2), "ZYX"))
    assert stack_reader.read(path, Selection(), LIMIT_BYTES).shape == (1, MAX_PLANES, 1, 2)
    path.write_bytes(make_array((MAX_SERIES_PLANES + 1, 1, 1), "TYX"))
    selection = Selection(time=TimeRange(0, MAX_SERIES_PLANES))
    assert stack_reader.inspect(path, selection, LIMIT_BYTES).time_points == (0, MAX_SERIES_PLANES)
