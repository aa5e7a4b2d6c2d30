"""Stacks with fewer planes than their metadata declares are refused, or read as far as they are complete."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from pixels import noise

from service.core.errors import AmbiguousAxes, BadFile
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.tiff.planes import missing

LIMIT = 2**24
STACK = noise(12, 8, 11)
SUMMARY = {"MicroManagerVersion": "2.0.3", "Frames": 1, "Slices": 20, "Channels": 1, "Positions": 1, "z-step_um": 0.5}

WriteStack = Callable[[Path], None]


def write_with_description(description: str, **options: Any) -> WriteStack:
    def write(path: Path) -> None:
        tifffile.imwrite(path, STACK, photometric="minisblack", metadata=None, description=description, **options)

    return write


def make_ome_description(shape: tuple[int, ...], axes: str) -> str:
    file = io.BytesIO()
    tifffile.imwrite(file, np.zeros(shape, np.uint16), ome=True, photometric="minisblack", metadata={"axes": axes})
    return tifffile.TiffFile(io.BytesIO(file.getvalue())).ome_metadata or ""


def write_large_imagej(path: Path) -> None:
    """Write all planes after the tags of a single page, as ImageJ does for large stacks. The last plane is cut off."""
    description = "ImageJ=1.54f\nimages=20\nslices=20\n"
    tifffile.imwrite(path, STACK[0], photometric="minisblack", metadata=None, description=description)
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages[0].dataoffsets[0]
    path.write_bytes(path.read_bytes()[:offset] + STACK.tobytes() + bytes(33))


def write_micromanager(
    path: Path, summary: dict[str, Any], stack: NDArray[Any] = STACK, *, header: str = "index"
) -> None:
    """Write a file in the layout of Micro-Manager: header, summary, pages, and an index of the planes.

    header  index: complete; crashed: no index, as if the acquisition had crashed; ndtiff: NDTiff 3.0
    """
    text = json.dumps(summary).encode()
    if header == "ndtiff":
        content = bytearray(struct.pack("<2sHI5I", b"II", 42, 0, 483729, 3, 0, 2355492, len(text)) + text)
    else:
        fields = 54773648, 0, 483765892, 0, 99384722, 0, 2355492, len(text)
        content = bytearray(struct.pack("<2sHI8I", b"II", 42, 0, *fields) + text)
    link, offsets, (height, width) = 4, [], stack.shape[1:]
    for z, plane in enumerate(stack):
        content += bytes(len(content) % 2)
        offset = len(content)
        struct.pack_into("<I", content, link, offset)
        offsets.append(offset)
        own = {"Axes": {"z": z, "channel": "DAPI"}} if header == "ndtiff" else {"SliceIndex": z}
        own_text = json.dumps(own).encode() + b"\0"
        pixels, resolution = offset + 162, offset + 162 + plane.nbytes
        tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 16), (259, 3, 1, 1), (262, 3, 1, 1)]
        tags += [(273, 4, 1, pixels), (277, 3, 1, 1), (278, 3, 1, height), (279, 4, 1, plane.nbytes)]
        tags += [(282, 5, 1, resolution), (283, 5, 1, resolution), (296, 3, 1, 3)]
        tags += [(51123, 2, len(own_text), resolution + 8)]
        content += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
        link = len(content)
        content += bytes(4) + plane.tobytes() + struct.pack("<2I", 50000, 1) + own_text
    if header == "index":
        struct.pack_into("<I", content, 12, len(content))
        content += struct.pack("<II", 3453623, len(stack))
        content += b"".join(struct.pack("<5I", 0, z, 0, 0, offset) for z, offset in enumerate(offsets))
    path.write_bytes(content + bytes(512))


WRITERS: dict[str, WriteStack] = {
    "imagej": write_with_description("ImageJ=1.54f\nimages=20\nslices=20\n"),
    "imagej, deflate": write_with_description("ImageJ=1.54f\nimages=20\nslices=20\n", compression="zlib"),
    "large imagej": write_large_imagej,
    "tifffile": write_with_description(json.dumps({"shape": [20, 8, 11], "axes": "ZYX"})),
    "ome": write_with_description(make_ome_description((20, 8, 11), "ZYX")),
    "micro-manager": lambda path: write_micromanager(path, SUMMARY),
    "micro-manager after a crash": lambda path: write_micromanager(path, SUMMARY, header="crashed"),
    "ndtiff": lambda path: write_micromanager(path, SUMMARY, header="ndtiff"),
    "ndtiff with intended dimensions": lambda path: write_micromanager(
        path, {"IntendedDimensions": {"z": 20, "channel": 1, "time": 1}}, header="ndtiff"
    ),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_stack_that_was_stopped_early_is_refused_unless_allowed(tmp_path: Path, write: WriteStack) -> None:
    path = tmp_path / "stack.tif"
    write(path)

    for selection in (Selection(), Selection(axes="ZYX")):
        with pytest.raises(BadFile, match=r"declares 20 planes, but the file has 12.*allow_incomplete=true") as caught:
            stack_reader.inspect(path, selection, LIMIT)
        assert caught.value.suggested == {"allow_incomplete": "true"}
    for selection in (Selection(allow_incomplete=True), Selection(axes="ZYX", allow_incomplete=True)):
        volume = stack_reader.read(path, selection, LIMIT)
        np.testing.assert_array_equal(volume.read_all()[0], STACK)
    assert any("declares 20 planes, but the file has 12." in note for note in volume.notes)


@pytest.mark.parametrize("header", ["index", "crashed", "ndtiff"])
def test_complete_micromanager_files_are_read(tmp_path: Path, header: str) -> None:
    path = tmp_path / "stack.tif"
    write_micromanager(path, {**SUMMARY, "Slices": 12, "Positions": 5}, header=header)

    volume = stack_reader.read(path, Selection(), LIMIT)

    np.testing.assert_array_equal(volume.read_all()[0], STACK)
    assert not any("planes, but" in note for note in volume.notes)


def test_pages_that_the_index_of_micromanager_does_not_list_are_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    write_micromanager(path, {**SUMMARY, "Slices": 9})
    content = bytearray(path.read_bytes())
    index_offset = struct.unpack_from("<I", content, 12)[0]
    struct.pack_into("<I", content, index_offset + 4, 9)
    path.write_bytes(content)

    with pytest.raises(AmbiguousAxes, match=r"contradicts its pages.*12 x 8 x 11"):
        stack_reader.inspect(path, Selection(), LIMIT)
    np.testing.assert_array_equal(stack_reader.read(path, Selection(axes="ZYX"), LIMIT).read_all()[0], STACK)


def test_ndtiff_channels_are_read_in_the_order_of_their_positions(tmp_path: Path) -> None:
    path, stack = tmp_path / "stack.tif", noise(6, 8, 11)
    write_micromanager(path, {"Slices": 3, "Channels": 2}, stack, header="ndtiff")
    content = path.read_bytes()
    for z in range(6):
        old = json.dumps({"Axes": {"z": z, "channel": "DAPI"}}).encode()
        content = content.replace(old, json.dumps({"Axes": {"z": z // 2, "channel": f"Ch_{z % 2}"}}).encode())
    path.write_bytes(content)

    np.testing.assert_array_equal(
        stack_reader.read(path, Selection(), LIMIT).read_all(), stack.reshape(3, 2, 8, 11).swapaxes(0, 1)
    )


def test_complete_time_points_are_used(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    write_with_description("ImageJ=1.54f\nimages=25\nslices=5\nframes=5\n")(path)

    description = stack_reader.inspect(path, Selection(allow_incomplete=True), LIMIT)

    assert (description.axes, description.stored_shape) == ("TZYX", (2, 5, 8, 11))
    assert any("the file has 12. 10 of them" in note for note in description.notes)
    volume = stack_reader.read(path, Selection(time=1, allow_incomplete=True), LIMIT)
    np.testing.assert_array_equal(volume.read_all()[0], STACK[5:10])


def test_allow_incomplete_does_not_change_complete_stacks(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, STACK, imagej=True, metadata={"axes": "ZYX"})

    assert stack_reader.inspect(path, Selection(allow_incomplete=True), LIMIT) == stack_reader.inspect(
        path, Selection(), LIMIT
    )


@pytest.mark.parametrize(
    ("axes", "shape", "present", "expected"),
    [
        ("Z", (20,), [(z,) for z in range(12)], (12,)),
        ("Z", (20,), [(z,) for z in range(20) if z != 7], (7,)),
        ("Z", (20,), [(z,) for z in range(1, 20)], (0,)),
        ("TZ", (5, 3), [(0, 0), (0, 1)], (1, 2)),
        ("TZ", (5, 3), [(t, z) for t in range(2) for z in range(3)], (2, 3)),
        ("TZ", (2, 3), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], (1, 3)),
        ("CZ", (2, 3), [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)], (2, 2)),
        ("ZC", (3, 2), [(0, 0), (0, 1), (1, 0)], (1, 2)),
        ("CZ", (2, 3), [(0, 0), (0, 1)], (1, 2)),
    ],
)
def test_complete_part(
    axes: str, shape: tuple[int, ...], present: list[tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    assert missing.crop_to_complete(axes, shape, np.array(present)) == expected
