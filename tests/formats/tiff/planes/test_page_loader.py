"""Pages of one size and data type are one stack, however they are stored and however they were appended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pixels import noise

from service.core.errors import BadFile
from service.core.types import Selection
from service.formats import stack_reader

LIMIT = 2**24
PAGE_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "compressions": [{}, {"compression": "zlib"}, {"compression": "lzw", "predictor": True}],
    "strips": [{"rowsperstrip": 3}, {"rowsperstrip": 30}, {}],
    "tiles": [{"tile": (16, 16)}, {}, {"tile": (32, 16), "compression": "zstd"}],
    "resolutions and dates": [{"resolution": (3, 4)}, {"datetime": True, "software": "a"}, {}],
}


def write_pages(path: Path, stack: NDArray[Any], options: list[dict[str, Any]], **file_options: Any) -> Path:
    """Write a stack page by page. Page i has the options i modulo the number of options."""
    with tifffile.TiffWriter(path, **file_options) as writer:
        for index, plane in enumerate(stack):
            writer.write(plane, **{"photometric": "minisblack", **options[index % len(options)]})
    return path


def read_pixels(path: Path, **selection: Any) -> NDArray[Any]:
    return stack_reader.read(path, Selection(**selection), LIMIT).read_all()


@pytest.mark.parametrize("options", PAGE_OPTIONS.values(), ids=PAGE_OPTIONS.keys())
@pytest.mark.parametrize("metadata", [{"metadata": None}, {}, {"metadata": None, "description": "a plane"}])
def test_pages_may_differ_in_all_tags_but_size_and_type(
    tmp_path: Path, options: list[dict[str, Any]], metadata: dict[str, Any]
) -> None:
    stack = noise(7, 40, 50)
    path = write_pages(tmp_path / "stack.tif", stack, [{**metadata, **page_options} for page_options in options])

    np.testing.assert_array_equal(read_pixels(path)[0], stack)
    np.testing.assert_array_equal(read_pixels(path, axes="TYX", time=5)[0, 0], stack[5])
    assert any("read as z planes" in note for note in stack_reader.inspect(path, Selection(), LIMIT).notes)


def test_inverted_pages_among_others_are_refused(tmp_path: Path) -> None:
    options = [{"metadata": None}, {"metadata": None, "photometric": "miniswhite"}]
    path = write_pages(tmp_path / "stack.tif", noise(4, 9, 11), options)
    with pytest.raises(BadFile, match="stored inverted"):
        read_pixels(path)


def test_color_pages_may_differ_in_compression(tmp_path: Path) -> None:
    stack = noise(4, 9, 11, 3, dtype="uint8")
    path = write_pages(
        tmp_path / "stack.tif", stack, [{"photometric": "rgb"}, {"photometric": "rgb", "compression": "zlib"}]
    )

    np.testing.assert_array_equal(read_pixels(path, axes="ZYXS"), np.moveaxis(stack, -1, 0))


def test_strips_of_a_page_may_be_scattered(tmp_path: Path) -> None:
    """The strips of the first page are contiguous, those of the second are in reverse order."""
    path, stack = tmp_path / "stack.tif", noise(2, 8, 11)
    write_pages(path, stack, [{"rowsperstrip": 4, "metadata": None}])
    with tifffile.TiffFile(path) as tiff:
        first, second = tiff.pages[1].dataoffsets
        tag = tiff.pages[1].aspage().tags["StripOffsets"].valueoffset
    content = bytearray(path.read_bytes())
    content[first:second], content[second : second + 88] = content[second : second + 88], content[first:second]
    content[tag : tag + 8] = np.array([second, first], np.uint32).tobytes()
    path.write_bytes(content)

    np.testing.assert_array_equal(read_pixels(path)[0], stack)


@pytest.mark.parametrize("container", [{"imagej": True}, {}])
def test_pixels_may_be_stored_in_another_order_than_the_pages(tmp_path: Path, container: dict[str, Any]) -> None:
    path, stack = tmp_path / "stack.tif", noise(6, 8, 11)
    tifffile.imwrite(path, stack, **container, photometric="minisblack", metadata={"axes": "ZYX"})
    with tifffile.TiffFile(path) as tiff:
        positions = [page.aspage().tags["StripOffsets"].valueoffset for page in tiff.pages]
        offsets = [page.dataoffsets[0] for page in tiff.pages]
        byteorder = tiff.byteorder
    content = bytearray(path.read_bytes())
    for position, offset in zip(positions[1:], offsets[:0:-1], strict=True):
        content[position : position + 4] = np.array([offset], f"{byteorder}u4").tobytes()
    path.write_bytes(content)

    np.testing.assert_array_equal(read_pixels(path)[0], stack[[0, 5, 4, 3, 2, 1]])


@pytest.mark.parametrize("other", [np.zeros((8, 16), np.uint16), np.zeros((8, 11), np.int16), noise(8, 11, 3)])
@pytest.mark.parametrize("metadata", [{"metadata": None}, {}])
def test_pages_of_another_size_or_type_are_named(tmp_path: Path, other: NDArray[Any], metadata: dict[str, Any]) -> None:
    path = tmp_path / "stack.tif"
    with tifffile.TiffWriter(path) as writer:
        for plane in [*noise(3, 8, 11), other, *noise(2, 8, 11)]:
            photometric = "rgb" if plane.ndim > 2 else "minisblack"
            writer.write(plane, photometric=photometric, **metadata)

    for selection in (Selection(), Selection(axes="ZYX")):
        with pytest.raises(BadFile, match=r"pages 0 to 2, 4 to 5: 8 x 11 pixels of type uint16; page 3: 8 x 1"):
            stack_reader.inspect(path, selection, LIMIT)


@pytest.mark.parametrize("metadata", [{"metadata": None}, {}])
def test_overviews_marked_as_reduced_copies_are_not_planes(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path, stack = tmp_path / "stack.tif", noise(3, 32, 32)
    with tifffile.TiffWriter(path) as writer:
        writer.write(stack[0, ::4, ::4], photometric="minisblack", subfiletype=1, **metadata)
        for index, plane in enumerate(stack):
            compression = "zlib" if index else None
            writer.write(plane, photometric="minisblack", compression=compression, **metadata)

    np.testing.assert_array_equal(read_pixels(path)[0], stack)


def make_page_options() -> st.SearchStrategy[dict[str, Any]]:
    layouts = st.one_of(
        st.just({}),
        st.builds(lambda rows: {"rowsperstrip": rows}, st.integers(1, 24)),
        st.builds(lambda y, x: {"tile": (16 * y, 16 * x)}, st.integers(1, 2), st.integers(1, 2)),
    )
    codecs = st.sampled_from([None, "zlib", "lzw", "zstd", "packbits", "lzma"])
    predictors = st.booleans()
    descriptions = st.one_of(
        st.just({"metadata": None}),
        st.just({}),
        st.builds(lambda text: {"metadata": None, "description": text}, st.sampled_from(["", "plane", "z=3"])),
        st.builds(lambda text: {"metadata": {"note": text}}, st.sampled_from(["a", "b"])),
    )
    tags = st.sampled_from([{}, {"resolution": (2, 3)}, {"software": "x"}, {"datetime": True}, {"photometric": 1}])

    def combine(
        layout: dict[str, Any], codec: str | None, predictor: bool, description: dict[str, Any], tag: dict[str, Any]
    ) -> dict[str, Any]:
        predicted = {"predictor": True} if predictor and codec in {"zlib", "lzw", "zstd", "lzma"} else {}
        return {**layout, "compression": codec, **predicted, **description, **tag}

    return st.builds(combine, layouts, codecs, predictors, descriptions, tags)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stacks_written_page_by_page_are_read_completely(data: st.DataObject, tmp_path: Path) -> None:
    dtype = data.draw(st.sampled_from(["u1", "u2", "i2", "u4", "f4", "f8"]))
    count, height, width = data.draw(st.tuples(st.integers(2, 6), st.integers(1, 40), st.integers(1, 40)))
    stack = noise(count, height, width, dtype=dtype)
    options = data.draw(st.lists(make_page_options(), min_size=1, max_size=count))
    file_options = {"byteorder": data.draw(st.sampled_from("<>")), "bigtiff": data.draw(st.booleans())}
    path = tmp_path / "stack.tif"
    if data.draw(st.booleans()):
        write_pages(path, stack, options, **file_options)
    else:
        path.unlink(missing_ok=True)
        for index, plane in enumerate(stack):
            page_options = {"photometric": "minisblack", **options[index % len(options)]}
            options_for_file = {"append": True} if path.exists() else file_options
            tifffile.imwrite(path, plane, **page_options, **options_for_file)

    assert stack_reader.inspect(path, Selection(), LIMIT).shape == (1, *stack.shape)
    np.testing.assert_array_equal(read_pixels(path)[0], stack)
    np.testing.assert_array_equal(read_pixels(path, axes="ZYX")[0], stack)


@given(
    lengths=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    kind=st.sampled_from(["imagej", "ome", "shaped"]),
    byteorder=st.sampled_from("<>"),
    options=st.sampled_from(
        [
            {},
            {"compression": "zlib"},
            {"rowsperstrip": 5},
            {"tile": (16, 16)},
            {"compression": "lzw", "rowsperstrip": 4},
        ]
    ),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hyperstacks_are_read_in_the_declared_order(
    lengths: tuple[int, int, int], kind: str, byteorder: str, options: dict[str, Any], tmp_path: Path
) -> None:
    stack = noise(*lengths, 9, 20)
    axes = "TZCYX" if kind == "imagej" else "TCZYX"
    container = {} if kind == "shaped" else {kind: True}
    path = tmp_path / "stack.tif"
    tifffile.imwrite(
        path, stack, **container, photometric="minisblack", byteorder=byteorder, metadata={"axes": axes}, **options
    )

    ordered = stack.swapaxes(1, 2) if kind == "imagej" else stack
    for time in range(lengths[0]):
        np.testing.assert_array_equal(read_pixels(path, time=time), ordered[time])
