"""Written OME-TIFFs with labels, classes and probabilities, as read by this service and by other readers."""

from __future__ import annotations

import tracemalloc
import uuid
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pixels import noise

from service.core.buffers import allocate_on_disk, release_pages
from service.core.errors import AmbiguousAxes
from service.core.hardware import host
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer

LIMIT = 2**28
DEFAULT_SELECTION = Selection()


@pytest.fixture(params=[False, True], ids=["classic", "big"])
def is_big(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether files are forced to be BigTIFFs, as if a classic TIFF were too small for their pixels."""
    if request.param:
        monkeypatch.setattr(tiff_writer, "_MAX_CLASSIC_TIFF_BYTES", 100)
    return bool(request.param)


def read_pixels(path: Path) -> NDArray[Any]:
    return stack_reader.read(path, DEFAULT_SELECTION, LIMIT).read_all()


def test_other_readers_read_the_same_data(tmp_path: Path, is_big: bool) -> None:
    scores, path = noise(2, 5, 70, 90, dtype="float32"), tmp_path / "scores.ome.tif"
    segmentation = Segmentation(scores, "probabilities", VoxelSize(0.5, 0.2, 0.1), names=("a", "b"))

    tiff_writer.write(segmentation, path)

    with tifffile.TiffFile(path) as file:
        assert file.is_bigtiff == is_big
        assert file.series[0].kind == "ome"
        assert file.series[0].axes == "CZYX"
        np.testing.assert_array_equal(file.asarray(), scores)
        assert file.pages.first.tags["ResolutionUnit"].value == tifffile.RESUNIT.CENTIMETER
        assert file.pages.first.get_resolution("micrometer") == pytest.approx((10, 5))
        imagej = file.imagej_metadata or {}
        assert (imagej["slices"], imagej["channels"], imagej["unit"]) == (5, 2, "cm")
        assert imagej["spacing"] == pytest.approx(0.5e-4)
    with tifffile.TiffFile(path, is_ome=False) as file:
        assert file.series[0].kind == "imagej"
        assert file.series[0].axes == "CZYX"
        np.testing.assert_array_equal(file.asarray(), scores)


def test_failed_write_keeps_the_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(b"old")

    with pytest.raises(tifffile.OmeXmlError):
        tiff_writer.write(Segmentation(np.zeros((2, 3, 4), np.int64), "labels"), path)

    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("labels.ome.tif", b"old")]


# Sizes that contradict each other, such as a pixel 100 times wider than high, are not read back.
pixel_size = st.floats(1e-3, 100)
ratio = st.floats(0.2, 7)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40)),
    voxel_size=st.none() | st.builds(lambda x, y, z: VoxelSize(z * x, y * x, x), pixel_size, ratio, ratio),
    dtype=st.sampled_from(["uint8", "uint16", "uint32"]),
    kind=st.sampled_from(["labels", "classes", "probabilities"]),
    names=st.lists(st.text(max_size=12).map(str.strip), min_size=2, max_size=4)
    | st.just(["background", '<&> "µ"', "edge\0s"]),
)
def test_any_segmentation_is_read_back_unchanged(
    tmp_path: Path, shape: tuple[int, int, int], voxel_size: VoxelSize | None, dtype: str, kind: Any, names: list[str]
) -> None:
    path, channels = tmp_path / "any.ome.tif", tuple(names) if kind == "probabilities" else ()
    array = noise(len(names), *shape, dtype="float32") if channels else noise(*shape, dtype=dtype)

    tiff_writer.write(Segmentation(array, kind, voxel_size, names=channels), path)

    description, volume = (
        stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT),
        stack_reader.read(path, DEFAULT_SELECTION, LIMIT),
    )
    printable = tuple("".join(filter(str.isprintable, name)) for name in channels)
    assert (description.container, volume.channels) == ("OME-TIFF", printable or (kind,))
    assert (volume.dtype, volume.voxel_size) == (array.dtype, voxel_size)
    np.testing.assert_array_equal(volume.read_all(), array if channels else array[None])
    assert [entry.name for entry in tmp_path.iterdir()] == ["any.ome.tif"]


@pytest.mark.usefixtures("is_big")
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("interval", [TimeInterval(5, "min"), TimeInterval(80, "µs"), None])
def test_time_series_keeps_axes_and_interval(tmp_path: Path, kind: Any, interval: TimeInterval | None) -> None:
    axes, names = ("TZYX", ()) if kind == "labels" else ("TCZYX", ("background", "object"))
    lengths = {"T": 3, "C": 2, "Z": 4, "Y": 20, "X": 30}
    array = noise(*(lengths[axis] for axis in axes), dtype="uint16" if kind == "labels" else "float32")
    segmentation = Segmentation(array, kind, VoxelSize(0.5, 0.2, 0.1), names=names, time_interval=interval)
    path = tmp_path / "series.ome.tif"

    tiff_writer.write(segmentation, path)

    description = stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT)
    assert (description.axes, description.stored_shape, description.times) == (axes, array.shape, 3)
    assert (description.voxel_size, description.time_interval) == (VoxelSize(0.5, 0.2, 0.1), interval)
    for time in range(3):
        volume = stack_reader.read(path, Selection(time=time), LIMIT)
        np.testing.assert_array_equal(volume.read_all().reshape(array.shape[1:]), array[time])
    with tifffile.TiffFile(path) as file:
        assert file.series[0].axes == axes
        # ImageJ uses the description that begins with its name.
        imagej_text = file.pages.first.tags.getall(270)[1].value
    imagej = tifffile.tifffile.imagej_description_metadata(imagej_text)
    assert (imagej["frames"], imagej["slices"], imagej.get("channels", 1)) == (3, 4, lengths["C"] if names else 1)
    assert (imagej["hyperstack"], imagej["order"]) == (True, "zct")
    expected_interval = None if interval is None else (interval.length, interval.unit.replace("µ", "u"))
    assert expected_interval == (None if "finterval" not in imagej else (imagej["finterval"], imagej["tunit"]))


def test_files_have_unique_ids_and_a_display_range_for_all_labels(tmp_path: Path) -> None:
    path, identifiers = tmp_path / "labels.ome.tif", set()
    for count in (1, 2**32 - 1, 70):
        tiff_writer.write(Segmentation(noise(2, 3, 4), "labels", count=count), path)
        with tifffile.TiffFile(path) as file:
            assert (file.imagej_metadata or {})["max"] == max(255, count)
            identifiers.add(uuid.UUID(str(file.ome_metadata).partition('UUID="urn:uuid:')[2][:36]))
    assert len(identifiers) == 3


def test_result_that_is_computed_again_has_the_same_bytes() -> None:
    result = Segmentation(noise(2, 3, 4), "labels", count=7)
    contents = [tiff_writer.encode(result, {"source_blake3": digest}) for digest in ("0a", "0a", "0b")]
    assert contents[0] == contents[1] != contents[2]
    assert tiff_writer.encode(result, {"model": "nuclei/1"}) != tiff_writer.encode(result, {"model": "nuclei/1"})


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "<f4", ">f4"])
def test_pages_are_little_endian_zlib_streams(tmp_path: Path, dtype: str) -> None:
    stack, path = noise(3, 60, 70).astype(dtype).transpose(0, 2, 1), tmp_path / "stack.tif"
    tiff_writer.write(Segmentation(stack, "classes"), path)
    content = path.read_bytes()
    with tifffile.TiffFile(path) as file:
        np.testing.assert_array_equal(file.asarray(), stack)
        for page, plane in zip(file.pages, stack, strict=True):
            (offset,), (byte_count,) = page.dataoffsets, page.databytecounts
            little_endian_plane = plane.astype(plane.dtype.newbyteorder("<"))
            assert zlib.decompress(content[offset : offset + byte_count]) == little_endian_plane.tobytes()


@pytest.mark.parametrize(("shape", "is_small"), [((4, 512, 1024), True), ((5, 512, 1024), False)])
def test_only_small_files_are_encoded_in_memory(tmp_path: Path, shape: tuple[int, int, int], is_small: bool) -> None:
    labels, path = noise(*shape), tmp_path / "labels.ome.tif"
    content = tiff_writer.encode(Segmentation(labels, "labels"), PROVENANCE)
    assert (content is not None) == is_small
    if content is not None:
        path.write_bytes(content)
        np.testing.assert_array_equal(tifffile.imread(path), labels)
        assert read_provenance(path)[0] == PROVENANCE


def test_memory_of_mapped_arrays_is_released_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released_arrays = list[Any]()
    monkeypatch.setattr(tiff_writer, "_RELEASE_BYTES", 2**21)
    monkeypatch.setattr(
        tiff_writer, "release_pages", lambda array: (released_arrays.append(array), release_pages(array))
    )
    labels, path = noise(12, 512, 1024), tmp_path / "labels.ome.tif"
    mapped = allocate_on_disk(labels.shape, labels.dtype, tmp_path)
    mapped[:] = labels
    tiff_writer.write(Segmentation(mapped, "labels"), path)
    assert path.stat().st_size < labels.nbytes / 1.5
    assert [array is mapped for array in released_arrays] == [True] * 6
    np.testing.assert_array_equal(tifffile.imread(path), labels)


def test_large_files_are_not_completely_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "count_usable_cores", lambda: 2)
    scores, path = noise(2, 32, 256, 512, dtype="float32"), tmp_path / "scores.ome.tif"
    tracemalloc.start()
    try:
        tiff_writer.write(Segmentation(scores, "probabilities", names=("a", "b")), path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def read_provenance(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the provenance in the OME-XML and that in the description for ImageJ. The file has one image."""
    with tifffile.TiffFile(path) as file:
        root = ElementTree.fromstring(str(file.ome_metadata))
        imagej = file.imagej_metadata or {}
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
    referenced = {element.get("ID") for element in root.iterfind("Image/AnnotationRef")}
    annotations = root.findall("StructuredAnnotations/MapAnnotation")
    assert referenced == {annotation.get("ID") for annotation in annotations}
    assert {annotation.get("Namespace") for annotation in annotations} <= {"stackseg/origin"}
    description = {str(entry.get("K")): entry.text or "" for entry in root.iterfind("StructuredAnnotations/*/Value/M")}
    lines = {name.removeprefix("stackseg_"): str(text) for name, text in imagej.items() if name.startswith("stackseg_")}
    return description, lines


PROVENANCE = {
    "model": "nuclei/1",
    "parameters": '{"overlap": 0.5, "channel": "<DAPI> & \u00b5"}',
    "source": "Stück 1.tif",
}


@pytest.mark.usefixtures("is_big")
def test_provenance_is_stored_in_both_descriptions(tmp_path: Path) -> None:
    labels, path = noise(5, 17, 23), tmp_path / "labels.ome.tif"
    provenance = PROVENANCE | {"warnings": "Too few objects. " * 60}
    tiff_writer.write(Segmentation(labels, "labels", VoxelSize(3, 2, 1), count=7), path, provenance)
    xml_provenance, imagej_provenance = read_provenance(path)
    assert xml_provenance == provenance
    assert imagej_provenance == {
        name: text.strip().replace("µ", "?").replace("ü", "?") for name, text in provenance.items()
    }
    assert stack_reader.inspect(path, DEFAULT_SELECTION, LIMIT).voxel_size == VoxelSize(3, 2, 1)
    np.testing.assert_array_equal(read_pixels(path)[0], labels)


@given(st.dictionaries(st.sampled_from(["model", "source", "warnings"]), st.text(max_size=900)))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_provenance_is_stored(tmp_path: Path, provenance: dict[str, str]) -> None:
    path = tmp_path / "any.ome.tif"
    tiff_writer.write(Segmentation(noise(2, 3, 4), "labels", count=1), path, provenance)
    expected = {name: "".join(filter(str.isprintable, text)) for name, text in provenance.items()}
    assert read_provenance(path)[0] == expected


def test_labels_have_distinct_colors_in_imagej(tmp_path: Path) -> None:
    path = tmp_path / "labels.ome.tif"
    tiff_writer.write(Segmentation(noise(2, 17, 23), "labels", count=7), path)
    with tifffile.TiffFile(path) as file:
        colors = np.reshape(file.pages.first.tags["ColorMap"].value, (3, 256)).T
        assert file.pages.first.photometric == tifffile.PHOTOMETRIC.MINISBLACK
        assert (file.imagej_metadata or {})["max"] == 255
    assert tuple(colors[0]) == (0, 0, 0)
    assert len(np.unique(colors, axis=0)) == 256
    assert np.abs(np.diff(colors[1:].astype(int), axis=0)).max(axis=1).min() > 10_000
    tiff_writer.write(Segmentation(noise(2, 2, 17, 23, dtype="float32"), "probabilities", names=("a", "b")), path)
    with tifffile.TiffFile(path) as file:
        assert "ColorMap" not in file.pages.first.tags
        assert ((file.imagej_metadata or {})["min"], (file.imagej_metadata or {})["max"]) == (0, 1)


@pytest.mark.parametrize(("dtype", "expected"), [("uint8", [True] * 3), ("uint16", [True, False, False])])
def test_all_8_bit_pages_have_the_color_map(tmp_path: Path, dtype: str, expected: list[bool]) -> None:
    # Otherwise, ImageJ opens only the first page.
    path = tmp_path / "classes.ome.tif"
    tiff_writer.write(Segmentation(noise(3, 17, 23, dtype=dtype), "classes"), path)
    with tifffile.TiffFile(path) as file:
        assert ["ColorMap" in page.tags for page in map(file.pages.get, range(3))] == expected


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_tags_are_sorted_and_only_the_description_for_imagej_repeats_a_tag(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "labels.ome.tif"
    tiff_writer.write(Segmentation(noise(2, 17, 23, dtype=dtype), "labels", VoxelSize(3, 2, 1), count=7), path)
    with tifffile.TiffFile(path) as file:
        for number in range(2):
            page = file.pages.get(number)
            codes = [tag.code for tag in sorted(page.tags, key=lambda tag: tag.offset)]
            assert codes == sorted(codes)
            assert [code for code in set(codes) if codes.count(code) > 1] == ([270] if number == 0 else [])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "float16", "float32", "int64", "float64"])
