"""OME-TIFF out: labels, classes and probabilities, small and large, as this and other readers see them."""

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

from service.core.buffers import allocate_on_disk, release_pages
from service.core.hardware import host
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer

LIMIT = 2**28
ALL = Selection()


def noise(*shape: int, dtype: str = "uint16", seed: int | None = None) -> NDArray[Any]:
    rng = np.random.default_rng(len(shape) if seed is None else seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 120, shape).astype(dtype)


def pixels(path: Path) -> NDArray[Any]:
    return stack_reader.read(path, ALL, LIMIT).array()


@pytest.mark.parametrize("kind", ["labels", "classes"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_labels_come_back_as_they_were(tmp_path: Path, kind: Any, dtype: str) -> None:
    labels = noise(5, 70, 90, dtype=dtype)
    path = tmp_path / "labels.ome.tif"

    tiff_writer.write(Segmentation(labels, kind, VoxelSize(0.5, 0.2, 0.1), count=119), path)

    found = stack_reader.inspect(path, ALL, LIMIT)
    assert (found.container, found.axes, found.stored_shape) == ("OME-TIFF", "ZYX", (5, 70, 90))
    assert (found.dtype, found.channels, found.notes) == (dtype, (kind,), ())
    assert found.voxel_size == VoxelSize(0.5, 0.2, 0.1)
    np.testing.assert_array_equal(pixels(path)[0], labels)
    assert [entry.name for entry in tmp_path.iterdir()] == ["labels.ome.tif"]


def test_probabilities_keep_the_names_of_their_classes(tmp_path: Path) -> None:
    scores = noise(3, 5, 70, 90, dtype="float32")
    path, names = tmp_path / "scores.ome.tif", ("background", 'nuclei <&> "µ"', "edge\0s")

    tiff_writer.write(Segmentation(scores, "probabilities", None, names=names), path)

    found = stack_reader.inspect(path, ALL, LIMIT)
    assert (found.axes, found.dtype, found.voxel_size) == ("CZYX", "float32", None)
    assert found.channels == ("background", 'nuclei <&> "µ"', "edges")
    np.testing.assert_array_equal(pixels(path), scores)


@pytest.mark.parametrize("bigtiff", [False, True])
def test_other_readers_see_the_same(tmp_path: Path, bigtiff: bool) -> None:
    scores, path = noise(2, 5, 70, 90, dtype="float32"), tmp_path / "scores.ome.tif"
    segmentation = Segmentation(scores, "probabilities", VoxelSize(0.5, 0.2, 0.1), names=("a", "b"))

    tiff_writer.write(segmentation, path, bigtiff=bigtiff)

    with tifffile.TiffFile(path) as file:
        assert file.is_bigtiff == bigtiff
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


def test_writing_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(b"old")

    with pytest.raises(tifffile.OmeXmlError):
        tiff_writer.write(Segmentation(np.zeros((2, 3, 4), np.int64), "labels"), path)

    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("labels.ome.tif", b"old")]


size = st.floats(1e-4, 1e4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40)),
    voxel_size=st.none() | st.builds(VoxelSize, size, size, size),
    dtype=st.sampled_from(["uint8", "uint16", "uint32"]),
    channels=st.none() | st.lists(st.text(max_size=12), min_size=2, max_size=4),
)
def test_whatever_is_written_is_read_the_same(
    tmp_path: Path,
    shape: tuple[int, int, int],
    voxel_size: VoxelSize | None,
    dtype: str,
    channels: list[str] | None,
) -> None:
    path = tmp_path / "any.ome.tif"
    if channels is None:
        array = noise(*shape, dtype=dtype)
        segmentation = Segmentation(array, "labels", voxel_size)
    else:
        array = noise(len(channels), *shape, dtype="float32")
        segmentation = Segmentation(array, "probabilities", voxel_size, names=tuple(channels))

    tiff_writer.write(segmentation, path)
    volume = stack_reader.read(path, ALL, LIMIT)

    assert volume.shape == (array.shape if array.ndim == 4 else (1, *array.shape))
    assert volume.dtype == array.dtype
    assert volume.voxel_size == voxel_size
    np.testing.assert_array_equal(volume.array().reshape(array.shape), array)


