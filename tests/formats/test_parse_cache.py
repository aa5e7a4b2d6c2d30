"""What is remembered of files: never of use to another one unless every byte that decided is the same."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import AmbiguousAxes
from service.core.volume import Description, Selection, VoxelSize
from service.formats import sandbox_child
from service.formats.parse_cache import MOST_BYTES, MOST_PARTS, ParseCache, Part, ReadLog, renumber_uuids
from service.formats.sandbox import Reader

LIMIT = 2**28
HEADER = (Part(0, 8),)


def imagej(spacing: float, pixels: np.ndarray) -> bytes:
    return written(pixels, imagej=True, resolution=(4, 4), metadata={"axes": "ZYX", "spacing": spacing, "unit": "um"})


def written(pixels: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, photometric="minisblack", **options)
    return file.getvalue()


def pages(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for plane in pixels:
            writer.write(plane, photometric="minisblack", metadata=None, contiguous=False)
    return file.getvalue()


def ome(pixels: np.ndarray) -> bytes:
    metadata = {"axes": "ZYX", "PhysicalSizeZ": 2.0, "PhysicalSizeY": 0.5, "PhysicalSizeX": 0.5}
    return written(pixels, ome=True, metadata=metadata)


CONTAINERS: dict[str, Callable[[np.ndarray], bytes]] = {
    "imagej": lambda pixels: imagej(0.5, pixels),
    "ome": ome,
    "shaped": lambda pixels: written(pixels, metadata={"axes": "ZYX"}),
    "pages": pages,
    "big": lambda pixels: written(pixels, bigtiff=True, byteorder=">", metadata=None),
}


def pixels(seed: int, shape: tuple[int, ...] = (3, 5, 7)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def answer(path: Path, call: str = "extract") -> dict[str, Any]:
    """What a process says that knows nothing of earlier files."""
    selection = {"channel": None, "time": None, "axes": None, "voxel_size": None}
    request = {"call": call, "path": str(path), "selection": selection, "limit_bytes": LIMIT}
    return sandbox_child.answer(request | {"scratch": str(path.parent)})


@pytest.mark.parametrize("call", ["extract", "inspect"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_no_byte_beside_the_evidence_decides(container: str, call: str, tmp_path: Path) -> None:
    path, stack = tmp_path / "stack.tif", pixels(0)
    content = CONTAINERS[container](stack)
    path.write_bytes(content)
    told = answer(path, call)
    known: ParseCache[dict[str, Any]] = ParseCache()
    known.keep("?", content, told["parts"], told)
    assert known.find("?", content) == told

    planes = [content.find(plane.tobytes()) for plane in stack]
    of_pixels = {place for start in planes for place in range(start, start + stack[0].size)}
    for place, change in itertools.product(range(len(content)), (0x01, 0xFF)):
        other = bytearray(content)
        other[place] ^= change
        found = known.find("?", bytes(other))
        assert (found is not None) >= (place in of_pixels)
        if found is not None:
            path.write_bytes(other)
            assert answer(path, call) == found


@given(st.lists(st.tuples(st.sampled_from(["read", "readinto"]), st.integers(0, 60), st.integers(0, 30)), max_size=20))
def test_every_byte_that_was_given_is_evidence(reads: list[tuple[str, int, int]]) -> None:
    read_log, given = ReadLog(), set()
    stream = read_log.watch(io.BytesIO(bytes(range(50))))
    for call, place, size in reads:
        stream.seek(place)
        buffer = bytearray(size)
        data = stream.read(size) if call == "read" else buffer[: stream.readinto(buffer)]
        assert stream.tell() == place + len(data)
        given |= set(data)
    parts = read_log.parts
    assert parts is not None
    assert {place for part in parts for place in range(part.begin, part.end)} == given
    assert all(one.end < other.begin for one, other in itertools.pairwise(parts))


def test_reading_on_and_from_the_end_is_followed() -> None:
    read_log = ReadLog()
    stream = read_log.watch(io.BytesIO(bytes(100)))
    stream.read(4)
    stream.seek(6, io.SEEK_CUR)
    stream.read(2)
    stream.seek(-5, io.SEEK_END)
    stream.read()
    stream.read(1)
    assert read_log.parts == (Part(0, 4), Part(10, 12), Part(95, 100))


def test_what_is_not_known_to_have_been_read_is_no_evidence() -> None:
    read_log = ReadLog()
    stream = read_log.watch(io.BytesIO(b"some\nlines"))
    assert stream.readline() == b"some\n"
    assert stream.read(2) == b"li"
    assert read_log.parts is None


@pytest.mark.parametrize(("count", "size", "step"), [(MOST_PARTS + 1, 1, 2), (1, MOST_BYTES + 1, 0), (10_000, 2, 3)])
def test_too_much_is_no_evidence(count: int, size: int, step: int) -> None:
    read_log = ReadLog()
    stream = read_log.watch(io.BytesIO(bytes(count * step + size)))
    for number in range(count):
        stream.seek(number * step)
        stream.read(size)
    assert read_log.parts is None


def test_ten_thousand_reads_side_by_side_are_one_range() -> None:
    read_log = ReadLog()
    stream = read_log.watch(io.BytesIO(bytes(10_000)))
    while stream.read(1):
        pass
    assert read_log.parts == (Part(0, 10_000),)


OWN, OTHER, THIRD = (b"01234567-89ab-cdef-0123-%012x" % number for number in (1, 2, 3))


def described(own: bytes, *planes: bytes) -> bytes:
    text = b"".join(b"<UUID FileName='x'>urn:uuid:%s</UUID>" % plane for plane in planes)
    return b'<OME UUID="urn:uuid:%s">%s</OME>' % (own, text)


def test_which_files_are_the_same_is_all_that_is_left_of_their_identifiers() -> None:
    assert renumber_uuids(described(OWN, OWN)) == renumber_uuids(described(OTHER, OTHER))
    assert renumber_uuids(described(OWN, OWN)) != renumber_uuids(described(OWN, OTHER))
    assert renumber_uuids(described(OWN, OTHER, OTHER)) != renumber_uuids(described(OWN, OTHER, THIRD))
    assert renumber_uuids(described(OWN, OTHER, THIRD)) == renumber_uuids(described(THIRD, OWN, OTHER))
    assert len(renumber_uuids(described(OWN, OTHER))) == len(described(OWN, OTHER))
    for text in (
        b"Name='urn:uuid:%s'" % OWN,
        b'UUID="%s"' % OWN,
        b'UUID="urn:uuid:%s"' % OWN[1:],
        described(b"x" * 36),
    ):
        assert renumber_uuids(text) == text


@pytest.mark.parametrize("decoding", [False, True])
def test_identifiers_are_kept_from_who_parses_and_pixels_are_not_changed(decoding: bool) -> None:
    content = b"header, " + described(OWN, OWN)
    read_log = ReadLog()
    stream = read_log.watch(io.BytesIO(content))
    stream.read(8)
    if decoding:
        read_log.end()
    assert stream.read() == (content[8:] if decoding else renumber_uuids(content[8:]))
    assert read_log.parts == (None if decoding else (*HEADER, Part(8, len(content), text=True)))


def test_bytes_that_were_also_read_otherwise_count_as_they_are() -> None:
    content, other = b"header, " + described(OWN), b"header, " + described(OTHER)
    text = Part(8, len(content), text=True)
    known: ParseCache[str] = ParseCache()
    known.keep("what?", content, (*HEADER, text), "an identifier")
    assert known.find("what?", other) == "an identifier"
    assert known.find("what?", b"header, " + described(OTHER).upper()) is None
    known.keep("which?", content, (*HEADER, Part(40, 64), text), "this one")
    assert known.find("which?", content) == "this one"
    assert known.find("which?", other) is None


def test_the_same_question_about_a_file_of_the_same_size_only() -> None:
    known: ParseCache[str] = ParseCache()
    known.keep("what?", b"header, pixels", HEADER, "a header")
    assert known.find("what?", b"header, PIXELS") == "a header"
    assert known.find("what?", b"header, pixels.") is None
    assert known.find("what?", b"Header, pixels") is None
    assert known.find("when?", b"header, pixels") is None


@pytest.mark.parametrize(
    "parts", [[], [Part(8, 12)], [Part(0, MOST_BYTES + 1)], [Part(2 * i, 2 * i + 1) for i in range(MOST_PARTS + 1)]]
)
def test_what_cannot_be_true_or_is_too_much_is_not_kept(parts: list[Part]) -> None:
    known: ParseCache[str] = ParseCache()
    content = bytes(2 * MOST_BYTES)
    known.keep("what?", content, parts, "nonsense")
    assert known.find("what?", content) is None


def test_only_a_few_of_a_kind_are_kept_and_the_last_of_them() -> None:
    known: ParseCache[int] = ParseCache()
    contents = [b"%08d pixels" % number for number in range(20)]
    for number, content in enumerate(contents):
        known.keep("what?", content, HEADER, number)
    found = [known.find("what?", content) for content in contents]
    assert found[-4:] == [16, 17, 18, 19]
    assert not any(found[:16])


@pytest.mark.parametrize("bounds", [{"kinds": 3}, {"limit_bytes": 24}])
def test_what_was_not_used_for_longest_goes(bounds: dict[str, int]) -> None:
    known: ParseCache[int] = ParseCache(**bounds)
    content = b"header, pixels"
    for question in range(3):
        known.keep(question, content, HEADER, question)
    assert known.find(0, content) == 0
    known.keep(3, content, HEADER, 3)
    assert [known.find(question, content) for question in range(4)] == [0, None, 2, 3]


class Asked(Reader):
    """Counts how often a process is asked."""

    asked = 0

    def _call(self, *arguments: Any) -> Any:
        self.asked += 1
        return super()._call(*arguments)


@pytest.fixture
def reader() -> Iterator[Asked]:
    with Asked(memory_bytes=2**29, seconds=10, decoded_bytes=LIMIT, processes=2) as reader:
        yield reader


def files(folder: Path, contents: list[bytes]) -> list[Path]:
    paths = [folder / f"{number}.tif" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


@pytest.mark.parametrize("container", CONTAINERS)
def test_of_stacks_that_differ_in_pixels_one_is_parsed(reader: Asked, container: str, tmp_path: Path) -> None:
    stacks = [pixels(seed) for seed in range(3)]
    for path, stack in zip(files(tmp_path, [CONTAINERS[container](stack) for stack in stacks]), stacks, strict=True):
        volume = reader.read(path, Selection(axes="ZYX"), tmp_path)
        np.testing.assert_array_equal(volume.array()[0], stack)
    assert reader.asked == 1


def test_nothing_is_known_to_others_nor_of_what_others_may_change(reader: Asked, tmp_path: Path) -> None:
    (path,) = files(tmp_path, [imagej(0.5, pixels(0))])
    half = VoxelSize(0.5, 0.5, 0.5)
    for arguments in (
        {},
        {"owner": "somebody"},
        {"owner": "somebody else"},
        {"shared": True},
        {"shared": True},
        {"selection": Selection(voxel_size=half)},
    ):
        before = reader.asked
        reader.read(path, **{"selection": Selection(), "scratch": tmp_path, **arguments})
        assert reader.asked == before + 1
    reader.read(path, Selection(), tmp_path, owner="somebody")
    assert reader.asked == 6


def test_descriptions_are_known_beside_volumes(reader: Asked, tmp_path: Path) -> None:
    one, other = files(tmp_path, [imagej(0.5, pixels(seed)) for seed in (0, 1)])
    told = reader.inspect(one, Selection())
    assert isinstance(told, Description)
    assert reader.inspect(other, Selection()) == told == reader.inspect(other, Selection(), shared=True)
    assert reader.asked == 2
    assert reader.read(other, Selection(), tmp_path).shape == told.shape


def test_decoded_files_and_errors_are_not_remembered(reader: Asked, tmp_path: Path) -> None:
    packed, unclear = files(
        tmp_path,
        [written(pixels(0), compression="zlib", metadata={"axes": "ZYX"}), written(pixels(0, (2, 3, 5, 7)))],
    )
    for _ in range(2):
        np.testing.assert_array_equal(reader.read(packed, Selection(), tmp_path).array()[0], pixels(0))
        with pytest.raises(AmbiguousAxes):
            reader.read(unclear, Selection(), tmp_path)
    assert reader.asked == 4


def test_callers_at_once_each_get_their_own(reader: Asked, tmp_path: Path) -> None:
    spacings, stacks = (0.5, 0.7), [pixels(seed) for seed in range(4)]
    cases = list(itertools.product(spacings, stacks))
    contents = [imagej(spacing, stack) for spacing, stack in cases]
    assert len({len(content) for content in contents}) == 1
    paths = files(tmp_path, contents)

    def read(number: int) -> None:
        spacing, stack = cases[number % len(cases)]
        volume = reader.read(paths[number % len(cases)], Selection(), tmp_path)
        assert volume.voxel_size is not None
        assert volume.voxel_size.z == spacing
        np.testing.assert_array_equal(volume.array()[0], stack)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(400)))
    assert reader.asked < 20