@pytest.mark.parametrize(("shape", "axes"), [((7, 9), "YX"), ((5, 7, 9), "ZYX"), ((5, 2, 7, 9), "ZCYX")])
def test_uncompressed_header_describes_the_pixels_after_it(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], axes: str
) -> None:
    pixels, path = noise(*shape, dtype=dtype), tmp_path / "stack.tif"
    header = tiff_writer.make_uncompressed_header(shape, pixels.dtype, axes)
    path.write_bytes(header + pixels.tobytes())

    with tifffile.TiffFile(path) as file:
        assert (file.series[0].axes, file.series[0].dataoffset) == (axes, len(header))
        np.testing.assert_array_equal(file.asarray(), pixels)
    assert len(header) % pixels.itemsize == 0
    read = read_pixels(path)
    np.testing.assert_array_equal(read.swapaxes(0, 1) if axes == "ZCYX" else read.reshape(shape), pixels)


def test_axes_of_an_uncompressed_header_may_be_unknown(tmp_path: Path) -> None:
    path, shape = tmp_path / "stack.tif", (4, 2, 3, 8, 8)
    path.write_bytes(tiff_writer.make_uncompressed_header(shape, np.dtype("u1"), None) + bytes(1536))
    with pytest.raises(AmbiguousAxes, match="4 x 2 x 3 x 8 x 8"):
        read_pixels(path)
    assert stack_reader.read(path, Selection(axes="ZCTYX", time=1), LIMIT).shape == (2, 4, 8, 8)
