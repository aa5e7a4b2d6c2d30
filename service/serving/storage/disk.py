"""Disk usage, file existence checks, and translation of disk errors."""

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

# A file that exceeds the size limit of the process (EFBIG) is treated like a full disk.
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
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
