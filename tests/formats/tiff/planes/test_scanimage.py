"""Arrange the pages of ScanImage files by the properties of the acquisition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from pixels import noise

from service.core.errors import AmbiguousAxes, BadFile
from service.core.quantities import VoxelSize
from service.core.types import Array, Description, Selection
from service.formats import stack_reader
from service.formats.tiff.planes.scanimage import ScanImageLayout, parse_layout

LIMIT = 2**28
DEFAULT_SELECTION = Selection()
FIELD_OF_VIEW = "SI.hRoiManager.imagingFovUm = [-1.1 -0.9;1.1 -0.9;1.1 0.9;-1.1 0.9]\n"


def make_header(channels: str, planes: int, frames: str = "1", flyback: int = 0, *, enable: bool = True) -> str:
    return (
        f"SI.LINE_FORMAT_VERSION = 1\nSI.hChannels.channelSave = {channels}\n"
        f"SI.hStackManager.enable = {str(enable).lower()}\nSI.hStackManager.numSlices = {planes}\n"
        f"SI.hStackManager.framesPerSlice = {frames}\nSI.hStackManager.numFramesPerVolume = {planes}\n"
        f"SI.hStackManager.numFramesPerVolumeWithFlyback = {planes + flyback}\n"
        f"SI.hStackManager.stackZStepSize = -0.5\n{FIELD_OF_VIEW}"
    )


def write(path: Path, pages: Array, header: str, first_frame: int = 1) -> Path:
    with tifffile.TiffWriter(path) as writer:
        for page in pages:
            description = f"frameNumbers = {first_frame}\nacquisitionNumbers = 1\n"
            writer.write(
                page,
                photometric="minisblack",
                metadata=None,
                contiguous=False,
                software=header,
                description=description,
            )
    return path


def inspect(path: Path, selection: Selection = DEFAULT_SELECTION) -> Description:
    return stack_reader.inspect(path, selection, LIMIT)


@pytest.mark.parametrize(
    ("header", "axes", "shape"),
    [
        (make_header("[1;2]", 5), "TZCYX", (2, 5, 2)),
        (make_header("[1;2]", 10), "ZCYX", (10, 2)),
        (make_header("[1 3]", 5, "2"), "ZTCYX", (5, 2, 2)),
        (make_header("1", 20), "ZYX", (20,)),
        (make_header("1", 5, enable=False), "TYX", (20,)),
        (make_header("[1;2]", 1, "inf"), "TCYX", (10, 2)),
    ],
)
def test_pages_are_volumes_planes_frames_and_channels(
    tmp_path: Path, header: str, axes: str, shape: tuple[int, ...]
) -> None:
    pages = noise(20, 9, 11)
    path = write(tmp_path / "stack.tif", pages, header)

    description = inspect(path)

    assert (description.container, description.axes) == ("ScanImage TIFF", axes)
    assert description.stored_shape == (*shape, 9, 11)
    assert tuple(description.voxel_size or ()) == pytest.approx((0.5, 0.2, 0.2))
    times = description.times if description.times > 1 else 1
    volumes = (
        np.moveaxis(pages.reshape(*shape, 9, 11), axes.index("T"), 0) if times > 1 else pages.reshape(1, *shape, 9, 11)
    )
    volume = stack_reader.read(path, Selection(time=times - 1), LIMIT).read_all()
    expected = np.moveaxis(volumes[-1], -3, 0) if "C" in axes else volumes[-1]
    assert np.array_equal(volume.squeeze(), expected)


def test_frames_that_are_discarded_between_volumes_are_not_planes(tmp_path: Path) -> None:
    pages = noise(2 * (3 + 2) * 2, 9, 11)
    path = write(tmp_path / "stack.tif", pages, make_header("[1;2]", 3, flyback=2))

    volume = stack_reader.read(path, Selection(time=1, channel=1), LIMIT)

    assert np.array_equal(volume.read_all()[0], pages.reshape(2, 5, 2, 9, 11)[1, :3, 1])


def test_incomplete_and_partial_acquisitions_are_refused(tmp_path: Path) -> None:
    pages = noise(13, 9, 11)
    path = write(tmp_path / "stack.tif", pages, make_header("[1;2]", 5))

    with pytest.raises(BadFile, match="declares 20 planes, but the file has 13"):
        inspect(path)
    volume = stack_reader.read(path, Selection(allow_incomplete=True), LIMIT)
    assert np.array_equal(volume.read_all(), pages[:10].reshape(5, 2, 9, 11).swapaxes(0, 1))
    with pytest.raises(AmbiguousAxes, match="begins in the middle of a volume"):
        inspect(write(path, pages, make_header("[1;2]", 5), first_frame=8))
    assert inspect(path, Selection(axes="ZYX", voxel_size=VoxelSize(1, 1, 1))).shape == (1, 13, 9, 11)
    with pytest.raises(AmbiguousAxes):
        inspect(write(path, noise(24, 9, 11), make_header("1", 3, "2")))


@pytest.mark.parametrize(
    ("header", "layout"),
    [
        ("scanimage.SI4.channelsSave = [1;2]\nscanimage.SI4.stackNumSlices = 7\nscanimage.SI4.acqNumFrames = 4\n"
         "scanimage.SI4.acqNumAveragedFrames = 4\n", ScanImageLayout(2, 1, 7, 0)),
        ("state.acq.numberOfChannelsSave=2\rstate.acq.numberOfZSlices=9\rstate.acq.numberOfFrames=3\r",
         ScanImageLayout(2, 3, 9, 0)),
        ("scanimage.SI.hChannels.channelSave = [1 2 3 4]\nscanimage.SI.hStackManager.numSlices = 3\n"
         "scanimage.SI.hStackManager.framesPerSlice = 1\n", ScanImageLayout(4, 1, 3, 0)),
        ("SI.hChannels.channelSave = [[1], [2]]\nSI.hStackManager.actualNumSlices = 4.0\n"
         "SI.hStackManager.numSlices = 9\n", ScanImageLayout(2, 1, 4, 0)),
        ("SI.hStackManager.numSlices = 3\n", None),
    ],
)  # fmt: skip
def test_headers_of_all_versions(header: str, layout: ScanImageLayout | None) -> None:
    assert parse_layout(header) == layout
