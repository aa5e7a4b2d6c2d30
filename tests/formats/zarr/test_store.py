"""Concurrent reads of byte ranges in a Zarr store."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from service.formats.zarr.store import FileRange, ZipStore


def test_threads_read_stored_and_compressed_shards_of_an_archive(tmp_path: Path) -> None:
    shards = {f"c/{number}": random.Random(number).randbytes(20_000) for number in range(8)}
    with ZipFile(tmp_path / "a.ozx", "w") as archive:
        archive.writestr("zarr.json", "{}")
        for number, (key, content) in enumerate(shards.items()):
            archive.writestr(key, content, ZIP_STORED if number % 2 else ZIP_DEFLATED)
    interval = sys.getswitchinterval()
    # Switch threads as often as possible.
    sys.setswitchinterval(1e-6)
    with (tmp_path / "a.ozx").open("rb") as file, ThreadPoolExecutor(8) as pool:
        store, keys = ZipStore(file), list(shards) * 250
        results = list(pool.map(lambda key: store.read([FileRange(key, 100, 9_000)]), keys))
    sys.setswitchinterval(interval)
    assert results == [[shards[key][9_000:9_100]] for key in keys]
