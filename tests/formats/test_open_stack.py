"""Notes of open stacks about parameters of the request that seem to be mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tifffile
from pixels import noise

from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader, writers

LIMIT = 2**28
CALIBRATED = {"resolution": (5, 5), "metadata": {"axes": "ZYX", "spacing": 0.5, "unit": "um"}}
NOT_CALIBRATED = {"metadata": {"axes": "ZYX"}}


@pytest.mark.parametrize(
    ("requested", "options", "words"),
    [
        ((0.2, 0.2, 0.5), CALIBRATED, "The order is Z,Y,X. The file specifies 0.5,0.2,0.2"),
        ((0.2, 0.2, 0.5), NOT_CALIBRATED, "0.2 um high and 0.5 um wide"),
        ((500, 200, 200), CALIBRATED, "in micrometers. The file specifies"),
        ((500, 200, 200), NOT_CALIBRATED, "Check the unit"),
        ((0.6, 0.25, 0.25), CALIBRATED, ""),
        ((25, 25, 25), NOT_CALIBRATED, ""),
    ],
)
def test_requested_voxel_size_in_another_order_or_unit_is_noted(
    tmp_path: Path, requested: tuple[float, float, float], options: dict[str, object], words: str
) -> None:
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, noise(5, 9, 11), imagej=True, **options)

    description = stack_reader.inspect(path, Selection(voxel_size=VoxelSize(*requested)), LIMIT)

    assert description.voxel_size == VoxelSize(*requested)
    assert bool(description.notes) == bool(words)
    assert words in " ".join(description.notes)


def test_index_of_a_channel_that_is_the_name_of_another_channel_is_noted(tmp_path: Path) -> None:
    path, stack = tmp_path / "stack.ome.tif", noise(3, 5, 9, 11)
    metadata = {"axes": "CZYX", "Channel": {"Name": ["1", "2", "3"]}}
    tifffile.imwrite(path, stack, ome=True, photometric="minisblack", metadata=metadata)

    for channel, index in ((1, 1), (3, 2)):
        volume = stack_reader.read(path, Selection(channel=channel, voxel_size=VoxelSize(1, 1, 1)), LIMIT)
        assert (volume.read_all()[0] == stack[index]).all()
        assert any("zero-based index, '2'" in note for note in volume.notes) == (channel == 1)


@pytest.mark.parametrize("name", ["labels.tif", "labels.zarr"])
def test_results_of_a_segmentation_are_noted(tmp_path: Path, name: str) -> None:
    writers.write(Segmentation(noise(5, 9, 11), "labels", count=119), tmp_path / name, {"model": "nuclei/1"})

    notes = stack_reader.inspect(tmp_path / name, Selection(voxel_size=VoxelSize(1, 1, 1)), LIMIT).notes

    assert len(notes) == 1
    assert "instead" in notes[0]


def test_pages_that_are_reduced_copies_of_other_images_are_noted(tmp_path: Path) -> None:
    path, plane = tmp_path / "photo.tif", noise(16, 20)
    with tifffile.TiffWriter(path) as writer:
        writer.write(plane[::4, ::4], photometric="minisblack", metadata=None, subifds=1, subfiletype=1)
        writer.write(plane, photometric="minisblack", metadata=None)

    description = stack_reader.inspect(path, Selection(), LIMIT)

    assert description.shape == (1, 1, 4, 5)
    assert "reduced copies" in description.notes[0]