@pytest.mark.parametrize("bigtiff", [None, True])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("interval", [TimeInterval(5, "min"), TimeInterval(80, "µs"), None])
def test_a_series_keeps_its_axes_and_interval(
    tmp_path: Path, kind: Any, interval: TimeInterval | None, bigtiff: bool | None
) -> None:
    axes, names = ("TZYX", ()) if kind == "labels" else ("TCZYX", ("background", "object"))
    lengths = {"T": 3, "C": 2, "Z": 4, "Y": 20, "X": 30}
    array = noise(*(lengths[axis] for axis in axes), dtype="uint16" if kind == "labels" else "float32")
    segmentation = Segmentation(array, kind, VoxelSize(0.5, 0.2, 0.1), names=names, time_interval=interval)
    path = tmp_path / "series.ome.tif"

    tiff_writer.write(segmentation, path, bigtiff=bigtiff)

    found = stack_reader.inspect(path, ALL, LIMIT)
    assert (found.axes, found.stored_shape, found.times) == (axes, array.shape, 3)
    assert (found.voxel_size, found.time_interval) == (VoxelSize(0.5, 0.2, 0.1), interval)
    for time in range(3):
        volume = stack_reader.read(path, Selection(time=time), LIMIT)
        np.testing.assert_array_equal(volume.array().reshape(array.shape[1:]), array[time])
    with tifffile.TiffFile(path) as file:
        assert file.series[0].axes == axes
        # ImageJ takes the description that begins with its name.
        description = file.pages.first.tags.getall(270)[1].value
    seen = tifffile.tifffile.imagej_description_metadata(description)
    assert (seen["frames"], seen["slices"], seen.get("channels", 1)) == (3, 4, lengths["C"] if names else 1)
    assert (seen["hyperstack"], seen["order"]) == (True, "zct")
    stated = None if interval is None else (interval.length, interval.unit.replace("µ", "u"))
    assert stated == (None if "finterval" not in seen else (seen["finterval"], seen["tunit"]))


