"""The disk: how much of it is used and free, whether a file is there, and what its errors mean."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from service.core.errors import OutOfStorage, StorageUnavailable

# A file larger than the process may write counts as a full disk.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A disk that fails or is gone, and files of the service that somebody has deleted.
DISK_FAULTS = {errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.ENOTDIR}


class DiskUsage(NamedTuple):
    """Bytes that files of one kind take and may take (None: any number), and those of the disk, free and all."""

    used: int
    limit: int | None
    free: int
    total: int


def measure_disk(folder: Path, used: int, limit: int | None) -> DiskUsage:
    """Return the usage of files in a folder, or in the first that exists on the way to it."""
    there = next((parent for parent in (folder, *folder.absolute().parents) if parent.is_dir()), Path("/"))
    disk = shutil.disk_usage(there)
    return DiskUsage(used, limit, disk.free, disk.total)


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, which others may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


@cache
def _libc_access() -> Callable[[bytes, int], int]:
    access = ctypes.PyDLL(None).access
    access.argtypes, access.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    typed: Callable[[bytes, int], int] = access
    return typed


def path_exists(path: Path) -> bool:
    """Return whether a file exists, without releasing the GIL: getting it back takes a busy service longer."""
    return _libc_access()(os.fsencode(path), os.F_OK) == 0


@contextmanager
def translate_disk_faults() -> Iterator[None]:
    """Raise OutOfStorage for the OSError of a full disk, StorageUnavailable for others of the service's own files.

    Any other OSError passes through, such as that of a connection.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OutOfStorage("The disk that holds uploads is full; try again later, or send less.") from error
        if error.errno in DISK_FAULTS:
            raise StorageUnavailable(
                f"A file that the service keeps cannot be used ({error.strerror}); try again later."
            ) from error
        raise
