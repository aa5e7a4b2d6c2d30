"""Space on disk: how much the files of one kind take and may take, and how much is free."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple


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
