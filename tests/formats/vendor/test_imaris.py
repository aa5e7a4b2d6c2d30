"""Read Imaris files, and refuse those that refer to other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core.errors import BadFile, RequestError, TooLarge
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader

h5py = pytest.importorskip("h5py")
LIMIT = 2**28
STACK = np.random.default_rng(0).integers(0, 60_000, (2, 3, 5, 30, 50)).astype(np.uint16)
# Imaris writes fractions of a second only if there are any.
DATES = ("2026-11-27 23:59:57.500", "2026-11-28 00:00:00")
CHANNELS = (
    {"Name": "DAPI", "Color": "0.000 0.009 1.000", "ColorMode": "BaseColor"},
    {"Name": "(name not specified)", "Color": "1.000 -0.000 0.000"},
    {"Name": "(name not specified)", "Color": "1.000 0.000 0.000", "ColorMode": "TableColor"},
)


def to_characters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), "S1")


def write_imaris(path: Path, stack: np.ndarray = STACK, attributes: dict[str, str] | None = None) -> Path:
    """Write a stack [T, C, Z, Y, X] as Imaris does, padded to complete chunks."""
    _, num_channels, z, y, x = stack.shape
    extent = {"ExtMax0": str(0.2 * x), "ExtMax1": str(0.3 * y), "ExtMax2": str(1.5 * z)}
    image = {
        "X": str(x),
        "Y": str(y),
        "Z": str(z),
        "Unit": "um",
        **extent,
        "ExtMin0": "0",
        "ExtMin1": "0",
        "ExtMin2": "0",
    }
    with h5py.File(path, "w") as file:
        file.attrs["ImarisDataSet"] = to_characters("ImarisDataSet")
        for name, text in (image if attributes is None else attributes).items():
            file.require_group("DataSetInfo/Image").attrs[name] = to_characters(text)
        for channel in range(num_channels):
            for name, text in CHANNELS[channel].items():
                file.require_group(f"DataSetInfo/Channel {channel}").attrs[name] = to_characters(text)
        for time in range(len(stack)):
            file.require_group("DataSetInfo/TimeInfo").attrs[f"TimePoint{time + 1}"] = to_characters(DATES[time])
        for time, channel in np.ndindex(stack.shape[:2]):
            padded = np.pad(stack[time, channel], [(0, -length % 16) for length in stack.shape[2:]])
            file.create_dataset(
                f"DataSet/ResolutionLevel 0/TimePoint {time}/Channel {channel}/Data",
                data=padded,
                chunks=(16, 16, 16),
                compression="gzip",
            )
    return path


def test_pixels_and_metadata(reader: Reader, tmp_path: Path) -> None:
    path = write_imaris(tmp_path / "a.ims")

    description = reader.inspect(path, Selection(time=1))

    assert (description.container, description.axes, description.stored_shape) == ("Imaris IMS", "TCZYX", STACK.shape)
    assert (description.channels, description.colours) == (("DAPI", "", ""), ("#0002ff", "#ff0000", ""))
    assert description.time_interval == TimeInterval(2.5, "s")
    assert description.voxel_size == pytest.approx(VoxelSize(1.5, 0.3, 0.2))
    np.testing.assert_array_equal(reader.read(path, Selection(time=1), tmp_path).read_all(), STACK[1])
    volume = stack_reader.read(path, Selection(time=0, channel="DAPI"), LIMIT)
    np.testing.assert_array_equal(volume.read_all(), STACK[0, :1])


def test_without_attributes_the_size_of_the_dataset_is_used(tmp_path: Path) -> None:
    path = write_imaris(tmp_path / "a.ims", attributes={"Unit": "um"})

    description = stack_reader.inspect(path, Selection(time=0), LIMIT)

    assert (description.shape, description.voxel_size) == ((3, 16, 32, 64), None)


def test_sizes_without_attributes_of_the_image_are_those_of_the_channel(tmp_path: Path) -> None:
    path = write_imaris(tmp_path / "a.ims", attributes={"Unit": "um", "ExtMin0": "0", "ExtMax0": "10"})
    with h5py.File(path, "r+") as file:
        for axis, length in zip("ZYX", STACK.shape[2:], strict=True):
            group = file["DataSet/ResolutionLevel 0/TimePoint 0/Channel 0"]
            group.attrs[f"ImageSize{axis}"] = to_characters(str(length))

    description = stack_reader.inspect(path, Selection(time=0), LIMIT)

    assert (description.shape, description.partial_voxel_size) == ((3, 5, 30, 50), (None, None, 0.2))


def test_invalid_sizes_and_colors_do_not_make_a_file_unreadable(tmp_path: Path) -> None:
    path = write_imaris(tmp_path / "a.ims")
    with h5py.File(path, "r+") as file:
        file["DataSetInfo/Image"].attrs["ExtMax0"] = to_characters("10,0")
        file["DataSetInfo/Channel 0"].attrs["Color"] = to_characters("x nan 1.0")

    description = stack_reader.inspect(path, Selection(time=0), LIMIT)

    assert (description.shape, description.voxel_size) == ((3, 5, 30, 50), None)
    assert any("along x, which is not plausible" in note for note in description.notes)
    assert description.colours == ("", "#ff0000", "")


def make_external(folder: Path, group: Any) -> None:
    (folder / "secret").write_bytes(bytes(16**3 * 2))
    group.create_dataset("Data", (16, 16, 16), "<u2", external=[(str(folder / "secret"), 0, 16**3 * 2)])


def make_virtual(folder: Path, group: Any) -> None:
    layout = h5py.VirtualLayout((16, 16, 16), "<u2")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "a", (16, 16, 16))
    group.create_virtual_dataset("Data", layout)


def make_external_link(folder: Path, group: Any) -> None:
    write_imaris(folder / "other.ims")
    group["Data"] = h5py.ExternalLink(str(folder / "other.ims"), "DataSet/ResolutionLevel 0/TimePoint 0/Channel 0/Data")


def make_filter(_folder: Path, group: Any) -> None:
    group.create_dataset("Data", (16, 16, 16), "<u2", chunks=(16, 16, 16), compression="lzf")


def make_large_chunks(_folder: Path, group: Any) -> None:
    group.create_dataset("Data", (2**10, 2**10, 2**10), "<u2", chunks=(2**10, 2**10, 2**9))


def make_text(_folder: Path, group: Any) -> None:
    group.create_dataset("Data", (16, 16, 16), "S8")


@pytest.mark.parametrize(
    ("replace", "error", "message"),
    [
        (make_external, BadFile, "in other files"),
        (make_virtual, BadFile, "in other files"),
        (make_external_link, BadFile, "is a link"),
        (make_filter, BadFile, "filter"),
        (make_large_chunks, TooLarge, "chunks of"),
        (make_text, BadFile, "not a volume of numbers"),
        (lambda _folder, group: group.create_group("Data"), BadFile, "not a volume of numbers"),
        (lambda _folder, group: None, BadFile, "is missing"),
    ],
)
@pytest.mark.parametrize("channel", [0, 1])
def test_hostile_datasets_are_refused(
    replace: Callable[[Path, Any], None], error: type[RequestError], message: str, channel: int, tmp_path: Path
) -> None:
    path = write_imaris(tmp_path / "a.ims")
    with h5py.File(path, "r+") as file:
        group = file[f"DataSet/ResolutionLevel 0/TimePoint 0/Channel {channel}"]
        del group["Data"]
        replace(tmp_path, group)

    with pytest.raises(error, match=message):
        stack_reader.read(path, Selection(time=0, channel=channel), LIMIT)


def test_sizes_that_exceed_the_pixels_are_refused(tmp_path: Path) -> None:
    path = write_imaris(tmp_path / "a.ims", attributes={"X": "65", "Y": "30", "Z": "5"})

    with pytest.raises(BadFile, match=r"states \(5, 30, 65\)"):
        stack_reader.inspect(path, Selection(), LIMIT)


def test_other_hdf5_files_are_not_imaris_files(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("stack", data=STACK)

    with pytest.raises(RequestError, match="HDF5, which is not supported"):
        stack_reader.inspect(tmp_path / "a.h5", Selection(), LIMIT)
