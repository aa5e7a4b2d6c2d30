"""Read LIF files with several images and tiles, and refuse scans along other axes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core.errors import BadFile, BadParameter
from service.core.quantities import TimeInterval
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader

pytest.importorskip("liffile")
LIMIT = 2**28
DIMENSION_IDS = {"X": 1, "Y": 2, "Z": 3, "T": 4, "λ": 5, "M": 10}
CHANNEL_ATTRIBUTES = (
    'DataType="0" ChannelTag="0" Resolution="16" NameOfMeasuredQuantity="" Min="0" Max="1" Unit="" IsLUTInverted="0"'
    ' BitInc="0"'
)
STEPS = {"X": 2e-7, "Y": 3e-7, "Z": 1.5e-6, "T": 2.0, "λ": 1e-8, "M": 1.0}


def make_image(name: str, axes: str, pixels: np.ndarray) -> str:
    """Return the XML element of an image whose axes end with YX and may contain C."""
    strides = dict(zip(axes, pixels.strides, strict=True))
    lengths = dict(zip(axes, pixels.shape, strict=True))
    channels = "".join(
        f'<ChannelDescription LUTName="{color}" BytesInc="{index * strides.get("C", 0)}" {CHANNEL_ATTRIBUTES}/>'
        for index, color in enumerate(("Green", "Red")[: lengths.get("C", 1)])
    )
    dimensions = "".join(
        f'<DimensionDescription DimID="{DIMENSION_IDS[axis]}" NumberOfElements="{length}" Origin="0"'
        f' Length="{STEPS[axis] * (length - 1)}" Unit="{"s" if axis == "T" else "m"}" BytesInc="{strides[axis]}"'
        ' BitInc="0"/>'
        for axis, length in lengths.items()
        if axis != "C"
    )
    return (
        f'<Element Name="{name}" UniqueID="{name}"><Data><Image><ImageDescription><Channels>{channels}</Channels>'
        f"<Dimensions>{dimensions}</Dimensions></ImageDescription></Image></Data>"
        f'<Memory Size="{pixels.nbytes}" MemoryBlockID="Block_{name}"/></Element>'
    )


def make_block(memory_id: str, content: bytes) -> bytes:
    head = struct.pack("<BQBI", 0x2A, len(content), 0x2A, len(memory_id)) + memory_id.encode("utf-16-le")
    return struct.pack("<II", 0x70, len(head)) + head + content


def write_lif(path: Path, images: dict[str, tuple[str, np.ndarray]]) -> Path:
    elements = "".join(make_image(name, axes, pixels) for name, (axes, pixels) in images.items())
    xml = (
        f'<LMSDataContainerHeader Version="2"><Element Name="file"><Memory Size="0" MemoryBlockID="Block"/>'
        f"<Children>{elements}</Children></Element></LMSDataContainerHeader>"
    )
    text = struct.pack("<BI", 0x2A, len(xml)) + xml.encode("utf-16-le")
    blocks = (make_block(f"Block_{name}", pixels.tobytes()) for name, (_, pixels) in images.items())
    path.write_bytes(struct.pack("<II", 0x70, len(text)) + text + b"".join(blocks))
    return path


def make_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 60_000, shape).astype(np.uint16)


def test_each_image_is_a_scene(reader: Reader, tmp_path: Path) -> None:
    images: dict[str, Any] = {"left": ("CZYX", make_pixels(2, 3, 8, 9)), "right": ("TYX", make_pixels(4, 7, 6))}
    path = write_lif(tmp_path / "a.lif", images)

    description = reader.inspect(path, Selection())
    assert (description.container, description.scenes) == ("Leica LIF", ("left", "right"))
    assert "2 scenes: 0 (left), 1 (right)" in description.problem
    with pytest.raises(BadParameter, match="scene=0 to scene=1"):
        reader.read(path, Selection(), tmp_path)

    description = reader.inspect(path, Selection(scene="left"))
    assert (description.axes, description.shape, description.problem) == ("CZYX", (2, 3, 8, 9), "")
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
    [("λYX", "emission wavelengths"), ("ZX", "scanned along Z and X"), ("YTX", "scanned along T and X")],
)
def test_other_scans_are_refused_and_do_not_hide_other_images(axes: str, message: str, tmp_path: Path) -> None:
    stack = make_pixels(3, 8, 9)
    path = write_lif(
        tmp_path / "a.lif", {"scan": (axes, make_pixels(*range(4, 4 + len(axes)))), "stack": ("ZYX", stack)}
    )

    with pytest.raises(BadFile, match=message):
        stack_reader.inspect(path, Selection(scene="scan"), LIMIT)
    assert stack_reader.inspect(path, Selection(), LIMIT).scenes == ("scan", "stack")
    np.testing.assert_array_equal(stack_reader.read(path, Selection(scene="stack"), LIMIT).read_all()[0], stack)


@pytest.mark.parametrize("part", [0.01, 0.3, 0.7, 0.95])
def test_truncated_files_are_refused(part: float, reader: Reader, tmp_path: Path) -> None:
    path = write_lif(tmp_path / "a.lif", {"stack": ("ZYX", make_pixels(3, 8, 9))})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])

    with pytest.raises(BadFile):
        reader.read(path, Selection(), tmp_path)
