"""TIFF in: files made here, in every container, codec and order that users have."""

from __future__ import annotations

import os
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
ALL = Selection()

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(array, **options of tifffile.imwrite) -> path."""

    def write(pixels: NDArray[Any], name: str = "stack.tif", **options: Any) -> Path:
        path = tmp_path / name
        options.setdefault("photometric", "minisblack")
        tifffile.imwrite(path, pixels, **options)
        return path

    return write


def pixels(path: Path, selection: Selection = ALL, scratch: Path | None = None) -> NDArray[Any]:
    return stack_reader.read(path, selection, LIMIT, scratch).array()


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"])
def test_every_type_in_either_byte_order(make: Make, dtype: str, byteorder: str) -> None:
    stack = noise(3, 9, 11, dtype=dtype)
    path = make(stack, byteorder=byteorder, metadata={"axes": "ZYX"})

    volume = stack_reader.read(path, ALL, LIMIT)

    assert volume.dtype == np.dtype(dtype)
    assert volume.array().dtype.isnative
    np.testing.assert_array_equal(volume.array()[0], stack)
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
@pytest.mark.parametrize("in_file", [False, True])
def test_every_codec_and_arrangement(make: Make, tmp_path: Path, name: str, in_file: bool) -> None:
    stack = noise(13, 300, 300) if name == "in several threads" else noise(3, 40, 50)
    path = make(stack, metadata={"axes": "ZYX"}, **CODECS[name])

    np.testing.assert_array_equal(pixels(path, scratch=tmp_path if in_file else None)[0], stack)


def test_one_bit_pixels_become_zero_and_one(make: Make) -> None:
    stack = noise(3, 9, 11) > 60
    path = make(stack, metadata={"axes": "ZYX"})

    assert stack_reader.inspect(path, ALL, LIMIT).dtype == "bool"
    assert pixels(path).dtype == np.uint8
    np.testing.assert_array_equal(pixels(path)[0], stack)


def test_complex_pixels_are_refused(make: Make) -> None:
    with pytest.raises(BadFile, match="complex64"):
        stack_reader.inspect(make(np.zeros((3, 9, 11), np.complex64)), ALL, LIMIT)


@pytest.mark.parametrize("compression", [None, "adobe_deflate"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_an_imagej_hyperstack_channel_by_channel_and_time_by_time(
    make: Make, compression: str | None, byteorder: str
) -> None:
    stack = noise(2, 4, 3, 9, 11)
    path = make(
        stack,
        imagej=True,
        byteorder=byteorder,
        compression=compression,
        resolution=(4, 5),
        metadata={"axes": "TZCYX", "spacing": 0.5, "unit": "um"},
    )

    found = stack_reader.inspect(path, Selection(time=0), LIMIT)

    assert (found.container, found.axes, found.times, len(found.channels)) == ("ImageJ TIFF", "TZCYX", 2, 3)
    assert found.shape == (3, 4, 9, 11)
    assert found.voxel_size == VoxelSize(0.5, 0.2, 0.25)
    for time in range(2):
        np.testing.assert_array_equal(pixels(path, Selection(time=time)), stack[time].swapaxes(0, 1))
        for channel in range(3):
            one = pixels(path, Selection(time=time, channel=channel))
            np.testing.assert_array_equal(one, stack[time, :, channel][np.newaxis])


def test_several_time_points_are_described_but_read_only_by_choice(make: Make) -> None:
    path = make(noise(5, 9, 11), metadata={"axes": "TYX"}, ome=True)

    found = stack_reader.inspect(path, ALL, LIMIT)

    assert (found.shape, found.times) == ((1, 1, 9, 11), 5)
    assert "time=0 to time=4" in found.problem
    assert "axes=ZYX" in found.problem
    with pytest.raises(BadParameter, match=r"time=0 to time=4.*axes=ZYX"):
        stack_reader.read(path, ALL, LIMIT)
    assert stack_reader.read(path, Selection(axes="ZYX"), LIMIT).shape == (1, 5, 9, 11)


def test_a_range_of_time_points_is_described_and_not_read(make: Make) -> None:
    path = make(noise(5, 3, 9, 11), metadata={"axes": "TZYX"}, imagej=True)
    for times, expected in ((TimeRange(), (0, 5)), (TimeRange(1, 3), (1, 3)), (TimeRange(4), (4, 5))):
        found = stack_reader.inspect(path, Selection(time=times), LIMIT)
        assert (found.shape, found.time_points, found.problem) == ((1, 3, 9, 11), expected, "")
    for times in (TimeRange(2, 9), TimeRange(5), TimeRange(7, 8)):
        with pytest.raises(BadParameter, match="time=0 to time=4"):
            stack_reader.inspect(path, Selection(time=times), LIMIT)
    with pytest.raises(BadParameter, match="time=all"):
        stack_reader.read(path, Selection(time=TimeRange()), LIMIT)


def test_colours_of_channels(make: Make) -> None:
    pixels = np.zeros((2, 3, 8, 8), np.uint16)
    red_and_cyan = [np.outer(colour, np.arange(256)).astype(np.uint8) for colour in ((1, 0, 0), (0, 1, 1))]
    imagej = make(pixels.swapaxes(0, 1), imagej=True, metadata={"axes": "ZCYX", "LUTs": red_and_cyan})
    assert stack_reader.inspect(imagej, ALL, LIMIT).colours == ("#ff0000", "#00ffff")
    colours = {"Channel": {"Name": ["a", "b"], "Color": [-16776961, 0x00FF00FF]}}
    ome = make(pixels, ome=True, metadata={"axes": "CZYX", **colours})
    assert stack_reader.inspect(ome, ALL, LIMIT).colours == ("#ff0000", "#00ff00")
    assert stack_reader.inspect(make(pixels, metadata={"axes": "CZYX"}), ALL, LIMIT).colours == ("", "")


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
def test_time_intervals(make: Make, metadata: dict[str, Any], interval: TimeInterval | None) -> None:
    kind = "ome" if "TimeIncrement" in metadata else "imagej"
    path = make(noise(2, 3, 9, 11), metadata={"axes": "TZYX", **metadata}, **{kind: True})
    assert stack_reader.inspect(path, ALL, LIMIT).time_interval == interval


@pytest.mark.parametrize("axes", ["ZYX", "CZYX", "ZCYX", "TCZYX", "TZCYX", "ZTCYX", "CTZYX"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_ome_in_every_order(make: Make, axes: str, compression: str | None) -> None:
    lengths = {"T": 2, "C": 3, "Z": 4, "Y": 9, "X": 11}
    stack = noise(*(lengths[axis] for axis in axes))
    path = make(stack, "stack.ome.tif", ome=True, metadata={"axes": axes}, compression=compression)
    here = "".join(axis for axis in "TCZYX" if axis in axes)
    ordered = np.moveaxis(stack, [axes.index(axis) for axis in here], range(len(here)))

    assert stack_reader.inspect(path, ALL, LIMIT).axes == axes
    for time in range(2 if "T" in axes else 1):
        expected = ordered[time] if "T" in axes else ordered
        np.testing.assert_array_equal(pixels(path, Selection(time=time)), expected.reshape(-1, 4, 9, 11))


def test_names_of_channels(make: Make) -> None:
    stack = noise(2, 4, 9, 11)
    path = make(stack, ome=True, metadata={"axes": "CZYX", "Channel": {"Name": ["DAPI", "GFP"]}})

    volume = stack_reader.read(path, Selection(channel="gfp"), LIMIT)

    assert volume.channels == ("GFP",)
    np.testing.assert_array_equal(volume.array()[0], stack[1])
    assert stack_reader.read(path, ALL, LIMIT).channels == ("DAPI", "GFP")


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_colours_are_channels(make: Make, planar: str, compression: str | None) -> None:
    stack = noise(4, 9, 11, 3, dtype="uint8") if planar == "contig" else noise(4, 3, 9, 11, dtype="uint8")
    axes = "ZYXS" if planar == "contig" else "ZSYX"
    path = make(stack, photometric="rgb", planarconfig=planar, compression=compression, metadata={"axes": axes})
    channels = np.moveaxis(stack, axes.index("S"), 0)

    assert stack_reader.inspect(path, ALL, LIMIT).channels == ("red", "green", "blue")
    np.testing.assert_array_equal(pixels(path), channels)
    np.testing.assert_array_equal(pixels(path, Selection(channel="green")), channels[1:2])


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_colours_of_several_channels_count_through(make: Make, compression: str | None) -> None:
    stack = noise(2, 4, 9, 11, 3, dtype="uint8")
    path = make(stack, photometric="rgb", metadata={"axes": "CZYXS"}, compression=compression)

    np.testing.assert_array_equal(pixels(path), stack.transpose(0, 4, 1, 2, 3).reshape(6, 4, 9, 11))
    np.testing.assert_array_equal(pixels(path, Selection(channel=5))[0], stack[1, ..., 2])


@pytest.mark.parametrize("options", [{"metadata": None}, {}])
def test_a_plain_stack_of_grey_pages_is_z_and_says_so(make: Make, options: dict[str, Any]) -> None:
    stack = noise(5, 9, 11)
    path = make(stack, **options)

    found = stack_reader.inspect(path, ALL, LIMIT)

    assert (found.axes, found.shape) == ("ZYX", (1, 5, 9, 11))
    assert any("taken for z" in note and "axes=" in note for note in found.notes)
    np.testing.assert_array_equal(pixels(path)[0], stack)
    assert stack_reader.read(path, ALL, LIMIT).notes == found.notes


def test_four_unnamed_dimensions_are_not_guessed(make: Make) -> None:
    stack = noise(2, 5, 9, 11)
    path = make(stack)

    with pytest.raises(AmbiguousAxes, match=r"2 x 5 x 9 x 11.*axes=CZYX"):
        stack_reader.inspect(path, ALL, LIMIT)
    np.testing.assert_array_equal(pixels(path, Selection(axes="CZYX")), stack)
    np.testing.assert_array_equal(pixels(path, Selection(axes="ZCYX")), stack.swapaxes(0, 1))


def test_dimensions_inside_a_page_may_be_anything(make: Make) -> None:
    stack = noise(9, 11, 4, dtype="uint8")
    path = make(stack, photometric="rgb", planarconfig="contig", metadata={"axes": "YXZ"}, extrasamples=[0])

    np.testing.assert_array_equal(pixels(path)[0], np.moveaxis(stack, -1, 0))
    np.testing.assert_array_equal(pixels(path, Selection(axes="YXT", time=2))[0, 0], stack[..., 2])


def test_of_several_images_the_largest_is_read(tmp_path: Path) -> None:
    path, stack = tmp_path / "two.ome.tif", noise(5, 9, 11)
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(stack.max(axis=0), photometric="minisblack", metadata={"axes": "YX", "Name": "projection"})
        writer.write(stack, photometric="minisblack", metadata={"axes": "ZYX", "Name": "volume"})

    assert any("2 images" in note and "'volume'" in note for note in stack_reader.inspect(path, ALL, LIMIT).notes)
    np.testing.assert_array_equal(pixels(path)[0], stack)


def test_a_pyramid_is_read_at_full_resolution(tmp_path: Path) -> None:
    path, stack = tmp_path / "pyramid.ome.tif", noise(5, 32, 32)
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(stack, photometric="minisblack", subifds=1, tile=(16, 16), metadata={"axes": "ZYX"})
        writer.write(stack[:, ::2, ::2], photometric="minisblack", subfiletype=1, tile=(16, 16))

    np.testing.assert_array_equal(pixels(path)[0], stack)


def test_smaller_copies_among_plain_pages_are_left_out(tmp_path: Path) -> None:
    path, stack = tmp_path / "thumbnails.tif", noise(3, 32, 32)
    with tifffile.TiffWriter(path) as writer:
        for plane in stack:
            writer.write(plane, photometric="minisblack", metadata=None)
            for copy in (plane[::2, ::2], plane[::2, 1::2], plane[1::2, 1::2], plane[1::2, ::2]):
                writer.write(copy, photometric="minisblack", metadata=None, subfiletype=1)

    np.testing.assert_array_equal(pixels(path)[0], stack)


def test_the_callers_voxel_size_wins(make: Make) -> None:
    path = make(noise(5, 9, 11), imagej=True, resolution=(4, 4), metadata={"axes": "ZYX", "spacing": 1, "unit": "um"})
    wanted = Selection(voxel_size=VoxelSize(3, 2, 1))

    assert stack_reader.inspect(path, wanted, LIMIT).voxel_size == VoxelSize(3, 2, 1)
    assert stack_reader.inspect(path, wanted, LIMIT).voxel_size_from == "the request"
    assert stack_reader.read(path, wanted, LIMIT).voxel_size == VoxelSize(3, 2, 1)
    assert stack_reader.inspect(path, ALL, LIMIT).voxel_size_from == "ImageJ metadata"


@pytest.mark.parametrize(("unit", "is_known"), [("nm", True), ("pixel", False)])
def test_ome_units(make: Make, unit: str, is_known: bool) -> None:
    sizes = {f"PhysicalSize{axis}": size for axis, size in zip("ZYX", (2.0, 0.5, 0.25), strict=True)}
    units = {f"PhysicalSize{axis}Unit": unit for axis in "ZYX"}
    path = make(noise(5, 9, 11), ome=True, metadata={"axes": "ZYX", **sizes, **units})

    found = stack_reader.inspect(path, ALL, LIMIT)

    assert tuple(found.voxel_size or ()) == (pytest.approx((2e-3, 5e-4, 2.5e-4)) if is_known else ())
    assert found.voxel_size_from == ("OME-XML" if is_known else "not stated")


def test_what_is_stored_plainly_is_mapped_and_the_rest_decoded_once(make: Make, tmp_path: Path) -> None:
    made, scratch, stack = list[int](), tmp_path / "scratch", noise(5, 9, 11)
    plain, packed = make(stack, byteorder=">"), make(stack, "packed.tif", compression="zlib")

    def make_output(nbytes: int) -> int:
        made.append(nbytes)
        return os.open(tmp_path / "raw", os.O_RDWR | os.O_CREAT)

    assert not stack_reader.extract(plain, ALL, LIMIT, make_output, LIMIT).decoded
    assert not made
    assert stack_reader.extract(packed, ALL, LIMIT, make_output, LIMIT).decoded
    assert made == [stack.nbytes]
    assert (tmp_path / "raw").read_bytes() == stack.tobytes()
    stack_reader.read(plain, ALL, LIMIT, scratch)
    assert not scratch.exists()
    volume = stack_reader.read(packed, ALL, LIMIT, scratch)
    assert not list(scratch.iterdir()), "the file for decoded pixels has no name"
    np.testing.assert_array_equal(volume.array()[0], stack)


def test_changing_a_volume_does_not_change_the_file(make: Make) -> None:
    path = make(np.zeros((5, 9, 11), np.uint16))

    stack_reader.read(path, ALL, LIMIT).array()[:] = 7

    assert not pixels(path).any()


@pytest.mark.parametrize("limit", [1, 2 * 5 * 9 * 11 - 1])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_more_than_the_limit_is_refused_before_decoding(make: Make, limit: int, compression: str | None) -> None:
    path = make(noise(5, 9, 11), compression=compression)

    for use in (stack_reader.inspect, stack_reader.read):
        with pytest.raises(TooLarge, match="990 bytes"):
            use(path, ALL, limit)
    assert stack_reader.read(path, ALL, 990).nbytes == 990
    two_channels = make(noise(2, 5, 9, 11), metadata={"axes": "CZYX"}, compression=compression)
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
def test_a_stack_cut_anywhere_is_refused_and_never_read_as_less(make: Make, options: dict[str, Any]) -> None:
    path = make(noise(5, 2, 9, 11), **options)
    whole = path.read_bytes()
    np.testing.assert_array_equal(pixels(path), noise(5, 2, 9, 11).swapaxes(0, 1))

    for end in sorted({*range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1}):
        path.write_bytes(whole[:end])
        try:
            found = stack_reader.read(path, ALL, LIMIT).array()
        except RequestError:
            continue
        np.testing.assert_array_equal(found, noise(5, 2, 9, 11).swapaxes(0, 1), f"cut at byte {end}")


@pytest.mark.parametrize("slices", [2, 9])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_imagej_must_promise_as_many_planes_as_there_are(make: Make, slices: int, compression: str | None) -> None:
    path = make(noise(6, 8, 8), metadata=None, description=f"ImageJ=1.54f\nslices={slices}\n", compression=compression)

    if slices > 6:
        with pytest.raises(BadFile, match="promise 9 planes, but the file holds 6"):
            stack_reader.inspect(path, Selection(axes="ZYX"), LIMIT)
    else:
        with pytest.raises(AmbiguousAxes, match=r"contradict.*axes="):
            stack_reader.inspect(path, ALL, LIMIT)
        np.testing.assert_array_equal(pixels(path, Selection(axes="ZYX"))[0], noise(6, 8, 8))


@pytest.mark.parametrize("axes", ["YZX", "XZY", "YXZ"])
def test_planes_must_lie_in_pages_that_are_decoded(make: Make, axes: str) -> None:
    packed = make(noise(3, 9, 11), "packed.tif", compression="zlib", metadata=None)
    with pytest.raises(BadParameter, match=f"axes={axes}.*each must hold Y and X"):
        stack_reader.inspect(packed, Selection(axes=axes), LIMIT)
    plain = make(noise(3, 9, 11), metadata=None)
    assert sorted(stack_reader.read(plain, Selection(axes=axes), LIMIT).shape) == [1, 3, 9, 11]


@pytest.mark.parametrize(
    ("compression", "count", "complaint"), [("zlib", 0, "no bytes"), (None, 2**32 - 16, "cut short")]
)
def test_a_strip_must_take_as_many_bytes_as_the_file_can_hold(
    make: Make, compression: str | None, count: int, complaint: str
) -> None:
    path = make(np.ones((9, 11), np.uint16), compression=compression, metadata=None)
    with tifffile.TiffFile(path, mode="r+") as written:
        written.pages.first.tags["StripByteCounts"].overwrite(count)

    with pytest.raises(BadFile, match=complaint):
        stack_reader.inspect(path, Selection(), LIMIT)


def test_planes_that_differ_are_no_stack(tmp_path: Path) -> None:
    path = tmp_path / "mixed.tif"
    description = "ImageJ=1.54f\nimages=2\nslices=2\n"
    with tifffile.TiffWriter(path) as writer:
        writer.write(noise(8, 8), photometric="minisblack", metadata=None, description=description)
        writer.write(noise(8, 16), photometric="minisblack", metadata=None)

    with pytest.raises(BadFile, match="Plane 1 is not of the size"):
        stack_reader.inspect(path, ALL, LIMIT)


def test_decoding_that_fails_leaves_nothing_behind(make: Make, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = make(noise(5, 64, 64), compression="zlib", metadata={"axes": "ZYX"})
    with tifffile.TiffFile(path) as file:
        place = file.pages[3].dataoffsets[0]
    data = bytearray(path.read_bytes())
    data[place : place + 40] = bytes(40)
    path.write_bytes(data)

    with pytest.raises(BadFile, match="decoding its pixels failed"):
        stack_reader.read(path, ALL, LIMIT, scratch)
    assert not list(scratch.iterdir())


OPENED: list[str] = []


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event in {"open", "os.listdir", "os.scandir", "glob.glob", "socket.connect"}:
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="session")
def _audited() -> None:
    sys.addaudithook(_note_opened)


@pytest.fixture
def opened(_audited: None) -> Iterator[list[str]]:
    """Every file that is opened and every folder that is listed while the test runs."""
    OPENED.clear()
    yield OPENED
    OPENED.clear()


def naming_another_file(path: Path, other: str) -> None:
    """An OME-TIFF of three planes whose XML says that the second one is in another file."""
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
def test_a_file_that_the_xml_names_is_never_opened(tmp_path: Path, opened: list[str], other: str) -> None:
    folder = tmp_path / "request"
    folder.mkdir()
    for place in (tmp_path, folder):
        tifffile.imwrite(place / "secret.tif", np.full((3, 9, 11), 999, np.uint16), photometric="minisblack")
    path = folder / "evil.ome.tif"
    naming_another_file(path, other.format(folder=folder))
    # From 2026.11 on it does so in the file's folder alone.
    assert (tifffile.imread(path) == 999).any() or ".." in other, "tifffile itself follows the name"
    opened.clear()

    with pytest.raises(AmbiguousAxes, match=r"several files.*axes="):
        stack_reader.inspect(path, ALL, LIMIT)
    stack = pixels(path, Selection(axes="ZYX"))

    np.testing.assert_array_equal(stack[0], noise(3, 9, 11))
    assert not any("secret" in name for name in opened)
    assert {name for name in opened if str(tmp_path) in name} == {str(path)}
