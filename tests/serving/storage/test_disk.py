from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from service.core.errors import OutOfStorage, StorageUnavailable
from service.serving.storage.disk import RecordCache, translate_disk_errors


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
