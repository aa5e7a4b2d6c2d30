from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from service.core.errors import BadParameter
from service.core.quantities import Diameter, VoxelSize
from service.core.types import Segmentation, Selection, Volume
from service.formats.tiff import writer as tiff_writer
from service.training.stacks.annotated_stack import (
    AnnotatedStack,
    LabelOptions,
    StackFiles,
    check_background,
    choose_default_diameter,
    convert_labels,
    name_stack,
    read_stack,
)

VOXEL_SIZE = VoxelSize(0.5, 0.25, 0.25)


def make_grid(shape: tuple[int, int, int], pitch: int = 6, edge: int = 4) -> NDArray[np.uint16]:
    """Return labels of cubes on a regular grid."""
    labels = np.zeros(shape, np.uint16)
    for number, corner in enumerate(np.ndindex(*(length // pitch for length in shape)), 1):
        labels[tuple(slice(pitch * position, pitch * position + edge) for position in corner)] = number
    return labels


def write_stack(folder: Path, image: NDArray[Any], labels: NDArray[Any], **fields: Any) -> StackFiles:
    for name, pixels in (("image", image), ("mask", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VOXEL_SIZE), folder / f"{name}.tif")
    return StackFiles("stack", folder / "image.tif", folder / "mask.tif", **fields)


def test_annotated_objects_determine_the_diameter_if_there_are_enough(tmp_path: Path) -> None:
    labels = make_grid((12, 24, 24))
    region = (slice(1, 11), slice(0, 20), slice(3, 24))
    stack = write_stack(tmp_path, labels + np.uint16(7), labels, region=region, diameter="2um")
    annotated_stack = read_stack(stack)
    assert np.array_equal(annotated_stack.labels, labels[region])
    assert annotated_stack.extents == (4, 4, 4)
    assert read_stack(stack, LabelOptions(Diameter((1.0,), "um"))).extents == (2, 4, 4)
    assert read_stack(stack, LabelOptions(has_diameter=False)).extents is None
    few_objects = write_stack(tmp_path, labels, np.where(labels < 3, labels, np.uint16(0)), diameter="2um")
    assert read_stack(few_objects).extents == (4, 8, 8)


def test_axes_and_voxel_size_of_the_request_are_used(tmp_path: Path) -> None:
    labels = make_grid((6, 12, 12))
    tifffile.imwrite(tmp_path / "image.tif", np.stack([labels, labels + 9]).astype(np.uint16))
    tifffile.imwrite(tmp_path / "mask.tif", labels)
    selection = Selection(channel=1, axes="CZYX", voxel_size=VOXEL_SIZE)
    files = StackFiles("a", tmp_path / "image.tif", tmp_path / "mask.tif", selection=selection)
    options = LabelOptions(Diameter((2.0,), "um"))
    stack = read_stack(files, options)
    assert np.array_equal(stack.volume.read_all()[0], labels + 9)
    assert stack.extents == (4, 8, 8)
    with pytest.raises(BadParameter, match="2 channels"):
        read_stack(files._replace(selection=Selection(axes="CZYX")))
    with pytest.raises(BadParameter, match="voxel_size=Z,Y,X"):
        read_stack(files._replace(selection=Selection(channel=0, axes="CZYX")), options)
    tifffile.imwrite(tmp_path / "mask.tif", labels[1:])
    with pytest.raises(BadParameter, match="differ in shape"):
        read_stack(files)


def test_unannotated_voxels_are_unknown(tmp_path: Path) -> None:
    labels = np.zeros((9, 20, 20), np.uint16)
    labels[3:6, 4:12, 4:12], labels[:, 15:] = 1, 9
    files = write_stack(tmp_path, labels, labels)
    stack = read_stack(files, LabelOptions(ignored=9, is_partial=True))
    assert stack.unknown is not None
    assert set(np.unique(stack.labels)) == {0, 1}
    assert stack.extents == (3, 8, 8)
    # The rim is as flat as the objects: less than one plane, and two pixels.
    assert not stack.unknown[3:6, 4:12, 2:14].any()
    assert stack.unknown[3:6, 4:12, [0, 1, 14]].all()
    assert stack.unknown[[2, 6]].all()
    assert stack.unknown[4, 4, [0, 1, 15]].all()
    assert stack.unknown[:, 15:].all()
    assert read_stack(files).unknown is None


@pytest.mark.parametrize("planes", [slice(0, 24), slice(2, 12), slice(13, 18)])
def test_depth_of_objects_is_measured_on_some_annotated_planes(tmp_path: Path, planes: slice) -> None:
    # Rows of boxes that are 1 to 5 planes deep and begin at all planes.
    labels = np.zeros((24, 100, 40), np.uint16)
    for row in range(25):
        depth = 1 + row % 5
        for number, z in enumerate(range(-(row % 6), 24, depth + 1), 1):
            labels[max(z, 0) : max(z + depth, 0), 4 * row : 4 * row + 3, 5:35] = 100 * row + number
    is_annotated = np.zeros(24, np.bool_)
    is_annotated[planes] = True
    labels[~is_annotated] = 0
    files = write_stack(tmp_path, labels, labels)
    stack = read_stack(files, LabelOptions(has_partial_planes=True))
    assert stack.extents is not None
    depth, *others = stack.extents
    assert depth == pytest.approx(2.2, abs=0.4)
    assert others == [3, 30]
    unknown = np.zeros(labels.shape, np.bool_) if stack.unknown is None else stack.unknown
    assert np.array_equal(unknown, np.broadcast_to(~is_annotated[:, None, None], labels.shape))
    assert read_stack(files).unknown is None


def test_single_annotated_planes_need_a_diameter(tmp_path: Path) -> None:
    labels = make_grid((12, 24, 24))
    labels[np.arange(12) % 3 > 0] = 0
    files, options = write_stack(tmp_path, labels, labels), LabelOptions(has_partial_planes=True)
    with pytest.raises(BadParameter, match="Annotate adjacent planes, or set the diameter"):
        read_stack(files, options)
    assert read_stack(files._replace(diameter="2um"), options).extents == (4, 8, 8)
    assert read_stack(files, options._replace(diameter=Diameter((2.0,), "um"))).extents == (4, 8, 8)
    assert read_stack(files, options._replace(has_diameter=False)).extents is None


def test_stacks_without_background_are_refused_with_advice() -> None:
    volume = Volume.from_array(np.zeros((1, 4, 8, 8), np.uint8))
    labels = np.ones((4, 8, 8), np.uint8)
    dense_stack = AnnotatedStack("a", volume, labels)
    with pytest.raises(BadParameter, match=r"100% of the annotated voxels belong to objects.*boundaries"):
        check_background([dense_stack])
    sparse_stack = AnnotatedStack("b", volume, np.eye(8, dtype=np.uint8)[None].repeat(4, 0))
    check_background([dense_stack, sparse_stack])
    unknown = sparse_stack.labels == 0
    with pytest.raises(BadParameter, match="boundaries"):
        check_background([dense_stack, AnnotatedStack("c", volume, sparse_stack.labels, unknown=unknown)])


def test_labels_must_be_whole_numbers() -> None:
    assert convert_labels(np.array([[[0.0, 2.0]]]), "a").tolist() == [[[0, 2]]]
    for labels in (np.array([0.5]), np.array([np.nan]), np.array([-1])):
        with pytest.raises(BadParameter, match="a: the labels must"):
            convert_labels(labels, "a")


@pytest.mark.parametrize(("dtype", "largest"), [(np.float16, 2**11), (np.float32, 2**24), (np.float64, 2**53)])
def test_float_labels_that_may_have_been_rounded_are_refused(dtype: type, largest: int) -> None:
    assert convert_labels(np.array([largest], dtype), "a").tolist() == [largest]
    with pytest.raises(BadParameter, match=f"exact only up to {largest}"):
        convert_labels(np.array([largest * 4], dtype), "a")
    assert convert_labels(np.array([2**60 + 1], np.uint64), "a").tolist() == [2**60 + 1]


def test_default_diameter_is_in_micrometers_if_all_voxel_sizes_are_known() -> None:
    pixels = np.zeros((1, 2, 3, 4), np.uint8)
    known, unknown = Volume.from_array(pixels, VOXEL_SIZE), Volume.from_array(pixels)
    stacks = [
        AnnotatedStack("a", volume, pixels[0], extents=extents)
        for volume, extents in ((known, (2.0, 8.0, 8.0)), (known, (4.0, 8.0, 8.0)), (unknown, (9.0, 9.0, 9.0)))
    ]
    assert str(choose_default_diameter(stacks[:2])) == "1.5,2,2um"
    assert str(choose_default_diameter(stacks)) == "4,8,8px"
    assert choose_default_diameter([AnnotatedStack("a", known, pixels[0])]) is None


def test_stacks_in_folders_are_named_after_their_folders() -> None:
    assert name_stack(Path("organoid/image.tif")) == "organoid"
    assert name_stack(Path("organoid/image.ome.tif")) == "organoid"
    assert name_stack(Path("organoid/stack.tif")) == "stack.tif"