@pytest.mark.parametrize("shape", [(2, 700, 701), (64, 64, 64), (3, 1000, 1000), (1100, 40, 30)])
def test_small_results_are_compressed_as_well_as_large_ones_and_read_alike(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    """Threads compress large ones, and those of many pages are written page by page."""
    labels = np.zeros(shape, np.uint16)
    labels[:, shape[1] // 4 : -5, 3::7] = np.arange(1, shape[0] + 1)[:, None, None]
    path = tmp_path / "labels.ome.tif"
    tiff_writer.write(Segmentation(labels.transpose(0, 2, 1), "labels", VoxelSize(1, 2, 3), count=shape[0]), path)
    assert path.stat().st_size < labels.nbytes / 10
    with tifffile.TiffFile(path) as file:
        assert {page.compression for page in file.pages} == {8}
        assert len(file.pages) == shape[0]
    np.testing.assert_array_equal(tifffile.imread(path), labels.transpose(0, 2, 1))


def test_small_files_of_one_form_have_their_own_pixels_and_numbers(tmp_path: Path) -> None:
    """The pages of such files are laid out once."""
    made = [noise(5, 17, 23, dtype="uint16", seed=seed) for seed in range(3)]
    identifiers = set()
    for count, labels in zip((1, 2**32 - 1, 70), made, strict=True):
        path = tmp_path / f"{count}.ome.tif"
        tiff_writer.write(Segmentation(labels, "labels", VoxelSize(3, 2, 1), count=count), path)
        with tifffile.TiffFile(path) as file:
            np.testing.assert_array_equal(file.asarray(), labels)
            assert (file.imagej_metadata or {})["max"] == max(255, count)
            identifiers.add(str(file.ome_metadata).partition('UUID="urn:uuid:')[2][:36])
    assert len(identifiers) == 3
    assert all(str(uuid.UUID(identifier)) == identifier for identifier in identifiers)


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<f4", ">f4"])
def test_files_hold_pixels_of_either_byte_order(tmp_path: Path, dtype: str, bigtiff: bool) -> None:
    """BigTIFFs are written page by page."""
    stack, path = noise(40, 9, 11).astype(dtype).transpose(0, 2, 1), tmp_path / "stack.tif"
    tiff_writer.write(Segmentation(stack, "classes"), path, bigtiff=bigtiff)
    with tifffile.TiffFile(path) as file:
        assert file.is_bigtiff == bigtiff
        np.testing.assert_array_equal(file.asarray(), stack)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_pages_are_streams_of_zlib(tmp_path: Path, dtype: str) -> None:
    stack, path = noise(3, 60, 70, dtype=dtype), tmp_path / "stack.tif"
    tiff_writer.write(Segmentation(stack, "classes"), path)
    content = path.read_bytes()
    with tifffile.TiffFile(path) as file:
        for page, plane in zip(file.pages, stack, strict=True):
            (begin,), (count,) = page.dataoffsets, page.databytecounts
            assert zlib.decompress(content[begin : begin + count]) == plane.tobytes()


def has_pages_first(path: Path) -> bool:
    """Whether the page directories come before all pixels, as they do in a file from a template."""
    with tifffile.TiffFile(path) as file:
        return max(page.offset for page in file.pages) < min(page.dataoffsets[0] for page in file.pages)


def facts_of(path: Path) -> dict[str, Any]:
    """Everything that readers see of a file but the pixels, the UUID, and white space that pads."""
    with tifffile.TiffFile(path) as file:
        xml = str(file.ome_metadata)
        colours = np.ravel(file.pages.first.tags["ColorMap"].value).tolist()
        resolution = file.pages.first.get_resolution("micrometer")
        layouts = {(page.shape, page.compression, page.predictor, page.rowsperstrip) for page in file.pages}
        imagej = {name: np.asarray(fact).tolist() for name, fact in (file.imagej_metadata or {}).items()}
    number = xml.partition('UUID="urn:uuid:')[2][:36]
    elements = [
        (element.tag, element.attrib, (element.text or "").replace(number, "").strip())
        for element in ElementTree.fromstring(xml.replace(number, "")).iter()
    ]
    found = stack_reader.inspect(path, ALL, LIMIT)
    return {
        "xml": elements,
        "colours": colours,
        "resolution": resolution,
        "layouts": layouts,
        "imagej": imagej,
        "origin": origin_of(path),
        "voxel size": found.voxel_size,
    }


def test_large_files_from_a_template_are_like_those_written_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = noise(23, 300, 401)
    assert labels.nbytes > tiff_writer._SMALL_BYTES
    segmentation = Segmentation(labels, "labels", VoxelSize(0.5, 0.2, 0.1), count=119)
    filled, paged = tmp_path / "filled.ome.tif", tmp_path / "paged.ome.tif"
    tiff_writer.write(segmentation, filled, ORIGIN)
    monkeypatch.setattr(tiff_writer, "_TEMPLATE_PAGES", 0)
    tiff_writer.write(segmentation, paged, ORIGIN)
    assert (has_pages_first(filled), has_pages_first(paged)) == (True, False)
    assert facts_of(filled) == facts_of(paged)
    assert facts_of(filled)["voxel size"] == VoxelSize(0.5, 0.2, 0.1)
    assert facts_of(filled)["origin"][0] == ORIGIN
    for path in (filled, paged):
        np.testing.assert_array_equal(tifffile.imread(path), labels)


@pytest.mark.parametrize(
    ("shape", "bigtiff", "is_from_template"),
    [
        ((3, 900, 1000), None, True),
        ((3, 900, 1000), True, False),
        ((1024, 50, 60), None, True),
        ((1025, 9, 9), None, False),
    ],
)
def test_bigtiffs_and_many_pages_are_written_page_by_page(
    tmp_path: Path, shape: tuple[int, int, int], bigtiff: bool | None, is_from_template: bool
) -> None:
    path = tmp_path / "labels.ome.tif"
    tiff_writer.write(Segmentation(noise(*shape), "labels"), path, bigtiff=bigtiff)
    assert has_pages_first(path) == is_from_template


@pytest.mark.parametrize("bigtiff", [None, False])
def test_what_32_bit_offsets_might_not_reach_is_written_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bigtiff: bool | None
) -> None:
    """The writer would notice an offset that is too large."""
    labels, path = noise(3, 20, 30), tmp_path / "labels.ome.tif"
    monkeypatch.setattr(tiff_writer, "_CLASSIC_BYTES", labels.nbytes - 1)
    assert tiff_writer.encode(Segmentation(labels, "labels")) is None
    tiff_writer.write(Segmentation(labels, "labels"), path, bigtiff=bigtiff)
    assert not has_pages_first(path)
    with tifffile.TiffFile(path) as file:
        assert file.is_bigtiff == (bigtiff is None)
        np.testing.assert_array_equal(file.asarray(), labels)


@pytest.mark.parametrize(
    ("shape", "is_small"), [((4, 512, 1024), True), ((5, 512, 1024), False), ((1025, 9, 9), False)]
)
def test_only_small_files_are_encoded_in_memory(tmp_path: Path, shape: tuple[int, int, int], is_small: bool) -> None:
    labels, path = noise(*shape), tmp_path / "labels.ome.tif"
    content = tiff_writer.encode(Segmentation(labels, "labels"), ORIGIN)
    assert (content is not None) == is_small
    if content is not None:
        path.write_bytes(content)
        np.testing.assert_array_equal(tifffile.imread(path), labels)
        assert origin_of(path)[0] == ORIGIN


def test_arrays_on_disk_are_written_as_they_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[Any]()
    monkeypatch.setattr(tiff_writer, "_RELEASE_BYTES", 2**21)
    monkeypatch.setattr(tiff_writer, "release_pages", lambda array: (released.append(array), release_pages(array)))
    labels, path = noise(12, 512, 1024), tmp_path / "labels.ome.tif"
    mapped = allocate_on_disk(labels.shape, labels.dtype, tmp_path)
    mapped[:] = labels
    tiff_writer.write(Segmentation(mapped, "labels"), path)
    assert [array is mapped for array in released] == [True] * 6
    assert has_pages_first(path)
    np.testing.assert_array_equal(tifffile.imread(path), labels)


def test_large_files_are_not_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 2)
    scores, path = noise(2, 32, 256, 512, dtype="float32"), tmp_path / "scores.ome.tif"
    tracemalloc.start()
    try:
        tiff_writer.write(Segmentation(scores, "probabilities", names=("a", "b")), path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert has_pages_first(path)
    assert peak < path.stat().st_size / 2


def origin_of(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The origin as the OME-XML of the only image has it, and as the description for ImageJ has it."""
    with tifffile.TiffFile(path) as file:
        root = ElementTree.fromstring(str(file.ome_metadata))
        imagej = file.imagej_metadata or {}
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
    referred = {element.get("ID") for element in root.iterfind("Image/AnnotationRef")}
    annotations = root.findall("StructuredAnnotations/MapAnnotation")
    assert referred == {annotation.get("ID") for annotation in annotations}
    assert {annotation.get("Namespace") for annotation in annotations} <= {"stackseg/origin"}
    found = {str(entry.get("K")): entry.text or "" for entry in root.iterfind("StructuredAnnotations/*/Value/M")}
    lines = {name.removeprefix("stackseg_"): str(text) for name, text in imagej.items() if name.startswith("stackseg_")}
    return found, lines


ORIGIN = {"model": "nuclei/1", "parameters": '{"overlap": 0.5, "channel": "<DAPI> & \u00b5"}', "source": "Stück 1.tif"}


@pytest.mark.parametrize("bigtiff", [None, True])
@pytest.mark.parametrize("facts", [1, 60])
def test_files_tell_how_they_were_made(tmp_path: Path, bigtiff: bool | None, facts: int) -> None:
    """Small ones have room for it in their template."""
    labels, path = noise(5, 17, 23), tmp_path / "labels.ome.tif"
    origin = ORIGIN | {"warnings": "Too few objects. " * facts}
    tiff_writer.write(Segmentation(labels, "labels", VoxelSize(3, 2, 1), count=7), path, origin, bigtiff=bigtiff)
    in_xml, for_imagej = origin_of(path)
    assert in_xml == origin
    assert for_imagej == {name: text.strip().replace("µ", "?").replace("ü", "?") for name, text in origin.items()}
    assert stack_reader.inspect(path, ALL, LIMIT).voxel_size == VoxelSize(3, 2, 1)
    np.testing.assert_array_equal(pixels(path)[0], labels)


@given(st.dictionaries(st.sampled_from(["model", "source", "warnings"]), st.text(max_size=900)))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_breaks_a_file(tmp_path: Path, origin: dict[str, str]) -> None:
    path = tmp_path / "any.ome.tif"
    tiff_writer.write(Segmentation(noise(2, 3, 4), "labels", count=1), path, origin)
    expected = {name: "".join(filter(str.isprintable, text)) for name, text in origin.items()}
    assert origin_of(path)[0] == expected


@pytest.mark.parametrize("bigtiff", [None, True])
def test_labels_have_a_colour_each_for_imagej(tmp_path: Path, bigtiff: bool | None) -> None:
    path = tmp_path / "labels.ome.tif"
    tiff_writer.write(Segmentation(noise(2, 17, 23), "labels", count=7), path, bigtiff=bigtiff)
    with tifffile.TiffFile(path) as file:
        colours = np.reshape(file.pages.first.tags["ColorMap"].value, (3, 256)).T
        assert file.pages.first.photometric == tifffile.PHOTOMETRIC.MINISBLACK
        assert (file.imagej_metadata or {})["max"] == 255
    assert tuple(colours[0]) == (0, 0, 0)
    assert len(np.unique(colours, axis=0)) == 256
    assert np.abs(np.diff(colours[1:].astype(int), axis=0)).max(axis=1).min() > 10_000
    tiff_writer.write(Segmentation(noise(2, 2, 17, 23, dtype="float32"), "probabilities", names=("a", "b")), path)
    with tifffile.TiffFile(path) as file:
        assert "ColorMap" not in file.pages.first.tags
