"""Read LIF files with several images and tiles, and refuse scans along other axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leica_files import write_lif

from service.core.errors import BadFile, BadParameter
from service.core.quantities import TimeInterval
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader

pytest.importorskip("liffile")
LIMIT = 2**28


def make_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 60_000, shape).astype(np.uint16)


def test_each_image_is_a_scene(reader: Reader, tmp_path: Path) -> None:
    images: dict[str, Any] = {"left": ("CZYX", make_pixels(2, 3, 8, 9)), "right": ("TYX", make_pixels(4, 7, 6))}
    path = write_lif(tmp_path / "a.lif", images)

    description = reader.inspect(path, Selection())
    assert (description.container, description.scenes) == ("Leica LIF", ("left", "right"))
    assert description.example_scene == 0
    assert "2 scenes: 0 (left), 1 (right)" in description.problem
    with pytest.raises(BadParameter, match="scene=0 to scene=1"):
        reader.read(path, Selection(), tmp_path)

    description = reader.inspect(path, Selection(scene="left"))
    assert (description.axes, description.shape, description.problem) == ("CZYX", (2, 3, 8, 9), "")
    assert description.example_scene is None
    assert description.colours == ("#00ff00", "#ff0000")
    assert description.voxel_size is not None
    assert [*description.voxel_size] == pytest.approx([1.5, 0.3, 0.2])
    np.testing.assert_array_equal(reader.read(path, Selection(scene=0), tmp_path).read_all(), images["left"][1])
    assert stack_reader.inspect(path, Selection(scene=1, time=2), LIMIT).time_interval == TimeInterval(2, "s")
    volume = stack_reader.read(path, Selection(scene=1, time=2), LIMIT)
    np.testing.assert_array_equal(volume.read_all()[0, 0], images["right"][1][2])


def test_tiles_are_scenes(tmp_path: Path) -> None:
    pixels = make_pixels(2, 3, 8, 9)
    path = write_lif(tmp_path / "a.lif", {"mosaic": ("MZYX", pixels)})

    for tile in range(2):
        volume = stack_reader.read(path, Selection(scene=f"mosaic tile {tile}"), LIMIT)
        np.testing.assert_array_equal(volume.read_all()[0], pixels[tile])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("CλYX", "emission wavelengths in addition to channels"),
        ("ZX", "scanned along Z and X"),
        ("YTX", "scanned along T and X"),
    ],
)
def test_other_scans_are_refused_and_do_not_hide_other_images(axes: str, message: str, tmp_path: Path) -> None:
    stack = make_pixels(3, 8, 9)
    path = write_lif(
        tmp_path / "a.lif", {"scan": (axes, make_pixels(*range(4, 4 + len(axes)))), "stack": ("ZYX", stack)}
    )

    with pytest.raises(BadFile, match=message):
        stack_reader.inspect(path, Selection(scene="scan"), LIMIT)
    description = stack_reader.inspect(path, Selection(), LIMIT)
    assert (description.scenes, description.example_scene) == (("scan", "stack"), 1)
    np.testing.assert_array_equal(stack_reader.read(path, Selection(scene="stack"), LIMIT).read_all()[0], stack)


@pytest.mark.parametrize(("axis", "bands"), [("λ", ("0 nm", "10 nm", "20 nm")), ("Λ", ("0 nm", "5 nm", "10 nm"))])
def test_bands_of_a_spectrum_are_channels(axis: str, bands: tuple[str, ...], tmp_path: Path) -> None:
    pixels = make_pixels(2, 3, 4, 8, 9)
    path = write_lif(tmp_path / "a.lif", {"sweep": (f"T{axis}ZYX", pixels)})

    description = stack_reader.inspect(path, Selection(time=1), LIMIT)
    assert (description.axes, description.channels) == ("TCZYX", bands)
    volume = stack_reader.read(path, Selection(channel=bands[2], time=1), LIMIT)
    np.testing.assert_array_equal(volume.read_all()[0], pixels[1, 2])


def test_channels_have_the_names_of_their_dyes_or_detectors(reader: Reader, tmp_path: Path) -> None:
    pixels = make_pixels(3, 3, 8, 9)
    properties = [
        {"DetectorName": "HyD 1", "DyeName": "Leica/ALEXA 488"},
        {"DyeName": "DAPI"},
        {"DetectorName": "PMT Trans", "DyeName": ""},
    ]
    path = write_lif(tmp_path / "a.lif", {"stack": ("CZYX", pixels)}, properties)
    assert reader.inspect(path, Selection()).channels == ("ALEXA 488", "DAPI", "PMT Trans")
    volume = reader.read(path, Selection(channel="DAPI"), tmp_path)
    np.testing.assert_array_equal(volume.read_all()[0], pixels[1])


@pytest.mark.parametrize("part", [0.01, 0.3, 0.7, 0.95])
def test_truncated_files_are_refused(part: float, reader: Reader, tmp_path: Path) -> None:
    path = write_lif(tmp_path / "a.lif", {"stack": ("ZYX", make_pixels(3, 8, 9))})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])

    with pytest.raises(BadFile):
        reader.read(path, Selection(), tmp_path)
