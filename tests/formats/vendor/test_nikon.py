"""Read ND2 files with several positions, time points and channels, and refuse damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from nikon_files import write_nd2

from service.core.errors import BadFile, BadParameter
from service.core.quantities import TimeInterval
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader

pytest.importorskip("nd2")
LIMIT = 2**28
# Time points, positions, planes, channels, rows and columns. Rows have bytes without a meaning at their ends.
STACK = np.random.default_rng(0).integers(0, 250, (3, 2, 4, 2, 7, 9)).astype(np.uint16)


@pytest.mark.parametrize(("dtype", "is_compressed"), [(np.uint8, False), (np.uint16, True), (np.float32, False)])
def test_each_position_is_a_scene(dtype: type, is_compressed: bool, reader: Reader, tmp_path: Path) -> None:
    path = write_nd2(tmp_path / "a.nd2", STACK.astype(dtype), is_compressed=is_compressed)

    description = reader.inspect(path, Selection())
    assert (description.container, description.scenes) == ("Nikon ND2", ("well 0", "well 1"))
    with pytest.raises(BadParameter, match="scene=0 to scene=1"):
        reader.read(path, Selection(), tmp_path)

    description = reader.inspect(path, Selection(scene="well 1", time=0))
    assert (description.axes, description.stored_shape) == ("TZCYX", (3, 4, 2, 7, 9))
    assert (description.channels, description.colours) == (("DAPI", "GFP"), ("#0000ff", "#00ff00"))
    assert description.voxel_size is not None
    assert [*description.voxel_size] == pytest.approx([1.5, 0.25, 0.25])
    # Two positions with four planes each are acquired between time points, one frame per second.
    assert description.time_interval == TimeInterval(8, "s")
    volume = reader.read(path, Selection(scene=1, time=2), tmp_path)
    assert volume.dtype == dtype
    np.testing.assert_array_equal(volume.read_all(), STACK[2, 1].swapaxes(0, 1))


def test_the_stated_period_is_preferred_to_the_times_of_acquisition(tmp_path: Path) -> None:
    path = write_nd2(tmp_path / "a.nd2", STACK[:, 0], "TZ", period_ms=5000)

    assert stack_reader.inspect(path, Selection(time=0), LIMIT).time_interval == TimeInterval(5000, "ms")


@pytest.mark.parametrize("is_compressed", [False, True])
def test_missing_frames(is_compressed: bool, tmp_path: Path) -> None:
    path = write_nd2(tmp_path / "a.nd2", STACK[:, 0], "TZ", is_compressed=is_compressed, missing=(10, 11))

    with pytest.raises(BadFile, match="declares 12 planes, but the file has 10"):
        stack_reader.inspect(path, Selection(time=0), LIMIT)
    description = stack_reader.inspect(path, Selection(allow_incomplete=True), LIMIT)
    assert (description.times, description.time_interval) == (2, TimeInterval(4, "s"))


def test_repeated_loops_are_refused(tmp_path: Path) -> None:
    path = write_nd2(tmp_path / "a.nd2", STACK, "TZZ")

    with pytest.raises(BadFile, match="loops of this file are not supported"):
        stack_reader.inspect(path, Selection(), LIMIT)


@pytest.mark.parametrize("word", ["uiWidthBytes", "sPlaneNew", "pFluorescentProbe", "SLxExperiment"])
def test_damaged_metadata_is_refused(word: str, reader: Reader, tmp_path: Path) -> None:
    path = write_nd2(tmp_path / "a.nd2", STACK[0, 0], "Z")
    content = path.read_bytes()
    encoded = word.encode("utf-16-le")
    assert encoded in content
    path.write_bytes(content.replace(encoded, encoded[:-2] + b"#\0"))

    with pytest.raises(BadFile):
        reader.read(path, Selection(), tmp_path)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_truncated_files_are_refused(part: float, reader: Reader, tmp_path: Path) -> None:
    path = write_nd2(tmp_path / "a.nd2", STACK[0, 0], "Z")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])

    with pytest.raises(BadFile):
        reader.read(path, Selection(), tmp_path)
