"""Read OIB files and zip archives of OIFs: pixels, metadata, missing planes and damaged files."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from olympus_files import make_files, make_settings, write_oib, write_oif

from service.core.errors import BadFile, BadParameter
from service.core.quantities import TimeInterval
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader

pytest.importorskip("oiffile")
LIMIT = 2**28
STACK = np.random.default_rng(0).integers(0, 4096, (3, 2, 4, 8, 9)).astype(np.uint16)


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    return write_oif(path, {"": files})


@pytest.mark.parametrize(("write", "container"), [(write_oib, "Olympus OIB"), (write_zip, "Olympus OIF")])
def test_pixels_and_metadata(
    write: Callable[[Path, dict[str, bytes]], Path], container: str, reader: Reader, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", make_files(STACK, make_settings(STACK)))

    description = reader.inspect(path, Selection(time=0))

    assert (description.container, description.axes, description.stored_shape) == (container, "TCZYX", STACK.shape)
    assert (description.channels, description.colours) == (("DAPI", "CH2"), ("#0000ff", "#00ff00"))
    assert description.voxel_size is not None
    # The size along x is stated. Those along y and z are the distances of the first and the last position.
    assert [*description.voxel_size] == pytest.approx([1.5, 0.5, 0.25])
    assert description.time_interval == TimeInterval(30_000, "ms")
    for time in range(3):
        np.testing.assert_array_equal(reader.read(path, Selection(time=time), tmp_path).read_all(), STACK[time])


def test_axes_with_one_position_are_left_out(tmp_path: Path) -> None:
    path = write_oib(tmp_path / "a.oib", make_files(STACK[:1, :1], make_settings(STACK[:1, :1])))

    np.testing.assert_array_equal(stack_reader.read(path, Selection(), LIMIT).read_all(), STACK[0, :1])


def test_intervals_without_a_setting_follow_from_the_positions(tmp_path: Path) -> None:
    path = write_oib(tmp_path / "a.oib", make_files(STACK, make_settings(STACK, z_interval=0, time_interval=0)))

    description = stack_reader.inspect(path, Selection(time=0), LIMIT)

    assert description.voxel_size is not None
    assert [*description.voxel_size] == pytest.approx([1.5, 0.5, 0.25])
    assert description.time_interval == TimeInterval(30_000, "ms")


def test_the_plane_distance_of_an_earlier_stack_is_not_used(tmp_path: Path) -> None:
    path = write_oib(tmp_path / "a.oib", make_files(STACK[:, :, :1], make_settings(STACK[:, :, :1])))

    assert stack_reader.inspect(path, Selection(time=0), LIMIT).voxel_size is None


def test_each_oif_in_an_archive_is_a_scene(tmp_path: Path) -> None:
    images = {f"{name}/": make_files(STACK[t : t + 1], make_settings(STACK[:1])) for t, name in enumerate("ab")}
    path = write_oif(tmp_path / "a.zip", images, zipfile.ZIP_STORED)

    assert stack_reader.inspect(path, Selection(), LIMIT).scenes == ("a.oif", "b.oif")
    volume = stack_reader.read(path, Selection(scene="b.oif"), LIMIT)
    np.testing.assert_array_equal(volume.read_all(), STACK[1])


def test_missing_planes(tmp_path: Path) -> None:
    files = make_files(STACK, make_settings(STACK, T=5))
    path = write_oib(tmp_path / "a.oib", files)

    with pytest.raises(BadFile, match="declares 40 planes, but the file has 24"):
        stack_reader.inspect(path, Selection(), LIMIT)
    assert stack_reader.inspect(path, Selection(allow_incomplete=True), LIMIT).times == 3
    # The settings state several time points, but the names of the planes have no time points.
    path = write_oib(tmp_path / "b.oib", make_files(STACK[:1], make_settings(STACK)))
    with pytest.raises(BadFile, match="declares 24 planes, but the file has 8"):
        stack_reader.inspect(path, Selection(), LIMIT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cell.oif.files/s_C001L001.tif", b"", "axes CL"),
        ("cell.oif.files/s_C000Z001T001.tif", b"", "not valid"),
        ("cell.oif", b"", "damaged or not supported"),
        ("cell.oif.files/s_C001Z001T001.tif", b"II*\0", "damaged or not supported"),
        ("cell.oif.files/s_LUT1.lut", b"lut", "damaged or not supported"),
    ],
)
@pytest.mark.parametrize("write", [write_oib, write_zip])
def test_invalid_files_are_refused(
    name: str, content: bytes, message: str, write: Callable[[Path, dict[str, bytes]], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "a", make_files(STACK, make_settings(STACK)) | {name: content})

    with pytest.raises(BadFile, match=message):
        stack_reader.read(path, Selection(time=0), LIMIT)


def test_an_archive_without_the_folder_of_the_planes_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", {"cell.oif": make_files(STACK, make_settings(STACK))["cell.oif"]})

    with pytest.raises(BadFile, match=r"NAME\.oif\.files"):
        stack_reader.inspect(path, Selection(), LIMIT)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.95])
def test_truncated_files_are_refused(part: float, reader: Reader, tmp_path: Path) -> None:
    path = write_oib(tmp_path / "a.oib", make_files(STACK, make_settings(STACK)))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])

    with pytest.raises(BadFile):
        reader.read(path, Selection(time=2), tmp_path)


@pytest.mark.parametrize("offset", [40, 44, 64, 72])
def test_headers_that_declare_more_sectors_than_the_file_has_are_refused(offset: int, tmp_path: Path) -> None:
    path = write_oib(tmp_path / "a.oib", make_files(STACK, make_settings(STACK)))
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = struct.pack("<I", 2**31)
    path.write_bytes(content)

    with pytest.raises(BadFile, match="truncated or damaged"):
        stack_reader.inspect(path, Selection(time=0), LIMIT)


def test_cyclic_chains_are_refused(tmp_path: Path) -> None:
    path = write_oib(tmp_path / "a.oib", make_files(STACK, make_settings(STACK)))
    content = bytearray(path.read_bytes())
    # The allocation table is at the end. Its first entry is that of the first sector.
    table = len(content) - 512 * struct.unpack_from("<I", content, 44)[0]
    content[table : table + 4] = struct.pack("<I", 0)
    path.write_bytes(content)

    with pytest.raises(BadFile, match="truncated or damaged"):
        stack_reader.inspect(path, Selection(time=0), LIMIT)


def test_a_name_of_a_scene_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", make_files(STACK, make_settings(STACK)))

    with pytest.raises(BadParameter, match=r"no scene 'b\.oif'"):
        stack_reader.inspect(path, Selection(scene="b.oif"), LIMIT)
