"""Atomic file writes, and access to folders by file descriptors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Flags to open a folder, so that names can be looked up relative to it. Symbolic links are not followed.
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def write_atomically(path: Path, partial: Path | None = None, *, sync: bool = True) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename the file to `path` after the block.

    If the block or renaming fails, the temporary file is deleted.

    Args:
        path: the final path; an existing file is replaced
        partial: the temporary path, in the same folder. None: `.NAME.part`, which only one process may write at a time
        sync: whether to flush the content to disk before renaming, so that a power failure leaves no empty file

    Raises OSError.
    """
    partial = path.with_name(f".{path.name}.part") if partial is None else partial
    # Other users may write to the folder. If the temporary path is a link, writing would overwrite the link's target.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        if sync:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(*paths: Path) -> None:
    """Flush the content of files, or the entries of folders, to disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def descriptor_path(descriptor: int) -> Path:
    """Return a path through which another process can open a file that is open in this process."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def open_folder_by_path(path: Path) -> Iterator[int]:
    """Open a folder for the duration of the block. The path may contain symbolic links. Raises OSError."""
    folder = os.open(path, OPEN_FOLDER & ~os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def open_subfolder(folder: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open a folder below an open folder for the duration of the block.

    folder  file descriptor of the open folder
    parts   names of the nested folders
    make    whether to create missing folders

    Raises OSError, also if a name is a symbolic link or `..`.
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
