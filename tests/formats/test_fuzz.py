"""Files that fuzzing found something with, and a short, repeatable fuzz: refused, or read as described.

`benchmarks/fuzz_tiff.py` fuzzes longer, guided by coverage.
"""

from __future__ import annotations

import io
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.core.errors import BadFile, RequestError
from service.core.types import Selection
from service.formats import stack_reader

LIMIT = 2**24
ENTRY = struct.Struct("<HHII")
WIDTH, LENGTH = 256, 257
SIGNED_BYTE = 6


def with_entry(data: bytes, index: int, **changes: int) -> bytes:
    """A little-endian classic TIFF with an entry of its first directory changed: tag, kind, count, value."""
    place = struct.unpack_from("<I", data, 4)[0] + 2 + index * ENTRY.size
    entry = dict(zip(("tag", "kind", "count", "value"), ENTRY.unpack_from(data, place), strict=True))
    changed = bytearray(data)
    ENTRY.pack_into(changed, place, *({**entry, **changes}.values()))
    return bytes(changed)


def tags_of(data: bytes) -> list[int]:
    start = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, start)[0]
    return [ENTRY.unpack_from(data, start + 2 + index * ENTRY.size)[0] for index in range(count)]


def written(**options: object) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, np.arange(3 * 8 * 16, dtype=np.uint16).reshape(3, 8, 16), **options)
    return file.getvalue()


PLAIN = written(photometric="minisblack", metadata=None)
SEEDS = [
    PLAIN,
    written(imagej=True, metadata={"axes": "ZYX"}),
    written(ome=True, metadata={"axes": "ZYX"}),
    written(photometric="minisblack", metadata=None, compression="zlib", predictor=True),
    written(photometric="minisblack", metadata=None, tile=(16, 16), compression="packbits"),
]
# Whose tags have another form.
OTHER_SEEDS = [
    written(photometric="minisblack", metadata={"axes": "ZYX"}),
    written(photometric="minisblack", metadata={"axes": "ZYX"}, bigtiff=True, tile=(16, 16)),
]


def look(data: bytes) -> None:
    """Describe and read; what is refused must be refused by name, what is not must be as it was described."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.tif"
        path.write_bytes(data)
        try:
            described = stack_reader.inspect(path, Selection(), LIMIT)
            volume = stack_reader.read(path, Selection(), LIMIT, Path(folder))
        except RequestError:
            return
        assert min(described.shape) >= 1
        assert volume.array().shape == described.shape
        assert volume.array().dtype == np.dtype(described.dtype)


@pytest.mark.parametrize(("tag", "value"), [(LENGTH, 0xA0), (WIDTH, 0x80), (WIDTH, 0xFF)])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_size_of_a_signed_type_is_refused(tmp_path: Path, compression: str | None, tag: int, value: int) -> None:
    path = tmp_path / "negative.tif"
    tifffile.imwrite(path, np.zeros((8, 16), np.uint16), metadata=None, compression=compression)
    data = path.read_bytes()
    path.write_bytes(with_entry(data, tags_of(data).index(tag), kind=SIGNED_BYTE, count=1, value=value))
    for call in (stack_reader.inspect, stack_reader.read):
        with pytest.raises(BadFile, match=r"pixels|negative|damaged"):
            call(path, Selection(), LIMIT)


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 32, 64, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)
CHANGES = st.fixed_dictionaries(
    {}, optional={"kind": st.integers(0, 20), "count": NUMBERS, "value": NUMBERS, "tag": st.sampled_from([254, 65000])}
)


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(SEEDS) - 1), st.lists(st.tuples(st.integers(0, 30), CHANGES), min_size=1, max_size=3))
def test_changed_tags_are_refused_or_read_as_described(seed: int, edits: list[tuple[int, dict[str, int]]]) -> None:
    data = SEEDS[seed]
    for index, changes in edits:
        data = with_entry(data, index % len(tags_of(SEEDS[seed])), **changes)
    look(data)


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SEEDS + OTHER_SEEDS), st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 255)), min_size=1))
def test_changed_bytes_are_refused_or_read_as_described(seed: bytes, edits: list[tuple[int, int]]) -> None:
    data = bytearray(seed)
    for place, value in edits[:4]:
        data[place % len(data)] = value
    look(bytes(data))
