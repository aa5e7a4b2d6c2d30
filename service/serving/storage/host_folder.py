"""Operations on open host folders that do not follow links.

A folder is given as a file descriptor. Concurrent renames and links therefore cannot redirect an operation to another
file than the one that was checked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO

from service.core.errors import BadParameter, Cancelled
from service.core.files.atomic_files import open_subfolder
from service.core.types import CancellationCheck

COPY_BYTES = 2**26
# Flags for creating a file that must not exist.
_MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Maximum number of files and folders that are searched below one folder.
MAX_ENTRIES = 200_000


def is_file(folder: int, name: str) -> bool:
    """Return whether an open folder contains a regular file, not a link, with this name."""
    with suppress(OSError):
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def is_same_file(folder: int, first_name: str, second_name: str) -> bool:
    """Return whether two names in an open folder refer to the same file."""
    try:
        first, second = (os.stat(name, dir_fd=folder, follow_symlinks=False) for name in (first_name, second_name))
    except FileNotFoundError:
        return False
    return os.path.samestat(first, second)


def lock(folder: int) -> None:
    """Lock an open folder. Raises BlockingIOError if it is locked, and OSError if the file system lacks locks."""
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(folder: int) -> None:
    """Release the lock of an open folder, if there is one."""
    with suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_UN)


def write_file(folder: int, name: str, content: bytes = b"") -> None:
    """Write a new file and sync it to disk. Raises OSError, also if the name is taken."""
    with _make_file(folder, name) as file:
        file.write(content)


def copy_file(source: Path, folder: int, name: str) -> None:
    """Copy a file to a new file and sync it to disk. Raises OSError, also if the name is taken."""
    with source.open("rb") as content, _make_file(folder, name) as file:
        shutil.copyfileobj(content, file, COPY_BYTES)


@contextmanager
def _make_file(folder: int, name: str) -> Iterator[IO[bytes]]:
    with os.fdopen(os.open(name, _MAKE_FILE, 0o666, dir_fd=folder), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def copy_folder(source: Path, parent: int, name: str, cancelled: CancellationCheck) -> None:
    """Copy the contents of a folder to an empty folder and sync them to disk. Raises OSError and Cancelled."""
    with open_subfolder(parent, [name]) as folder:
        for path in source.iterdir():
            if cancelled():
                raise Cancelled("cancelled while the result was copied to its destination")
            if path.is_dir():
                os.mkdir(path.name, dir_fd=folder)
                copy_folder(path, folder, path.name, cancelled)
            else:
                copy_file(path, folder, path.name)
        os.fsync(folder)


def remove_file(folder: int, name: str) -> None:
    """Delete a file if it exists. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def remove_folder(folder: int, name: str) -> None:
    """Delete a folder and its contents if it exists. Ignore errors."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def list_files(folder: Path, glob: str, skipped: os.stat_result | None = None) -> list[str]:
    """Return the relative paths of the regular files below an open folder that match a pattern.

    The pattern has the syntax of `pathlib.Path.glob`. Links and the folder `skipped` are not searched. Raises
    BadParameter if the pattern is invalid, and if the folder contains too many entries.
    """
    pattern = tuple(glob.split("/"))
    if not set(pattern).isdisjoint({"", ".", ".."}):
        raise BadParameter.about(
            "glob", f"{glob}: a pattern consists of names separated by single slashes, such as **/*.tif."
        )
    matches, entries = list[str](), 0
    for parent, folders, files, opened in os.fwalk(f"{folder}/."):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise BadParameter(f"The folder has more than {MAX_ENTRIES:,} files. Choose one of its subfolders.")
        parts = Path(parent).relative_to(folder).parts
        is_recursive = "**" in pattern or len(parts) + 1 < len(pattern)
        folders[:] = [name for name in folders if is_recursive and not _is_skipped(name, opened, skipped)]
        matches += ["/".join((*parts, name)) for name in files if _matches((*parts, name), pattern, opened)]
    return matches


def _is_skipped(name: str, folder: int, skipped: os.stat_result | None) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return True
    return skipped is not None and os.path.samestat(status, skipped)


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...], folder: int) -> bool:
    """Return whether a path matches the pattern and refers to a regular file in the open folder."""

    @cache
    def match(part_index: int, pattern_index: int) -> bool:
        if pattern_index == len(pattern):
            return part_index == len(parts)
        if pattern[pattern_index] == "**":
            return match(part_index, pattern_index + 1) or (
                part_index < len(parts) - 1 and match(part_index + 1, pattern_index)
            )
        return (
            part_index < len(parts)
            and fnmatchcase(parts[part_index], pattern[pattern_index])
            and match(part_index + 1, pattern_index + 1)
        )

    return match(0, 0) and is_file(folder, parts[-1])
