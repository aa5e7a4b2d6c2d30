"""Disk usage, file existence checks, cached records, expiry of files, and translation of disk errors."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from service.core.errors import BadParameter, OutOfStorage, StorageUnavailable

R = TypeVar("R")

# A file that exceeds the size limit of the process (EFBIG) is treated like a full disk.
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Nothing expires until the process has run for this time, because the clock of a host may be wrong after it has booted.
MIN_UPTIME_FOR_EXPIRY_SECONDS = 3600.0
# Error numbers for failing or missing disks, and for deleted files of the service.
DISK_FAILURE_ERRNOS = {errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.ENOTDIR}


class DiskUsage(NamedTuple):
    """Disk usage of files of one kind, in bytes. The field names are members of `GET /status`.

    used   size of these files
    limit  maximum size of these files; None if unlimited
    free   free space on the disk
    total  size of the disk
    """

    used: int
    limit: int | None
    free: int
    total: int


def measure_disk(folder: Path, used_bytes: int, limit_bytes: int | None) -> DiskUsage:
    """Return the usage of the disk that contains a folder. The folder need not exist yet."""
    existing_folder = next((parent for parent in (folder, *folder.absolute().parents) if parent.is_dir()), Path("/"))
    disk = shutil.disk_usage(existing_folder)
    return DiskUsage(used_bytes, limit_bytes, disk.free, disk.total)


def count_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder. Files may be changed or deleted at the same time."""
    total_bytes = 0
    for path in folder.rglob("*"):
        try:
            total_bytes += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total_bytes


@cache
def _get_libc_access() -> Callable[[bytes, int], int]:
    access = ctypes.PyDLL(None).access
    access.argtypes, access.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    typed_access: Callable[[bytes, int], int] = access
    return typed_access


def path_exists(path: Path) -> bool:
    """Return whether a file exists, without releasing the GIL. Reacquiring the GIL could take longer than the check."""
    return _get_libc_access()(os.fsencode(path), os.F_OK) == 0


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Translate an OSError for a full disk to OutOfStorage, and other disk errors to StorageUnavailable.

    Any other OSError, such as a connection error, is not translated.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise OutOfStorage("The disk of the service is full. Try again later, or send a smaller file.") from error
        if error.errno in DISK_FAILURE_ERRNOS:
            raise StorageUnavailable(
                f"The service cannot access one of its files ({error.strerror}). Try again later."
            ) from error
        raise


@contextmanager
def translate_host_errors(parameter: str, location: str) -> Iterator[None]:
    """Translate an OSError for a location on the host to BadParameter or OutOfStorage.

    The system message is omitted, because it may contain paths.
    """
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ELOOP | errno.ENOTDIR:
                problem = "contains a link or a file where a folder is expected. Links are not followed"
            case errno.ENOENT:
                problem = (
                    "does not exist" if parameter == "input" else "is in a folder that does not exist. Create it first"
                )
            case errno.EACCES | errno.EPERM:
                problem = "cannot be opened, because the service has no permission"
            case errno.EISDIR | errno.ENOTEMPTY | errno.EROFS | errno.ENAMETOOLONG | errno.EBUSY | errno.ETXTBSY:
                problem = f"cannot be used: {os.strerror(error.errno)}"
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                raise make_disk_full_error(location) from error
            case _:
                raise
        raise BadParameter.for_parameter(parameter, f"{location} {problem}.") from None


def make_disk_full_error(location: str) -> OutOfStorage:
    """Return the error for a full disk with an output folder on the host."""
    return OutOfStorage(
        f"output_to: the disk that contains {location} is full. Try again later, or choose another folder.",
        parameter="output_to",
    )


def get_file_size(path: Path) -> int:
    """Return the size of a file in bytes, or -1 if it does not exist."""
    with translate_disk_errors():
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return -1


class ExpiryClock:
    """Decides which files have expired, even if the system clock is set while the process is running.

    If the system clock jumps forward, for example because it was corrected or the host was suspended, the expiry clock
    continues at its normal rate. If the system clock is set back, the expiry clock follows. Files therefore expire
    later, but never sooner than after their retention time.
    """

    def __init__(self) -> None:
        self._start_time, self._offset = time.monotonic(), math.inf
        self.read_time()

    def read_time(self) -> float:
        """Return the system time. Call this at every use of a file, so that a clock that was set back is noticed."""
        system_time = time.time()
        self._offset = min(self._offset, system_time - time.monotonic())
        return system_time

    def compute_limit(self, keep_seconds: float) -> float:
        """Return the time, in seconds since the Unix epoch, before which files that have expired were last used."""
        self.read_time()
        now = time.monotonic()
        has_started = now - self._start_time >= min(keep_seconds, MIN_UPTIME_FOR_EXPIRY_SECONDS)
        return self._offset + now - keep_seconds if has_started else -math.inf


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
