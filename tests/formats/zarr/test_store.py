"""Parts of files of a store, read by several threads."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from service.formats.zarr.store import Part, ZipStore


def test_threads_read_shards_of_an_archive_whether_they_are_compressed_or_not(tmp_path: Path) -> None:
    shards = {f"c/{number}": random.Random(number).randbytes(20_000) for number in range(8)}
    with ZipFile(tmp_path / "a.ozx", "w") as archive:
        archive.writestr("zarr.json", "{}")
        for number, (key, content) in enumerate(shards.items()):
            archive.writestr(key, content, ZIP_STORED if number % 2 else ZIP_DEFLATED)
    interval = sys.getswitchinterval()
    # Threads take turns as often as they can.
    sys.setswitchinterval(1e-6)
    with (tmp_path / "a.ozx").open("rb") as file, ThreadPoolExecutor(8) as pool:
        store, keys = ZipStore(file), list(shards) * 250
        read = list(pool.map(lambda key: store.read([Part(key, 100, 9_000)]), keys))
    sys.setswitchinterval(interval)
    assert read == [[shards[key][9_000:9_100]] for key in keys]
