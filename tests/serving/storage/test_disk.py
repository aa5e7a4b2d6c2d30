from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest

from service.core.errors import OutOfStorage, StorageUnavailable
from service.serving.storage.disk import MIN_UPTIME_FOR_EXPIRY_SECONDS, ExpiryClock, RecordCache, translate_disk_errors


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, OutOfStorage),
        (errno.EDQUOT, OutOfStorage),
        (errno.EIO, StorageUnavailable),
        (errno.EACCES, PermissionError),
    ],
)
def test_only_disk_errors_are_translated(number: int, expected: type[Exception]) -> None:
    with pytest.raises(expected), translate_disk_errors():
        raise OSError(number, "faulty")


def test_only_new_and_changed_records_are_read(tmp_path: Path) -> None:
    reads = list[str]()

    def read(folder: Path) -> str | None:
        reads.append(folder.name)
        return (folder / "record").read_text(encoding="utf-8") or None

    def write(name: str, content: str, time: int) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "record").write_text(content, encoding="utf-8")
        os.utime(tmp_path / name / "record", (time, time))

    cache = RecordCache(tmp_path, "record", read)
    for name in ("a", "b", ".partial"):
        write(name, f"first {name}", 1)
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert sorted(cache.list()) == ["first a", "first b"]
    assert sorted(reads) == ["a", "b"]
    write("a", "second", 2)
    write("c", "", 1)
    assert sorted(cache.list()) == ["first b", "second"]
    assert sorted(reads) == ["a", "a", "b", "c"]
    (tmp_path / "b" / "record").unlink()
    assert cache.list() == ["second"]


def test_folder_need_not_exist(tmp_path: Path) -> None:
    assert RecordCache(tmp_path / "missing", "record", lambda _folder: 1).list() == []


@pytest.mark.parametrize("seed", range(20))
def test_files_expire_after_their_retention_time_whatever_the_system_clock_does(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, keep_seconds = random.Random(seed), 5000.0
    elapsed_seconds, clock_error = 0.0, rng.choice((0.0, 2e5, -2e5))
    monkeypatch.setattr(time, "time", lambda: 1.8e9 + elapsed_seconds + clock_error)
    monkeypatch.setattr(time, "monotonic", lambda: elapsed_seconds)
    clock, uses = ExpiryClock(), list[tuple[float, float]]()
    for _ in range(200):
        elapsed_seconds += rng.uniform(1, 100)
        clock_error = rng.choice((clock_error,) * 20 + (0.0, 2e5, -2e5))
        if rng.random() < 0.1:
            uses.append((elapsed_seconds, clock.read_time()))
        if rng.random() < 0.3:
            limit = clock.compute_limit(keep_seconds)
            for use_seconds, time_of_use in uses:
                assert time_of_use >= limit or elapsed_seconds - use_seconds > keep_seconds - 1e-3


def test_nothing_expires_right_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    uptime = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: uptime[0])
    clock, results = ExpiryClock(), list[list[bool]]()
    for uptime[0] in (9.0, 11.0, MIN_UPTIME_FOR_EXPIRY_SECONDS - 1, MIN_UPTIME_FOR_EXPIRY_SECONDS + 1):
        results.append([time.time() - 2e5 < clock.compute_limit(keep_seconds) for keep_seconds in (10, 1e5)])
    assert results == [[False, False], [True, False], [True, False], [True, True]]
