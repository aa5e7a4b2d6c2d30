"""Files written by a small CZI writer are read with the same pixels, axes and metadata."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import imagecodecs
import numpy as np
import pytest

from service.core.errors import BadFile, BadParameter, TooLarge
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader

LIMIT = 2**26
PIXEL_TYPES = {("uint8", 1): 0, ("uint16", 1): 1, ("float32", 1): 2, ("uint8", 3): 3}
METADATA = """<ImageDocument><Metadata><Information><Image><SizeT>2</SizeT><Dimensions>
<Channels><Channel Name="DAPI"><Color>#FF0000FF</Color></Channel><Channel/></Channels>
<T><Positions><List><Offsets>0 60.1 120</Offsets></List></Positions></T>
<S><Scenes><Scene Index="0" Name="A1"/><Scene Index="1" Name="B2"/></Scenes></S>
</Dimensions></Image></Information><Scaling><Items><Distance Id="X"><Value>2E-07</Value></Distance>
<Distance Id="Y"><Value>2E-07</Value></Distance><Distance Id="Z"><Value>5E-07</Value></Distance></Items></Scaling>
</Metadata></ImageDocument>"""


class Block(NamedTuple):
    """Subblock with pixels [Y, X] or [Y, X, S] at a position, such as {"C": 1, "Y": 20, "X": 0}."""

    position: dict[str, int]
    pixels: np.ndarray
    compression: int = 0
    data: bytes | None = None
    covered: tuple[int, int] | None = None


def write_czi(path: Path, blocks: list[Block], metadata: str = "<ImageDocument/>") -> Path:
    content, entries = bytearray(112), list[bytes]()
    for block in blocks:
        entry = _encode_entry(block, len(content))
        data = block.pixels.tobytes() if block.data is None else block.data
        head = struct.pack("<iiq", 0, 0, len(data)) + entry
        content += _encode_segment(b"ZISRAWSUBBLOCK", head.ljust(256, b"\0") + data)
        entries.append(entry)
    directory_position = len(content)
    content += _encode_segment(b"ZISRAWDIRECTORY", struct.pack("<i124x", len(entries)) + b"".join(entries))
    metadata_position = len(content)
    content += _encode_segment(b"ZISRAWMETADATA", struct.pack("<i252x", len(metadata)) + metadata.encode())
    header = struct.pack("<iiii16s16siqqiq", 1, 0, 0, 0, b"", b"", 0, directory_position, metadata_position, 0, 0)
    content[:112] = _encode_segment(b"ZISRAWFILE", header)
    path.write_bytes(content)
    return path


def _encode_segment(name: bytes, content: bytes) -> bytes:
    return struct.pack("<16sqq", name, len(content), len(content)) + content


def _encode_entry(block: Block, position: int) -> bytes:
    height, width, *samples = block.pixels.shape
    pixel_type = PIXEL_TYPES[block.pixels.dtype.name, (samples or [1])[0]]
    stored = {"Y": height, "X": width}
    covered = dict(zip("YX", block.covered, strict=True)) if block.covered else stored
    starts = {"X": 0, "Y": 0} | block.position
    dimensions = [
        struct.pack("<4siifi", axis.encode(), start, covered.get(axis, 1), 0.0, stored.get(axis, 1))
        for axis, start in starts.items()
    ]
    head = struct.pack("<2siqiiBB4si", b"DV", pixel_type, position, 0, block.compression, 0, 0, b"", len(dimensions))
    return head + b"".join(dimensions)


def make_planes(stack: np.ndarray, **position: int) -> Iterator[Block]:
    """Yield a block for each plane of a stack [T, C, Z, Y, X]."""
    for t, c, z in np.ndindex(stack.shape[:3]):
        yield Block(position | {"T": t, "C": c, "Z": z}, stack[t, c, z])


def read(path: Path, **selection: object) -> np.ndarray:
    volume = stack_reader.read(path, Selection(**selection), LIMIT)  # type: ignore[arg-type]
    return volume.read(0, volume.shape[1])


@pytest.fixture
def stack() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60_000, (2, 2, 3, 20, 30)).astype(np.uint16)


def test_stacks_are_read_with_their_metadata(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_czi(tmp_path / "stack.czi", list(make_planes(stack)), METADATA)
    description = stack_reader.inspect(path, Selection(time=0), LIMIT)
    assert (description.container, description.axes, description.stored_shape) == ("Zeiss CZI", "TCZYX", stack.shape)
    assert description.voxel_size is not None
    assert tuple(description.voxel_size) == pytest.approx(tuple(VoxelSize(0.5, 0.2, 0.2)))
    assert (description.channels, description.colours) == (("DAPI", ""), ("#0000ff", ""))
    assert description.time_interval == TimeInterval(60.0, "s")
    for time in range(2):
        np.testing.assert_array_equal(read(path, time=time), stack[time])


def test_scenes_are_separate_images_of_different_sizes(tmp_path: Path, stack: np.ndarray) -> None:
    small = stack[:1, :1, :, :7, :9]
    path = write_czi(tmp_path / "scenes.czi", [*make_planes(stack, S=0), *make_planes(small, S=1, X=500)], METADATA)
    assert stack_reader.inspect(path, Selection(), LIMIT).scenes == ("A1", "B2")
    np.testing.assert_array_equal(read(path, scene=0, time=1), stack[1])
    np.testing.assert_array_equal(read(path, scene="B2"), small[0])


@pytest.mark.parametrize(
    ("compression", "header"), [(5, b""), (6, b"\1"), (6, b"\3\1\0"), (6, b"\3\1\1")], ids=["zstd0", "1", "3", "split"]
)
def test_zstd_is_decoded(tmp_path: Path, stack: np.ndarray, compression: int, header: bytes) -> None:
    plane = stack[0, 0, 0]
    content = plane.tobytes()
    if header == b"\3\1\1":
        content = content[::2] + content[1::2]
    data = header + imagecodecs.zstd_encode(content)
    path = write_czi(tmp_path / "zstd.czi", [Block({}, plane, compression, data)])
    np.testing.assert_array_equal(read(path)[0, 0], plane)


@pytest.mark.parametrize(("compression", "name"), [(1, "JPEG"), (4, "JPEG XR")])
def test_labels_with_lossy_compression_are_refused(
    tmp_path: Path, stack: np.ndarray, compression: int, name: str
) -> None:
    planes = [Block({"Z": z}, stack[0, 0, z], *((compression, b"") if z else ())) for z in range(2)]
    path = write_czi(tmp_path / "labels.czi", planes)
    with pytest.raises(BadFile, match=f"compressed with {name}, which"):
        stack_reader.inspect(path, Selection(is_labels=True), LIMIT)
    assert stack_reader.inspect(path, Selection(), LIMIT).shape[1] == 2


def test_colors_are_stored_in_reverse_order(tmp_path: Path, reader: Reader) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    path = write_czi(tmp_path / "color.czi", [Block({}, pixels)])
    assert stack_reader.inspect(path, Selection(), LIMIT).channels == ("red", "green", "blue")
    expected = pixels[..., ::-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(read(path)[:, 0], expected)
    np.testing.assert_array_equal(reader.read(path, Selection(), tmp_path).read(0, 1)[:, 0], expected)


def test_tiles_with_larger_numbers_cover_the_others(tmp_path: Path) -> None:
    tiles = [np.full((4, 4), value, np.uint8) for value in (1, 2, 3)]
    blocks = [Block({"M": m, "X": x, "Y": -8}, tiles[m]) for m, x in ((2, 6), (1, 2), (0, 0))]
    path = write_czi(tmp_path / "mosaic.czi", blocks)
    np.testing.assert_array_equal(read(path)[0, 0, 0], [1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    assert not [note for note in stack_reader.inspect(path, Selection(), LIMIT).notes if "covered" in note]


def test_notes_state_how_much_of_a_mosaic_is_missing(tmp_path: Path) -> None:
    tile = np.full((4, 4), 9, np.uint8)
    path = write_czi(tmp_path / "gap.czi", [Block({"X": x, "M": m}, tile) for m, x in enumerate((0, 2, 12))])
    assert any(
        "38% of the image is not covered" in note for note in stack_reader.inspect(path, Selection(), LIMIT).notes
    )
    np.testing.assert_array_equal(read(path)[0, 0, 0], [9] * 6 + [0] * 6 + [9] * 4)


def test_downsampled_blocks_are_ignored(tmp_path: Path, stack: np.ndarray) -> None:
    plane = stack[0, 0, 0]
    blocks = [Block({}, plane), Block({}, plane[::2, ::2].copy(), covered=plane.shape)]
    np.testing.assert_array_equal(read(write_czi(tmp_path / "pyramid.czi", blocks))[0, 0], plane)


def test_missing_planes_are_refused_unless_allowed(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_czi(tmp_path / "stopped.czi", list(make_planes(stack))[:-2])
    with pytest.raises(BadFile, match="declares 12 planes, but the file has 10"):
        read(path, time=0)
    np.testing.assert_array_equal(read(path, time=0, allow_incomplete=True), stack[0])
    with pytest.raises(BadParameter):
        read(path, time=1, allow_incomplete=True)


def test_planes_that_only_the_metadata_declares_are_missing(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_czi(tmp_path / "first.czi", list(make_planes(stack[:1])), METADATA)
    with pytest.raises(BadFile, match="declares 12 planes, but the file has 6"):
        read(path)


def test_phases_are_refused_by_name(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_czi(tmp_path / "phases.czi", [Block({"H": phase}, stack[0, 0, 0]) for phase in range(5)])
    with pytest.raises(BadFile, match="5 phases"):
        read(path)


def test_gigantic_tiles_are_refused_before_they_are_allocated(tmp_path: Path, stack: np.ndarray) -> None:
    block = Block({}, stack[0, 0, 0])
    path = write_czi(tmp_path / "huge.czi", [block])
    size = struct.pack("<i", 30)
    content = path.read_bytes().replace(b"X\0\0\0\0\0\0\0" + size, b"X\0\0\0\0\0\0\0" + struct.pack("<i", 2**30))
    path.write_bytes(content.replace(size + b"Y\0\0\0", struct.pack("<i", 2**30) + b"Y\0\0\0"))
    with pytest.raises(TooLarge):
        read(path)


def test_every_truncated_file_is_refused(tmp_path: Path, stack: np.ndarray) -> None:
    content = write_czi(tmp_path / "full.czi", list(make_planes(stack[:1, :1, :2]))).read_bytes()
    path = tmp_path / "truncated.czi"
    for length in range(12, len(content) - 1, 97):
        path.write_bytes(content[:length])
        with pytest.raises(BadFile):
            read(path)
