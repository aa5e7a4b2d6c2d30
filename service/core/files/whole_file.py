"""Files that are there whole or not at all, and folders that are held open."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Opens a folder to look names up in it.
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def write_whole(path: Path, partial: Path | None = None, *, sync: bool = True) -> Iterator[Path]:
    """Write a file at the path that is yielded; it gets its name after the block, and is deleted where that fails.

    Args:
        path: its name, which takes the place of another file
        partial: where it is written, in the same folder; `.NAME.part` if None, which one process writes at a time
        sync: whether the content is on disk before the file has its name, so that a loss of power leaves no empty one

    Raises OSError.
    """
    partial = path.with_name(f".{path.name}.part") if partial is None else partial
    # Others may write into the folder, too: where a link has the name, what it leads to would be replaced.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        if sync:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(*paths: Path) -> None:
    """Have files, or the names in folders, written to the disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def descriptor_path(descriptor: int) -> Path:
    """Return a path by which another process can open a file that this one has open."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def open_root(path: Path) -> Iterator[int]:
    """Open a folder by its path, which may lead over links, until the end of the block. Raises OSError."""
    folder = os.open(path, OPEN_FOLDER & ~os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def open_below(folder: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open the folder that names lead to from an open one, until the end of the block; `make` those that are missing.

    Raises OSError, also for a name that leads out of a folder.
    """
    if ".." in parts:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    opened = os.dup(folder)
    try:
        for part in parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=opened)
            inner = os.open(part, OPEN_FOLDER, dir_fd=opened)
            os.close(opened)
            opened = inner
        yield opened
    finally:
        os.close(opened)
