"""Short deterministic fuzz tests, and regression tests for files found by fuzzing.

Each file is either rejected or read as described. `benchmarks/fuzz_tiff.py` runs longer, coverage-guided fuzzing.
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
TAG_ENTRY = struct.Struct("<HHII")
WIDTH_TAG = 256
LENGTH_TAG = 257
SIGNED_BYTE_TYPE = 6


def change_entry(data: bytes, index: int, **changes: int) -> bytes:
    """Return a little-endian classic TIFF with an entry of its first directory changed (tag, kind, count, value)."""
    offset = struct.unpack_from("<I", data, 4)[0] + 2 + index * TAG_ENTRY.size
    entry = dict(zip(("tag", "kind", "count", "value"), TAG_ENTRY.unpack_from(data, offset), strict=True))
    content = bytearray(data)
    TAG_ENTRY.pack_into(content, offset, *({**entry, **changes}.values()))
    return bytes(content)


def read_tag_codes(data: bytes) -> list[int]:
    start = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, start)[0]
    return [TAG_ENTRY.unpack_from(data, start + 2 + index * TAG_ENTRY.size)[0] for index in range(count)]


def make_tiff(**options: object) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, np.arange(3 * 8 * 16, dtype=np.uint16).reshape(3, 8, 16), **options)
    return file.getvalue()


PLAIN_TIFF = make_tiff(photometric="minisblack", metadata=None)
SEEDS = [
    PLAIN_TIFF,
    make_tiff(imagej=True, metadata={"axes": "ZYX"}),
    make_tiff(ome=True, metadata={"axes": "ZYX"}),
    make_tiff(photometric="minisblack", metadata=None, compression="zlib", predictor=True),
    make_tiff(photometric="minisblack", metadata=None, tile=(16, 16), compression="packbits"),
]
# Files whose tags have another binary format.
OTHER_SEEDS = [
    make_tiff(photometric="minisblack", metadata={"axes": "ZYX"}),
    make_tiff(photometric="minisblack", metadata={"axes": "ZYX"}, bigtiff=True, tile=(16, 16)),
]


def check_inspect_and_read(data: bytes) -> None:
    """Check that a file is rejected with a `RequestError`, or read as described."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.tif"
        path.write_bytes(data)
        try:
            description = stack_reader.inspect(path, Selection(), LIMIT)
            volume = stack_reader.read(path, Selection(), LIMIT, Path(folder))
        except RequestError:
            return
        assert min(description.shape) >= 1
        assert volume.read_all().shape == description.shape
        assert volume.read_all().dtype == np.dtype(description.dtype)


@pytest.mark.parametrize(("tag", "value"), [(LENGTH_TAG, 0xA0), (WIDTH_TAG, 0x80), (WIDTH_TAG, 0xFF)])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_negative_image_size_is_rejected(tmp_path: Path, compression: str | None, tag: int, value: int) -> None:
    path = tmp_path / "negative.tif"
    tifffile.imwrite(path, np.zeros((8, 16), np.uint16), metadata=None, compression=compression)
    data = path.read_bytes()
    path.write_bytes(change_entry(data, read_tag_codes(data).index(tag), kind=SIGNED_BYTE_TYPE, count=1, value=value))
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
def test_changed_tags_are_rejected_or_read_as_described(seed: int, edits: list[tuple[int, dict[str, int]]]) -> None:
    data = SEEDS[seed]
    for index, changes in edits:
        data = change_entry(data, index % len(read_tag_codes(SEEDS[seed])), **changes)
    check_inspect_and_read(data)


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SEEDS + OTHER_SEEDS), st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 255)), min_size=1))
def test_changed_bytes_are_rejected_or_read_as_described(seed: bytes, edits: list[tuple[int, int]]) -> None:
    data = bytearray(seed)
    for offset, value in edits[:4]:
        data[offset % len(data)] = value
    check_inspect_and_read(bytes(data))
