"""A cache of the records in the subfolders of a folder, which are read again only if they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from service.serving.storage.disk import translate_disk_errors

R = TypeVar("R")


class _CachedRecord(NamedTuple, Generic[R]):
    """A record, and the inode and modification time of the file from which it was read."""

    version: tuple[int, int]
    record: R


class RecordCache(Generic[R]):
    """The records in the subfolders of a folder. Thread-safe.

    Args:
        folder: folder that may not exist yet
        file_name: name of the file that contains a record
        read: reads the record of a subfolder; None if the subfolder contains no valid record
    """

    def __init__(self, folder: Path, file_name: str, read: Callable[[Path], R | None]) -> None:
        self._folder, self._file_name, self._read = folder, file_name, read
        self._cached_records: dict[str, _CachedRecord[R]] = {}

    def list(self) -> list[R]:
        """Return all records. Subfolders whose names begin with a period are ignored."""
        cached_records, records = self._cached_records, dict[str, _CachedRecord[R]]()
        with translate_disk_errors():
            names = [entry.name for entry in os.scandir(self._folder)] if self._folder.is_dir() else []
        for name in names:
            if name.startswith("."):
                continue
            try:
                file_status = os.stat(f"{self._folder}/{name}/{self._file_name}")  # noqa: PTH116 - a Path doubles the time
            except OSError:
                continue
            version = file_status.st_ino, file_status.st_mtime_ns
            cached_record = cached_records.get(name)
            if cached_record is not None and cached_record.version == version:
                records[name] = cached_record
            elif (record := self._read(self._folder / name)) is not None:
                records[name] = _CachedRecord(version, record)
        self._cached_records = records
        return [cached_record.record for cached_record in records.values()]
