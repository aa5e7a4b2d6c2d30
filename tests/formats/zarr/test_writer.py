"""Written OME-Zarr is valid, is read back unchanged, and keeps label IDs at every resolution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import pytest
import tifffile
import yaozarrs
import zarr
from zarr_files import write_zarr

from service.core.errors import BadParameter
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.formats.zarr import writer as zarr_writer

LIMIT = 2**28
VOXEL_SIZE = VoxelSize(0.5, 0.2, 0.2)


def make_labels(shape: tuple[int, ...] = (20, 300, 520), dtype: Any = np.uint16) -> np.ndarray:
    ids = np.arange(np.prod([-(-n // 10) for n in shape])).reshape([-(-n // 10) for n in shape]).astype(dtype)
    for axis in range(len(shape)):
        ids = ids.repeat(10, axis)
    return ids[tuple(map(slice, shape))]


def read_levels(path: Path) -> list[np.ndarray]:
    group = zarr.open_group(path, mode="r")
    return [np.asarray(group[str(number)][...]) for number in range(len(list(group.array_keys())))]


def test_separate_store_is_valid_and_read_back_unchanged(tmp_path: Path) -> None:
    pixels, path = make_labels(), tmp_path / "labels.ome.zarr"
    zarr_writer.write(
        Segmentation(pixels, "labels", VOXEL_SIZE, 7), path, {"software": "StackSeg 1", "model": "nuclei/1"}
    )
    yaozarrs.validate_zarr_store(str(path))
    volume = stack_reader.read(path, Selection(), LIMIT)
    assert np.array_equal(volume.read_all()[0], pixels)
    assert (volume.voxel_size, volume.dtype) == (VOXEL_SIZE, np.uint16)
    attributes = dict(zarr.open_group(path, mode="r").attrs)
    assert attributes["stackseg/origin"] == {"software": "StackSeg 1", "model": "nuclei/1"}
    assert "image-label" in attributes["ome"]
    assert zarr.open_array(path / "0", mode="r").shards is not None
    assert [entry.name for entry in tmp_path.iterdir()] == ["labels.ome.zarr"]


def test_archive_begins_with_metadata_and_is_read_back_unchanged(tmp_path: Path) -> None:
    pixels, path = make_labels(), tmp_path / "labels.ozx"
    zarr_writer.write_archive(Segmentation(pixels, "labels", VOXEL_SIZE), path)
    volume = stack_reader.read(path, Selection(), LIMIT)
    assert np.array_equal(volume.read_all()[0], pixels)
    assert volume.voxel_size == VOXEL_SIZE
    with ZipFile(path) as archive:
        names = archive.namelist()
        assert names[:4] == ["zarr.json", "0/zarr.json", "1/zarr.json", "2/zarr.json"]
        assert not any(name.endswith("zarr.json") for name in names[4:])
        assert {member.compress_type for member in archive.infolist()} == {ZIP_STORED}
        assert json.loads(archive.comment)["ome"]["zipFile"]["centralDirectory"] == {"jsonFirst": True}
        archive.extractall(tmp_path / "labels.ome.zarr")
    yaozarrs.validate_zarr_store(str(tmp_path / "labels.ome.zarr"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["labels.ome.zarr", "labels.ozx"]


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_labels_of_an_image_have_its_version_and_are_listed(tmp_path: Path, version: str) -> None:
    image = write_zarr(tmp_path / "image.ome.zarr", make_labels(), version=version)
    for name in ("nuclei", "cells", "nuclei"):
        zarr_writer.write(Segmentation(make_labels(), "labels", VOXEL_SIZE, 7), image / "labels" / name)
    yaozarrs.validate_zarr_store(str(image))
    attributes = dict(zarr.open_group(image / "labels", mode="r").attrs)
    assert attributes.get("ome", attributes)["labels"] == ["cells", "nuclei"]
    stored = dict(zarr.open_group(image / "labels" / "nuclei", mode="r").attrs)
    assert stored.get("ome", stored)["image-label"]["source"] == {"image": "../../"}
    assert (image / "labels" / "nuclei" / "zarr.json").exists() == (version == "0.5")
    assert np.array_equal(
        stack_reader.read(image / "labels" / "nuclei", Selection(), LIMIT).read_all()[0], make_labels()
    )


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_classes_have_the_colors_of_label_files_for_imagej(tmp_path: Path, version: str) -> None:
    image = write_zarr(tmp_path / "image.ome.zarr", make_labels((4, 16, 16)), version=version)
    classes = Segmentation(
        make_labels((4, 16, 16), np.uint8) % 3, "classes", None, None, ("background", "cell", "wall")
    )
    zarr_writer.write(classes, image / "labels" / "tissue")
    yaozarrs.validate_zarr_store(str(image))
    attributes = dict(zarr.open_group(image / "labels" / "tissue", mode="r").attrs)
    background, *others = attributes.get("ome", attributes)["image-label"]["colors"]
    assert background == {"label-value": 0, "rgba": [0, 0, 0, 0]}
    tiff_writer.write(classes, tmp_path / "tissue.tif")
    with tifffile.TiffFile(tmp_path / "tissue.tif") as file:
        color_map = file.pages[0].colormap >> 8
    assert others == [{"label-value": value, "rgba": [*color_map[:, value], 255]} for value in (1, 2)]


def describe_image(
    path: Path,
    shapes: list[tuple[int, ...]],
    axes: list[dict[str, str]],
    transformations: list[Any],
    version: str,
    order: int = 1,
) -> None:
    """Write the arrays and the metadata of an image without pixels. If `order` is -1, the finest array is the last."""
    group = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    for level, shape in enumerate(shapes):
        names = {} if version == "0.4" else {"dimension_names": [axis["name"] for axis in axes]}
        group.create_array(f"s{level}", shape=shape, dtype=np.uint16, **names)
    datasets = [
        {"path": f"s{level}", "coordinateTransformations": transformation}
        for level, transformation in enumerate(transformations)
    ]
    multiscales = [{"axes": axes, "datasets": datasets[::order]}]
    if version == "0.4":
        group.attrs["multiscales"] = [multiscales[0] | {"version": version}]
    else:
        group.attrs["ome"] = {"version": version, "multiscales": multiscales}


def read_multiscale(path: Path) -> dict[str, Any]:
    attributes: dict[str, Any] = dict(zarr.open_group(path, mode="r").attrs)
    multiscale: dict[str, Any] = attributes.get("ome", attributes)["multiscales"][0]
    return multiscale


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("unit", [None, "nanometer", "micrometer"])
def test_labels_have_the_resolutions_and_the_coordinate_system_of_their_image(
    tmp_path: Path, unit: str | None, version: str
) -> None:
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": axis, "type": "space"} | ({"unit": unit} if unit else {}) for axis in "zyx"]
    transformations = [
        [
            {"type": "scale", "scale": [1.0, 500.0, 200.0 * 2**level, 200.0 * 2**level]},
            {"type": "translation", "translation": [0.0, 1000.0, 30.0 + 100 * (2**level - 1), 30.0]},
        ]
        for level in range(3)
    ]
    image, labels = tmp_path / "image.zarr", make_labels((20, 65, 64))
    shapes = [(2, 20, 65, 64), (2, 20, 32, 32), (2, 20, 16, 16)]
    describe_image(image, shapes, axes, transformations, version)

    zarr_writer.write(Segmentation(labels, "labels", None, 7), image / "labels" / "nuclei")

    yaozarrs.validate_zarr_store(str(image))
    multiscale = read_multiscale(image / "labels" / "nuclei")
    assert multiscale["axes"] == axes[1:]
    assert [dataset["coordinateTransformations"] for dataset in multiscale["datasets"]] == [
        [{**item, item["type"]: item[item["type"]][1:]} for item in level] for level in transformations
    ]
    levels = read_levels(image / "labels" / "nuclei")
    assert all(np.array_equal(level, labels[:, :: 2**n, :: 2**n]) for n, level in enumerate(levels))
    reverse_image = tmp_path / "reverse.zarr"
    describe_image(reverse_image, shapes, axes, transformations, version, order=-1)
    zarr_writer.write(Segmentation(labels, "labels", None, 7), reverse_image / "labels" / "nuclei")
    assert read_multiscale(reverse_image / "labels" / "nuclei") == multiscale


def test_labels_of_an_image_with_uneven_resolutions_are_at_the_correct_positions(tmp_path: Path) -> None:
    axes = [{"name": axis, "type": "space"} for axis in "yx"]
    transformations = [[{"type": "scale", "scale": [scale, scale]}] for scale in (0.2, 0.5)]
    image, labels = tmp_path / "image.zarr", make_labels((1, 100, 100))
    describe_image(image, [(100, 100), (40, 40)], axes, transformations, "0.5")

    zarr_writer.write(Segmentation(labels, "labels", None, 7), image / "labels" / "nuclei")

    multiscale, levels = read_multiscale(image / "labels" / "nuclei"), read_levels(image / "labels" / "nuclei")
    scales = [dataset["coordinateTransformations"][0]["scale"] for dataset in multiscale["datasets"]]
    assert scales == [[1.0, 0.2, 0.2], [1.0, 0.4, 0.4]]
    assert np.array_equal(levels[1], labels[:, ::2, ::2])


def test_probabilities_are_not_written_into_the_labels_of_an_image(tmp_path: Path) -> None:
    image = write_zarr(tmp_path / "image.ome.zarr", make_labels())
    probabilities = Segmentation(np.zeros((2, 20, 300, 520), np.float32), "probabilities", names=("a", "b"))

    with pytest.raises(BadParameter, match="only integers"):
        zarr_writer.write(probabilities, image / "labels" / "nuclei")
    assert not (image / "labels").exists()


def test_coarser_resolutions_keep_ids_and_positions_of_labels(tmp_path: Path) -> None:
    path = tmp_path / "labels.zarr"
    zarr_writer.write(Segmentation(make_labels((20, 600, 700)), "labels", VOXEL_SIZE, 7), path)
    attributes: dict[str, Any] = dict(zarr.open_group(path, mode="r").attrs)
    scales = [
        dataset["coordinateTransformations"][0]["scale"] for dataset in attributes["ome"]["multiscales"][0]["datasets"]
    ]
    assert scales == [[0.5, 0.2, 0.2], [0.5, 0.4, 0.4], [1.0, 0.8, 0.8]]
    full_resolution = read_levels(path)[0]
    for level, scale in zip(read_levels(path), scales, strict=True):
        z, y, x = (round(step / size) for step, size in zip(scale, VOXEL_SIZE, strict=True))
        assert np.array_equal(level, full_resolution[::z, ::y, ::x])


@pytest.mark.parametrize(
    "segmentation",
    [
        Segmentation(make_labels((3, 20, 50, 60)), "labels", VOXEL_SIZE, 7, time_interval=TimeInterval(2, "min")),
        Segmentation(
            np.random.default_rng(0).random((2, 5, 30, 40), np.float32), "probabilities", VOXEL_SIZE, None, ("a", "b")
        ),
        Segmentation(make_labels((1, 9, 7), np.uint8) % 3, "classes", None, None, ("background", "a", "b")),
        Segmentation(np.zeros((70, 300, 30), np.uint32), "labels", None, 0),
    ],
)
def test_every_kind_is_valid_and_read_back_unchanged(tmp_path: Path, segmentation: Segmentation) -> None:
    path = tmp_path / "result.zarr"
    zarr_writer.write(segmentation, path)
    yaozarrs.validate_zarr_store(str(path))
    description = stack_reader.inspect(path, Selection(), LIMIT)
    assert description.time_interval == segmentation.time_interval
    assert np.array_equal(read_levels(path)[0], segmentation.pixels)
    if segmentation.kind == "probabilities":
        assert description.channels == segmentation.names
    if segmentation.time_interval is None:
        assert stack_reader.read(path, Selection(), LIMIT).voxel_size == segmentation.voxel_size


def test_failed_write_keeps_the_existing_store(tmp_path: Path) -> None:
    path = tmp_path / "labels.zarr"
    zarr_writer.write(Segmentation(make_labels(), "labels", VOXEL_SIZE, 7), path)
    with pytest.raises(TypeError):
        zarr_writer.write(Segmentation(make_labels(), "labels", VOXEL_SIZE, 7), path, {"not": object()})  # type: ignore[dict-item]
    assert np.array_equal(stack_reader.read(path, Selection(), LIMIT).read_all()[0], make_labels())
    assert [entry.name for entry in tmp_path.iterdir()] == ["labels.zarr"]
