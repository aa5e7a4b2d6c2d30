"""Read TIFFs in every supported container, codec, data type and byte order."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from pixels import noise

from service.core.errors import AmbiguousAxes, BadFile, BadParameter, RequestError, TooLarge
from service.core.quantities import TimeInterval, TimeRange, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader

LIMIT = 2**28
DEFAULT_SELECTION = Selection()

WriteTiff = Callable[..., Path]


@pytest.fixture
def write_tiff(tmp_path: Path) -> WriteTiff:
    """write_tiff(array, **options of tifffile.imwrite): write a TIFF and return its path."""

    def write(pixels: NDArray[Any], name: str = "stack.tif", **options: Any) -> Path:
        path = tmp_path / name
        options.setdefault("photometric", "minisblack")
        tifffile.imwrite(path, pixels, **options)
        return path

    return write


def read_pixels(path: Path, selection: Selection = DEFAULT_SELECTION, scratch: Path | None = None) -> NDArray[Any]:
    return stack_reader.read(path, selection, LIMIT, scratch).read_all()


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"])
def test_every_dtype_in_both_byte_orders(write_tiff: WriteTiff, dtype: str, byteorder: str) -> None:
    stack = noise(3, 9, 11, dtype=dtype)
    path = write_tiff(stack, byteorder=byteorder, metadata={"axes": "ZYX"})

    volume = stack_reader.read(path, DEFAULT_SELECTION, LIMIT)

    assert volume.dtype == np.dtype(dtype)
    assert volume.read_all().dtype.isnative
    np.testing.assert_array_equal(volume.read_all()[0], stack)
    np.testing.assert_array_equal(volume.read(1, 3)[0], stack[1:3])


CODECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiles": {"tile": (16, 16)},
    "strips": {"rowsperstrip": 7},
    "deflate": {"compression": "adobe_deflate"},
    "deflate and predictor": {"compression": "adobe_deflate", "predictor": True},
    "lzw": {"compression": "lzw"},
    "zstd in tiles": {"compression": "zstd", "tile": (16, 16)},
    "packbits": {"compression": "packbits"},
    "lzma": {"compression": "lzma"},
    "jpeg xl": {"compression": "jpegxl"},
    "lerc": {"compression": "lerc"},
    "jpeg 2000": {"compression": "jpeg2000", "compressionargs": {"reversible": True}},
    "big": {"bigtiff": True},
    "big, deflate, strips": {"bigtiff": True, "compression": "adobe_deflate", "rowsperstrip": 5},
    "in several threads": {"compression": "zlib"},
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("decode_to_file", [False, True])
def test_every_codec_and_layout(write_tiff: WriteTiff, tmp_path: Path, name: str, decode_to_file: bool) -> None:
    stack = noise(13, 300, 300) if name == "in several threads" else noise(3, 40, 50)
    path = write_tiff(stack, metadata={"axes": "ZYX"}, **CODECS[name])

    np.testing.assert_array_equal(read_pixels(path, scratch=tmp_path if decode_to_file else None)[0], stack)


def test_one_bit_pixels_become_zero_and_one(write_tiff: WriteTiff) -> None:
    stack = noise(3, 9, 11) > 60
    path = write_tiff(stack, metadata={"axes": "ZYX"})

    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).dtype == "bool"
    assert read_pixels(path).dtype == np.uint8
    np.testing.assert_array_equal(read_pixels(path)[0], stack)


def test_complex_pixels_are_rejected(write_tiff: WriteTiff) -> None:
    with pytest.raises(BadFile, match="complex64"):
        stack_reader.inspect(write_tiff(np.zeros((3, 9, 11), np.complex64)), DEFAULT_SELECTION, LIMIT)


@pytest.mark.parametrize("compression", [None, "adobe_deflate"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_imagej_hyperstack_by_channel_and_time_point(
    write_tiff: WriteTiff, compression: str | None, byteorder: str
) -> None:
    stack = noise(2, 4, 3, 9, 11)
    path = write_tiff(
        stack,
        imagej=True,
        byteorder=byteorder,
        compression=compression,
        resolution=(4, 5),
        metadata={"axes": "TZCYX", "spacing": 0.5, "unit": "um"},
    )

    description = stack_reader.inspect(path, Selection(time=0), LIMIT)

    assert (description.container, description.axes, description.times, len(description.channels)) == (
        "ImageJ TIFF",
        "TZCYX",
        2,
        3,
    )
    assert description.shape == (3, 4, 9, 11)
    assert description.voxel_size == VoxelSize(0.5, 0.2, 0.25)
    for time in range(2):
        np.testing.assert_array_equal(read_pixels(path, Selection(time=time)), stack[time].swapaxes(0, 1))
        for channel in range(3):
            pixels = read_pixels(path, Selection(time=time, channel=channel))
            np.testing.assert_array_equal(pixels, stack[time, :, channel][np.newaxis])


def test_time_series_is_described_but_not_read_without_a_time_point(write_tiff: WriteTiff) -> None:
    path = write_tiff(noise(5, 9, 11), metadata={"axes": "TYX"}, ome=True)

    description = stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)

    assert (description.shape, description.times) == ((1, 1, 9, 11), 5)
    assert "time=0 to time=4" in description.problem
    assert "axes=ZYX" in description.problem
    with pytest.raises(BadParameter, match=r"time=0 to time=4.*axes=ZYX"):
        stack_reader.read(path, DEFAULT_SELECTION, LIMIT)
    assert stack_reader.read(path, Selection(axes="ZYX"), LIMIT).shape == (1, 5, 9, 11)


def test_range_of_time_points_is_described_but_not_read(write_tiff: WriteTiff) -> None:
    path = write_tiff(noise(5, 3, 9, 11), metadata={"axes": "TZYX"}, imagej=True)
    for times, expected in ((TimeRange(), (0, 5)), (TimeRange(1, 3), (1, 3)), (TimeRange(4), (4, 5))):
        description = stack_reader.inspect(path, Selection(time=times), LIMIT)
        assert (description.shape, description.time_points, description.problem) == ((1, 3, 9, 11), expected, "")
    for times in (TimeRange(2, 9), TimeRange(5), TimeRange(7, 8)):
        with pytest.raises(BadParameter, match="time=0 to time=4"):
            stack_reader.inspect(path, Selection(time=times), LIMIT)
    with pytest.raises(BadParameter, match="time=all"):
        stack_reader.read(path, Selection(time=TimeRange()), LIMIT)


def test_channel_colors(write_tiff: WriteTiff) -> None:
    pixels = np.zeros((2, 3, 8, 8), np.uint16)
    red_and_cyan = [np.outer(colour, np.arange(256)).astype(np.uint8) for colour in ((1, 0, 0), (0, 1, 1))]
    imagej = write_tiff(pixels.swapaxes(0, 1), imagej=True, metadata={"axes": "ZCYX", "LUTs": red_and_cyan})
    assert stack_reader.inspect(imagej, DEFAULT_SELECTION, LIMIT).colours == ("#ff0000", "#00ffff")
    colours = {"Channel": {"Name": ["a", "b"], "Color": [-16776961, 0x00FF00FF]}}
    ome = write_tiff(pixels, ome=True, metadata={"axes": "CZYX", **colours})
    assert stack_reader.inspect(ome, DEFAULT_SELECTION, LIMIT).colours == ("#ff0000", "#00ff00")
    assert stack_reader.inspect(write_tiff(pixels, metadata={"axes": "CZYX"}), DEFAULT_SELECTION, LIMIT).colours == (
        "",
        "",
    )


@pytest.mark.parametrize(
    ("metadata", "interval"),
    [
        ({"finterval": 300.0}, TimeInterval(300, "s")),
        ({"finterval": 5, "tunit": "minutes"}, TimeInterval(5, "min")),
        ({"finterval": 0}, None),
        ({"finterval": "nan", "tunit": "s"}, None),
        ({"finterval": 1, "tunit": "frames"}, None),
        ({"finterval": 10**400}, None),
        ({"finterval": 7, "tunit": "\\u00B5s"}, TimeInterval(7, "µs")),
        ({}, None),
        ({"TimeIncrement": 250.0, "TimeIncrementUnit": "ms"}, TimeInterval(250, "ms")),
        ({"TimeIncrement": 2.5}, TimeInterval(2.5, "s")),
        ({"TimeIncrement": 2.5, "TimeIncrementUnit": "Ms"}, None),
    ],
)
def test_time_intervals(write_tiff: WriteTiff, metadata: dict[str, Any], interval: TimeInterval | None) -> None:
    kind = "ome" if "TimeIncrement" in metadata else "imagej"
    path = write_tiff(noise(2, 3, 9, 11), metadata={"axes": "TZYX", **metadata}, **{kind: True})
    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).time_interval == interval


@pytest.mark.parametrize("axes", ["ZYX", "CZYX", "ZCYX", "TCZYX", "TZCYX", "ZTCYX", "CTZYX"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_ome_in_every_order(write_tiff: WriteTiff, axes: str, compression: str | None) -> None:
    lengths = {"T": 2, "C": 3, "Z": 4, "Y": 9, "X": 11}
    stack = noise(*(lengths[axis] for axis in axes))
    path = write_tiff(stack, "stack.ome.tif", ome=True, metadata={"axes": axes}, compression=compression)
    file_axes = "".join(axis for axis in "TCZYX" if axis in axes)
    ordered_stack = np.moveaxis(stack, [axes.index(axis) for axis in file_axes], range(len(file_axes)))

    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).axes == axes
    for time in range(2 if "T" in axes else 1):
        expected = ordered_stack[time] if "T" in axes else ordered_stack
        np.testing.assert_array_equal(read_pixels(path, Selection(time=time)), expected.reshape(-1, 4, 9, 11))


def test_channel_names(write_tiff: WriteTiff) -> None:
    stack = noise(2, 4, 9, 11)
    path = write_tiff(stack, ome=True, metadata={"axes": "CZYX", "Channel": {"Name": ["DAPI", "GFP"]}})

    volume = stack_reader.read(path, Selection(channel="gfp"), LIMIT)

    assert volume.channels == ("GFP",)
    np.testing.assert_array_equal(volume.read_all()[0], stack[1])
    assert stack_reader.read(path, DEFAULT_SELECTION, LIMIT).channels == ("DAPI", "GFP")


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_color_samples_are_channels(write_tiff: WriteTiff, planar: str, compression: str | None) -> None:
    stack = noise(4, 9, 11, 3, dtype="uint8") if planar == "contig" else noise(4, 3, 9, 11, dtype="uint8")
    axes = "ZYXS" if planar == "contig" else "ZSYX"
    path = write_tiff(stack, photometric="rgb", planarconfig=planar, compression=compression, metadata={"axes": axes})
    channels = np.moveaxis(stack, axes.index("S"), 0)

    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).channels == ("red", "green", "blue")
    np.testing.assert_array_equal(read_pixels(path), channels)
    np.testing.assert_array_equal(read_pixels(path, Selection(channel="green")), channels[1:2])


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_color_samples_of_several_channels_are_numbered_consecutively(
    write_tiff: WriteTiff, compression: str | None
) -> None:
    stack = noise(2, 4, 9, 11, 3, dtype="uint8")
    path = write_tiff(stack, photometric="rgb", metadata={"axes": "CZYXS"}, compression=compression)

    np.testing.assert_array_equal(read_pixels(path), stack.transpose(0, 4, 1, 2, 3).reshape(6, 4, 9, 11))
    np.testing.assert_array_equal(read_pixels(path, Selection(channel=5))[0], stack[1, ..., 2])


@pytest.mark.parametrize("options", [{"metadata": None}, {}])
def test_plain_grayscale_pages_are_read_as_z_with_a_note(write_tiff: WriteTiff, options: dict[str, Any]) -> None:
    stack = noise(5, 9, 11)
    path = write_tiff(stack, **options)

    description = stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)

    assert (description.axes, description.shape) == ("ZYX", (1, 5, 9, 11))
    assert any("read as z planes" in note and "axes=" in note for note in description.notes)
    np.testing.assert_array_equal(read_pixels(path)[0], stack)
    assert stack_reader.read(path, DEFAULT_SELECTION, LIMIT).notes == description.notes


def test_four_unnamed_dimensions_are_ambiguous(write_tiff: WriteTiff) -> None:
    stack = noise(2, 5, 9, 11)
    path = write_tiff(stack)

    with pytest.raises(AmbiguousAxes, match=r"2 x 5 x 9 x 11.*axes=CZYX"):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="CZYX")), stack)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZCYX")), stack.swapaxes(0, 1))


def test_pages_may_contain_z_or_time(write_tiff: WriteTiff) -> None:
    stack = noise(9, 11, 4, dtype="uint8")
    path = write_tiff(stack, photometric="rgb", planarconfig="contig", metadata={"axes": "YXZ"}, extrasamples=[0])

    np.testing.assert_array_equal(read_pixels(path)[0], np.moveaxis(stack, -1, 0))
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="YXT", time=2))[0, 0], stack[..., 2])


def test_largest_of_several_images_is_read(tmp_path: Path) -> None:
    path, stack = tmp_path / "two.ome.tif", noise(5, 9, 11)
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(stack.max(axis=0), photometric="minisblack", metadata={"axes": "YX", "Name": "projection"})
        writer.write(stack, photometric="minisblack", metadata={"axes": "ZYX", "Name": "volume"})

    assert any(
        "2 images" in note and "'volume'" in note for note in stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).notes
    )
    np.testing.assert_array_equal(read_pixels(path)[0], stack)


def test_pyramid_is_read_at_full_resolution(tmp_path: Path) -> None:
    path, stack = tmp_path / "pyramid.ome.tif", noise(5, 32, 32)
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(stack, photometric="minisblack", subifds=1, tile=(16, 16), metadata={"axes": "ZYX"})
        writer.write(stack[:, ::2, ::2], photometric="minisblack", subfiletype=1, tile=(16, 16))

    np.testing.assert_array_equal(read_pixels(path)[0], stack)


def test_reduced_copies_among_plain_pages_are_ignored(tmp_path: Path) -> None:
    path, stack = tmp_path / "thumbnails.tif", noise(3, 32, 32)
    with tifffile.TiffWriter(path) as writer:
        for plane in stack:
            writer.write(plane, photometric="minisblack", metadata=None)
            for copy in (plane[::2, ::2], plane[::2, 1::2], plane[1::2, 1::2], plane[1::2, ::2]):
                writer.write(copy, photometric="minisblack", metadata=None, subfiletype=1)

    np.testing.assert_array_equal(read_pixels(path)[0], stack)


def test_voxel_size_of_the_request_takes_precedence(write_tiff: WriteTiff) -> None:
    path = write_tiff(
        noise(5, 9, 11), imagej=True, resolution=(4, 4), metadata={"axes": "ZYX", "spacing": 1, "unit": "um"}
    )
    selection = Selection(voxel_size=VoxelSize(3, 2, 1))

    assert stack_reader.inspect(path, selection, LIMIT).voxel_size == VoxelSize(3, 2, 1)
    assert stack_reader.inspect(path, selection, LIMIT).voxel_size_from == "the request"
    assert stack_reader.read(path, selection, LIMIT).voxel_size == VoxelSize(3, 2, 1)
    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).voxel_size_from == "ImageJ metadata"


@pytest.mark.parametrize(("unit", "is_known"), [("nm", True), ("pixel", False)])
def test_ome_units(write_tiff: WriteTiff, unit: str, is_known: bool) -> None:
    sizes = {f"PhysicalSize{axis}": size for axis, size in zip("ZYX", (2.0, 0.5, 0.25), strict=True)}
    units = {f"PhysicalSize{axis}Unit": unit for axis in "ZYX"}
    path = write_tiff(noise(5, 9, 11), ome=True, metadata={"axes": "ZYX", **sizes, **units})

    description = stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)

    assert tuple(description.voxel_size or ()) == (pytest.approx((2e-3, 5e-4, 2.5e-4)) if is_known else ())
    assert description.voxel_size_from == ("OME-XML" if is_known else "not stated")


def test_uncompressed_pixels_are_mapped_and_compressed_pixels_are_decoded_once(
    write_tiff: WriteTiff, tmp_path: Path
) -> None:
    output_sizes, scratch, stack = list[int](), tmp_path / "scratch", noise(5, 9, 11)
    plain_path, compressed_path = write_tiff(stack, byteorder=">"), write_tiff(stack, "packed.tif", compression="zlib")

    def make_output(nbytes: int) -> int:
        output_sizes.append(nbytes)
        return os.open(tmp_path / "raw", os.O_RDWR | os.O_CREAT)

    assert not stack_reader.extract(plain_path, DEFAULT_SELECTION, LIMIT, make_output, LIMIT).is_decoded
    assert not output_sizes
    assert stack_reader.extract(compressed_path, DEFAULT_SELECTION, LIMIT, make_output, LIMIT).is_decoded
    assert output_sizes == [stack.nbytes]
    assert (tmp_path / "raw").read_bytes() == stack.tobytes()
    stack_reader.read(plain_path, DEFAULT_SELECTION, LIMIT, scratch)
    assert not scratch.exists()
    volume = stack_reader.read(compressed_path, DEFAULT_SELECTION, LIMIT, scratch)
    assert not list(scratch.iterdir()), "the file for decoded pixels has no name"
    np.testing.assert_array_equal(volume.read_all()[0], stack)


def test_changes_to_a_volume_do_not_reach_the_file(write_tiff: WriteTiff) -> None:
    path = write_tiff(np.zeros((5, 9, 11), np.uint16))

    stack_reader.read(path, DEFAULT_SELECTION, LIMIT).read_all()[:] = 7

    assert not read_pixels(path).any()


@pytest.mark.parametrize("limit", [1, 2 * 5 * 9 * 11 - 1])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_selection_above_the_limit_is_rejected_before_decoding(
    write_tiff: WriteTiff, limit: int, compression: str | None
) -> None:
    path = write_tiff(noise(5, 9, 11), compression=compression)

    for call in (stack_reader.inspect, stack_reader.read):
        with pytest.raises(TooLarge, match="990 bytes"):
            call(path, DEFAULT_SELECTION, limit)
    assert stack_reader.read(path, DEFAULT_SELECTION, 990).nbytes == 990
    two_channels = write_tiff(noise(2, 5, 9, 11), metadata={"axes": "CZYX"}, compression=compression)
    assert stack_reader.read(two_channels, Selection(channel=1), 990).shape == (1, 5, 9, 11)


WRITERS: dict[str, dict[str, Any]] = {
    "imagej": {"imagej": True, "metadata": {"axes": "ZCYX"}},
    "imagej, deflate": {"imagej": True, "metadata": {"axes": "ZCYX"}, "compression": "zlib"},
    "ome": {"ome": True, "metadata": {"axes": "ZCYX"}},
    "ome, deflate": {"ome": True, "metadata": {"axes": "ZCYX"}, "compression": "zlib"},
    "tifffile": {"metadata": {"axes": "ZCYX"}},
    "tifffile, one page": {"metadata": {"axes": "ZCYX"}, "truncate": True},
    "big, tiles": {"metadata": {"axes": "ZCYX"}, "bigtiff": True, "tile": (16, 16)},
}


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS.keys())
def test_truncated_stack_is_rejected_and_never_read_partially(write_tiff: WriteTiff, options: dict[str, Any]) -> None:
    path = write_tiff(noise(5, 2, 9, 11), **options)
    content = path.read_bytes()
    np.testing.assert_array_equal(read_pixels(path), noise(5, 2, 9, 11).swapaxes(0, 1))

    for end in sorted({*range(0, len(content), max(1, len(content) // 60)), len(content) - 1}):
        path.write_bytes(content[:end])
        try:
            pixels = stack_reader.read(path, DEFAULT_SELECTION, LIMIT).read_all()
        except RequestError:
            continue
        np.testing.assert_array_equal(pixels, noise(5, 2, 9, 11).swapaxes(0, 1), f"cut at byte {end}")


@pytest.mark.parametrize("slices", [2, 9])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_imagej_plane_count_must_match_the_pages(write_tiff: WriteTiff, slices: int, compression: str | None) -> None:
    path = write_tiff(
        noise(6, 8, 8), metadata=None, description=f"ImageJ=1.54f\nslices={slices}\n", compression=compression
    )

    if slices > 6:
        with pytest.raises(BadFile, match="declares 9 planes, but the file has 6"):
            stack_reader.inspect(path, Selection(axes="ZYX"), LIMIT)
    else:
        with pytest.raises(AmbiguousAxes, match=r"contradict.*axes="):
            stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
        np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZYX"))[0], noise(6, 8, 8))


@pytest.mark.parametrize("axes", ["YZX", "XZY", "YXZ"])
def test_compressed_pages_must_contain_y_and_x(write_tiff: WriteTiff, axes: str) -> None:
    compressed_path = write_tiff(noise(3, 9, 11), "packed.tif", compression="zlib", metadata=None)
    with pytest.raises(BadParameter, match=f"axes={axes}.*must contain Y and X"):
        stack_reader.inspect(compressed_path, Selection(axes=axes), LIMIT)
    plain_path = write_tiff(noise(3, 9, 11), metadata=None)
    assert sorted(stack_reader.read(plain_path, Selection(axes=axes), LIMIT).shape) == [1, 3, 9, 11]


@pytest.mark.parametrize(
    ("compression", "count", "message"), [("zlib", 0, "byte count is 0"), (None, 2**32 - 16, "truncated")]
)
def test_impossible_strip_byte_counts_are_rejected(
    write_tiff: WriteTiff, compression: str | None, count: int, message: str
) -> None:
    path = write_tiff(np.ones((9, 11), np.uint16), compression=compression, metadata=None)
    with tifffile.TiffFile(path, mode="r+") as written:
        written.pages.first.tags["StripByteCounts"].overwrite(count)

    with pytest.raises(BadFile, match=message):
        stack_reader.inspect(path, Selection(), LIMIT)


def test_gray_values_that_imagej_converts_are_noted(tmp_path: Path) -> None:
    description = "ImageJ=1.54f\nimages=2\nslices=2\ncf=0\nc0=-32768\nc1=1\nvunit=gray value\n"
    pixels = noise(2, 8, 9)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="minisblack", metadata=None, description=description)
    volume = stack_reader.read(tmp_path / "a.tif", DEFAULT_SELECTION, LIMIT)
    assert any("-32768 + 1 x stored value" in note for note in volume.notes)
    assert np.array_equal(volume.read_all()[0], pixels)


def test_planes_of_different_sizes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mixed.tif"
    description = "ImageJ=1.54f\nimages=2\nslices=2\n"
    with tifffile.TiffWriter(path) as writer:
        writer.write(noise(8, 8), photometric="minisblack", metadata=None, description=description)
        writer.write(noise(8, 16), photometric="minisblack", metadata=None)

    with pytest.raises(BadFile, match=r"page 0: 8 x 8 pixels of type uint16; page 1: 8 x 16 pixels"):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)


def test_failed_decoding_leaves_no_files(write_tiff: WriteTiff, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = write_tiff(noise(5, 64, 64), compression="zlib", metadata={"axes": "ZYX"})
    with tifffile.TiffFile(path) as file:
        location = file.pages[3].dataoffsets[0]
    data = bytearray(path.read_bytes())
    data[location : location + 40] = bytes(40)
    path.write_bytes(data)

    with pytest.raises(BadFile, match="decoding the pixels failed"):
        stack_reader.read(path, DEFAULT_SELECTION, LIMIT, scratch)
    assert not list(scratch.iterdir())


OPENED_PATHS: list[str] = []


def _record_opened_path(event: str, arguments: tuple[Any, ...]) -> None:
    if event in {"open", "os.listdir", "os.scandir", "glob.glob", "socket.connect"}:
        OPENED_PATHS.append(str(arguments[0]))


@pytest.fixture(scope="session")
def _audit_hook() -> None:
    sys.addaudithook(_record_opened_path)


@pytest.fixture
def opened_paths(_audit_hook: None) -> Iterator[list[str]]:
    """Return a list of the files that are opened and the folders that are listed during the test."""
    OPENED_PATHS.clear()
    yield OPENED_PATHS
    OPENED_PATHS.clear()


def write_tiff_that_references(path: Path, other: str) -> None:
    """Write an OME-TIFF with three planes whose XML refers to another file for the second plane."""
    planes = "".join(
        f'<TiffData IFD="{index}" FirstZ="{index}" PlaneCount="1">'
        f'<UUID FileName="{name}">urn:uuid:{number}</UUID></TiffData>'
        for index, (name, number) in enumerate([(path.name, 1), (other, 2), (path.name, 1)])
    )
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:1"><Image ID="Image:0"><Pixels'
        ' ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="11" SizeY="9" SizeZ="3" SizeC="1" SizeT="1">'
        f"{planes}</Pixels></Image></OME>"
    )
    tifffile.imwrite(path, noise(3, 9, 11), photometric="minisblack", metadata=None, description=xml)


@pytest.mark.parametrize("other", ["secret.tif", "../secret.tif", "{folder}/secret.tif"])
def test_files_referenced_by_ome_xml_are_never_opened(tmp_path: Path, opened_paths: list[str], other: str) -> None:
    folder = tmp_path / "request"
    folder.mkdir()
    for location in (tmp_path, folder):
        tifffile.imwrite(location / "secret.tif", np.full((3, 9, 11), 999, np.uint16), photometric="minisblack")
    path = folder / "evil.ome.tif"
    write_tiff_that_references(path, other.format(folder=folder))
    # From version 2026.11 on, tifffile follows references only to files in the same folder.
    assert (tifffile.imread(path) == 999).any() or ".." in other, "tifffile itself follows the reference"
    opened_paths.clear()

    with pytest.raises(AmbiguousAxes, match=r"several files.*axes="):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    stack = read_pixels(path, Selection(axes="ZYX"))

    np.testing.assert_array_equal(stack[0], noise(3, 9, 11))
    assert not any("secret" in name for name in opened_paths)
    assert {name for name in opened_paths if str(tmp_path) in name} == {str(path)}


@pytest.mark.parametrize("axes", [None, "ZYXS"])
def test_ome_does_not_have_to_specify_the_samples_per_pixel(tmp_path: Path, axes: str | None) -> None:
    path, stack = tmp_path / "rgb.ome.tif", noise(4, 9, 11, 3, dtype="uint8")
    tifffile.imwrite(path, stack, ome=True, photometric="rgb", metadata={"axes": "ZYXS"})
    with tifffile.TiffFile(path) as tiff:
        xml = tiff.ome_metadata or ""
    without_samples = xml.replace(' SamplesPerPixel="3"', "")
    assert without_samples != xml
    tifffile.imwrite(path, stack, photometric="rgb", metadata=None, description=without_samples.encode())

    assert stack_reader.inspect(path, Selection(axes=axes), LIMIT).channels == ("red", "green", "blue")
    np.testing.assert_array_equal(read_pixels(path, Selection(axes=axes)), np.moveaxis(stack, -1, 0))


@pytest.mark.parametrize("change", [("XYZCT", "XYZ"), ('SizeX="11"', 'SizeX="12"'), ('SizeZ="5"', 'SizeZ="4"')])
def test_axes_override_ome_xml_that_contradicts_the_pages(tmp_path: Path, change: tuple[str, str]) -> None:
    path, stack = tmp_path / "stack.ome.tif", noise(5, 9, 11)
    tifffile.imwrite(path, stack, ome=True, photometric="minisblack", metadata={"axes": "ZYX"})
    with tifffile.TiffFile(path) as tiff:
        xml = (tiff.ome_metadata or "").replace("XYCZT", "XYZCT").replace(*change)
    tifffile.imwrite(path, stack, photometric="minisblack", metadata=None, description=xml.encode())

    with pytest.raises(BadFile, match="OME-XML"):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZYX"))[0], stack)


def test_ome_images_of_one_plane_each_are_not_reduced_to_the_first(tmp_path: Path) -> None:
    path, stack = tmp_path / "stack.ome.tif", noise(5, 9, 11)
    with tifffile.TiffWriter(path, ome=True) as writer:
        for plane in stack:
            writer.write(plane, photometric="minisblack")

    with pytest.raises(AmbiguousAxes, match=r"5 images of one plane each.*axes=ZYX"):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZYX"))[0], stack)


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_ome_that_describes_only_a_part_of_the_planes_is_not_reduced_to_them(
    tmp_path: Path, compression: str | None
) -> None:
    path, stack = tmp_path / "stack.ome.tif", noise(6, 9, 11)
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0"'
        ' DimensionOrder="XYZCT" Type="uint16" SizeX="11" SizeY="9" SizeZ="4" SizeC="1" SizeT="1" PhysicalSizeX="0.2"'
        ' PhysicalSizeY="0.2" PhysicalSizeZ="0.5"><TiffData/></Pixels></Image></OME>'
    )
    with tifffile.TiffWriter(path) as writer:
        for index, plane in enumerate(stack):
            # The last pages have other tags than the first ones.
            options = {"compression": compression} if index > 3 else {"description": xml} if index == 0 else {}
            writer.write(plane, photometric="minisblack", metadata=None, contiguous=False, **options)
        writer.write(stack[0, ::3, ::3], photometric="minisblack", metadata=None, subfiletype=1)

    with pytest.raises(AmbiguousAxes, match="describes only 4 of 6 planes"):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)

    # The thumbnail is not a plane of the image.
    path.write_bytes(path.read_bytes().replace(b'SizeZ="4"', b'SizeZ="6"'))
    np.testing.assert_array_equal(read_pixels(path)[0], stack)
    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).voxel_size == VoxelSize(0.5, 0.2, 0.2)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 3), (1, 7)])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_stacks_in_one_file_are_not_reduced_to_the_largest(
    tmp_path: Path, lengths: tuple[int, ...], compression: str | None
) -> None:
    path, stack = tmp_path / "stacks.tif", noise(sum(lengths), 9, 11)
    with tifffile.TiffWriter(path) as writer:
        for index, part in enumerate(np.split(stack, np.cumsum(lengths)[:-1])):
            writer.write(part, photometric="minisblack", compression=compression if index else None)

    with pytest.raises(AmbiguousAxes, match="axes="):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZYX"))[0], stack)
    if len(set(lengths)) == 1:
        np.testing.assert_array_equal(read_pixels(path, Selection(axes="TZYX", time=1))[0], stack[4:8])


@pytest.mark.parametrize("compressions", [(None, "zlib"), ("zlib", None, "lzw")])
def test_imagej_pages_may_differ_in_compression(tmp_path: Path, compressions: tuple[str | None, ...]) -> None:
    path, stack = tmp_path / "stack.tif", noise(6, 9, 11)
    with tifffile.TiffWriter(path) as writer:
        for index, plane in enumerate(stack):
            description = "" if index else "ImageJ=1.54f\nimages=6\nslices=3\nchannels=2\n"
            compression = compressions[index % len(compressions)]
            writer.write(
                plane, photometric="minisblack", metadata=None, description=description, compression=compression
            )

    np.testing.assert_array_equal(read_pixels(path), stack.reshape(3, 2, 9, 11).swapaxes(0, 1))


@pytest.mark.parametrize("orientation", range(9))
def test_orientation_tag_is_noted_and_not_applied(write_tiff: WriteTiff, orientation: int) -> None:
    stack = noise(3, 9, 11)
    path = write_tiff(stack, metadata={"axes": "ZYX"}, extratags=[(274, 3, 1, orientation, True)])
    notes = " ".join(stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).notes)
    assert (f"Orientation is {orientation}" in notes) == (orientation > 1)
    np.testing.assert_array_equal(read_pixels(path)[0], stack)


@pytest.mark.parametrize(("value", "is_noted"), [("-9999", True), ("65535 ", True), ("nan", False), ("0", False)])
def test_values_that_the_file_marks_as_missing_are_noted(write_tiff: WriteTiff, value: str, is_noted: bool) -> None:
    path = write_tiff(noise(3, 9, 11, dtype="f4"), extratags=[(42113, "s", 0, value, True)])
    notes = " ".join(stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).notes)
    assert (f"pixels with the value {value.strip()} as missing" in notes) == is_noted


@pytest.mark.parametrize("tag_type", [1, 2, 7])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_ome_xml_in_another_encoding_is_read_or_refused(tmp_path: Path, encoding: str, tag_type: int) -> None:
    path, stack = tmp_path / "stack.tif", noise(4, 9, 11)
    tifffile.imwrite(path, stack, ome=True, metadata={"axes": "CYX"})
    with tifffile.TiffFile(path) as tiff:
        xml = (tiff.ome_metadata or "").encode(encoding)
    tag = (270, tag_type, len(xml), xml, True)
    tifffile.imwrite(path, stack, photometric="minisblack", metadata=None, extratags=[tag])
    if encoding == "utf-8-sig" and tag_type == 2:
        assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).axes == "CYX"
        return
    with pytest.raises(AmbiguousAxes, match=r"not stored as text in UTF-8.*axes="):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZYX"))[0], stack)


def write_stk(path: Path, stack: NDArray[Any], distances: list[int], wavelengths: list[int]) -> None:
    """Write a MetaMorph stack [N, Y, X]: one page, and tags with the distances (um) and wavelengths (nm) of planes."""
    planes = [(distance % 2**32, 1, 2459000, 1000 * index, 2459000, 0) for index, distance in enumerate(distances)]
    # The counts are numbers of properties and planes, not of values, which are written at the end of the file.
    tags: dict[int, tuple[int, int, Any]] = {
        33628: (4, 2, [(0, 0), (0, 0)]),
        33629: (5, len(stack), planes),
        33630: (5, len(stack), [(wavelength, 1) for wavelength in wavelengths]),
    }
    extra_tags = [(code, kind, count, [1] * count * (kind - 3), True) for code, (kind, count, _) in tags.items()]
    tifffile.imwrite(path, stack[0], photometric="minisblack", metadata=None, byteorder="<", extratags=extra_tags)
    content = bytearray(path.read_bytes())
    assert content.endswith(stack[0].tobytes())
    content += stack[1:].tobytes()
    for code, (kind, count, values) in tags.items():
        position = content.index(struct.pack("<HHI", code, kind, count))
        content[position + 8 : position + 12] = struct.pack("<I", len(content))
        content += np.array(values, "<u4").tobytes()
    path.write_bytes(content)


@pytest.mark.parametrize("distances", [[2, 2, 2, 2], [0, 2, 2, 2]])
def test_metamorph_planes_with_distances_are_z(tmp_path: Path, distances: list[int]) -> None:
    path, stack = tmp_path / "stack.stk", noise(4, 9, 11, dtype="uint16")
    write_stk(path, stack, distances, [520] * 4)
    description = stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    assert (description.container, description.axes) == ("MetaMorph STK", "ZYX")
    np.testing.assert_array_equal(read_pixels(path)[0], stack)


@pytest.mark.parametrize(
    ("distances", "wavelengths", "reason"),
    [
        ([2, 2, 2, 2], [520, 520, 620, 620], "2 different wavelengths"),
        ([0, 0, 0, 0], [405, 520, 620, 700], "4 different wavelengths"),
        ([0, 2, 0, 2], [520] * 4, "several stacks"),
        ([2, 2, -2, 2], [520] * 4, "several stacks"),
    ],
)
def test_metamorph_planes_of_several_stacks_are_refused_without_axes(
    tmp_path: Path, distances: list[int], wavelengths: list[int], reason: str
) -> None:
    path, stack = tmp_path / "stack.stk", noise(4, 9, 11, dtype="uint16")
    write_stk(path, stack, distances, wavelengths)
    with pytest.raises(AmbiguousAxes, match=reason):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="CYX", channel=2))[0, 0], stack[2])


def write_micromanager_pages(path: Path, stack: NDArray[Any], positions: list[tuple[int, int]]) -> None:
    """Write pages [N, Y, X] with the positions (z, channel) of Micro-Manager, but without its file header."""
    with tifffile.TiffWriter(path) as writer:
        for plane, (z, channel) in zip(stack, positions, strict=True):
            text = json.dumps({"SliceIndex": z, "ChannelIndex": channel, "FrameIndex": 0}).encode()
            tag = (51123, 2, len(text), text, True)
            writer.write(plane, photometric="minisblack", metadata=None, extratags=[tag], contiguous=False)


def test_pages_of_micromanager_without_header_are_arranged_by_their_own_positions(tmp_path: Path) -> None:
    path, stack = tmp_path / "stack.tif", noise(6, 9, 11)
    positions = [(z, channel) for channel in (1, 0) for z in (2, 0, 1)]
    write_micromanager_pages(path, stack, positions)
    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).axes == "ZCYX"
    for index, (z, channel) in enumerate(positions):
        np.testing.assert_array_equal(read_pixels(path, Selection(channel=channel))[0, z], stack[index])


@pytest.mark.parametrize("positions", [[(0, 0)] * 4, [(0, 0), (1, 0), (0, 1), (4, 1)]])
def test_pages_of_micromanager_with_unusable_positions_need_axes(
    tmp_path: Path, positions: list[tuple[int, int]]
) -> None:
    path, stack = tmp_path / "stack.tif", noise(4, 9, 11)
    write_micromanager_pages(path, stack, positions)
    with pytest.raises(AmbiguousAxes, match="Micro-Manager"):
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    np.testing.assert_array_equal(read_pixels(path, Selection(axes="ZYX"))[0], stack)


IMAGEJ_ORDERS = {"xyczt": "tzcyx", "xyzct": "tczyx", "XYCTZ": "ztcyx", "tzc": "cztyx"}


@pytest.mark.parametrize("order", IMAGEJ_ORDERS)
def test_order_of_a_hyperstack_may_name_x_and_y(write_tiff: WriteTiff, order: str) -> None:
    series = noise(3, 2, 4, 9, 11)
    planes = np.einsum(f"tczyx->{IMAGEJ_ORDERS[order]}", series).reshape(-1, 9, 11)
    description = f"ImageJ=1.54f\nimages=24\nchannels=2\nslices=4\nframes=3\nhyperstack=true\norder={order}\n"
    path = write_tiff(planes, description=description, metadata=None)

    np.testing.assert_array_equal(read_pixels(path, Selection(time=2)), series[2])


def test_unknown_order_of_a_hyperstack_is_an_error(write_tiff: WriteTiff) -> None:
    description = "ImageJ=1.54f\nimages=6\nchannels=2\nslices=3\nhyperstack=true\norder=xyzcw\n"
    path = write_tiff(noise(6, 9, 11), description=description, metadata=None)

    with pytest.raises(BadFile, match="order=zcw, which is not an order of c, z and t"):
        read_pixels(path)


def test_planes_in_subifds_are_an_error_and_reduced_copies_are_not(tmp_path: Path) -> None:
    stack = noise(3, 16, 18)
    for name, sub_pages in (("planes.tif", stack[1:]), ("copies.tif", stack[1:, ::2, ::2])):
        with tifffile.TiffWriter(tmp_path / name) as writer:
            writer.write(stack[0], subifds=2, photometric="minisblack", metadata=None)
            for page in sub_pages:
                writer.write(page, photometric="minisblack", metadata=None)

    np.testing.assert_array_equal(read_pixels(tmp_path / "copies.tif")[0, 0], stack[0])
    with pytest.raises(BadFile, match="refers to 2 other images of the same size"):
        read_pixels(tmp_path / "planes.tif")


def test_note_if_ome_declares_another_pixel_type(write_tiff: WriteTiff) -> None:
    description = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0"'
        ' DimensionOrder="XYZCT" Type="{}" SizeX="11" SizeY="9" SizeZ="3" SizeC="1" SizeT="1"><TiffData/></Pixels>'
        "</Image></OME>"
    )
    for pixel_type, dtype, is_noted in (("int16", "u2", True), ("uint16", "u2", False), ("float", "f4", False)):
        path = write_tiff(noise(3, 9, 11, dtype=dtype), description=description.format(pixel_type), metadata=None)
        notes = stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).notes

        assert any("declares pixels of type int16, but the pages have the type uint16" in n for n in notes) == is_noted
