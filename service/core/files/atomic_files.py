"""Atomic file writes, and access to folders through file descriptors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Flags for opening a folder relative to which names are looked up. Symbolic links are not followed.
OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_DISK_FULL_ERRNOS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Add a path to an OSError for a full disk. Functions that write to an open file do not know the path."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _DISK_FULL_ERRNOS:
            error.filename = str(path)
        raise


@contextmanager
def write_atomically(path: Path, temporary_path: Path | None = None, *, sync: bool = True) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename the file to `path` after the block.

    If the block or the renaming fails, the temporary file is deleted.

    Args:
        path: the final path; an existing file at this path is replaced
        temporary_path: a path in the same folder. None: `.NAME.part`, to which only one process may write at a time
        sync: whether to flush the content to disk before renaming, so that a power failure leaves no empty file

    Raises OSError, which has the path if the disk is full.
    """
    temporary_path = path.with_name(f".{path.name}.part") if temporary_path is None else temporary_path
    # Other users may write to the folder. If the temporary path is a link, writing would overwrite the link's target.
    temporary_path.unlink(missing_ok=True)
    try:
        with name_full_disk(path):
            yield temporary_path
            if sync:
                sync_to_disk(temporary_path)
            temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def sync_to_disk(*paths: Path) -> None:
    """Flush the content of files, or the entries of folders, to disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_descriptor_path(descriptor: int) -> Path:
    """Return a path through which other processes can open a file that is open in this process."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def open_folder_by_path(path: Path) -> Iterator[int]:
    """Open a folder for the duration of the block. The path may contain symbolic links. Raises OSError."""
    folder_fd = os.open(path, OPEN_FOLDER_FLAGS & ~os.O_NOFOLLOW)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@contextmanager
def open_subfolder(folder_fd: int, folder_names: Sequence[str], *, create_missing: bool = False) -> Iterator[int]:
    """Open a subfolder of an open folder for the duration of the block.

    folder_fd       file descriptor of the open folder
    folder_names    names of the nested folders, starting with the outermost one
    create_missing  whether to create missing folders

    Raises OSError, for example if a name is a symbolic link or `..`.
    """
    if ".." in folder_names:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    current_fd = os.dup(folder_fd)
    try:
        for folder_name in folder_names:
            if create_missing:
                with suppress(FileExistsError):
                    os.mkdir(folder_name, dir_fd=current_fd)
            inner_fd = os.open(folder_name, OPEN_FOLDER_FLAGS, dir_fd=current_fd)
            os.close(current_fd)
            current_fd = inner_fd
        yield current_fd
    finally:
        os.close(current_fd)
