"""Zarr arrays whose chunks are missing, or have other names than the metadata says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr_files import write_zarr

from service.core.errors import BadFile
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.zarr import chunk_keys
from service.formats.zarr.chunk_keys import ChunkKeys

LIMIT = 2**28
PIXELS = np.arange(1, 8 * 20 * 30 + 1, dtype=np.uint16).reshape(8, 20, 30)
CHUNKS = (4, 8, 8)


def edit_array(store: Path, name: str, **changes: Any) -> None:
    path = store / "0" / name
    metadata = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in metadata.items() if value is not None}))


def write_v2(path: Path, separator: str) -> Path:
    encoding = {"name": "v2", "separator": separator}
    return write_zarr(path, PIXELS, version="0.4", chunks=CHUNKS, chunk_key_encoding=encoding)


@pytest.mark.parametrize(("stored", "stated"), [("/", None), ("/", "."), (".", "/"), (".", None), ("/", "/")])
def test_chunks_are_found_if_the_dimension_separator_is_missing_or_wrong(
    tmp_path: Path, stored: str, stated: str | None
) -> None:
    store = write_v2(tmp_path / "a.zarr", stored)
    edit_array(store, ".zarray", dimension_separator=stated)

    assert np.array_equal(stack_reader.read(store, Selection(), LIMIT).read_all()[0], PIXELS)


@pytest.mark.parametrize("shards", [None, (8, 16, 16)])
@pytest.mark.parametrize("encoding", [{"name": "default", "configuration": {"separator": "."}}, {"name": "v2"}])
def test_chunks_of_format_3_are_found_with_another_key_encoding(
    tmp_path: Path, encoding: dict[str, Any], shards: Any
) -> None:
    store = write_zarr(tmp_path / "a.zarr", PIXELS, chunks=CHUNKS, shards=shards)
    edit_array(store, "zarr.json", chunk_key_encoding=encoding)

    assert np.array_equal(stack_reader.read(store, Selection(), LIMIT).read_all()[0], PIXELS)


def test_array_without_chunks_is_rejected_and_not_read_as_a_black_image(tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", PIXELS, chunks=CHUNKS)
    shutil.rmtree(store / "0" / "c")

    for read in (stack_reader.read, stack_reader.inspect):
        with pytest.raises(BadFile, match=r"none of its 24 chunks is stored, neither under names such as 0/c/0/0/0"):
            read(store, Selection(), LIMIT)


def test_region_without_chunks_has_the_fill_value_if_other_chunks_are_stored(tmp_path: Path) -> None:
    pixels = np.zeros((2, *PIXELS.shape), np.uint16)
    pixels[1, -1, -1, -1] = 1
    store = write_zarr(tmp_path / "a.zarr", pixels, "czyx", chunks=(1, *CHUNKS))

    assert not stack_reader.read(store, Selection(channel=0), LIMIT).read_all().any()
    assert stack_reader.read(store, Selection(channel=1), LIMIT).read_all().any()


class RecordingStore:
    """Store without files that counts the requested files."""

    def __init__(self) -> None:
        self.count = 0

    def read(self, ranges: Any) -> list[None]:
        self.count += len(ranges)
        return [None] * len(ranges)


def test_search_in_a_very_large_array_is_limited() -> None:
    store, keys = RecordingStore(), ChunkKeys("0/", is_default=True, separator="/")

    assert chunk_keys.find_stored_keys(store, keys, (1000, 1000, 1000)) == keys
    assert store.count <= 4 * (2**14 + 1)
