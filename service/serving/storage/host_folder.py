"""Operations on open folders of the host, without following links.

Folders are specified as file descriptors. Concurrent renames and links therefore cannot redirect an operation to a file
other than the one that was checked.
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

# Size of the buffer for copying files.
COPY_BUFFER_BYTES = 2**26
# Flags of `os.open` for creating a file. With these flags, opening a file that exists fails.
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Maximum number of files and folders that are searched below one folder.
MAX_SEARCHED_ENTRIES = 200_000


def is_file(folder_fd: int, name: str) -> bool:
    """Return whether an open folder contains a regular file with this name. Links do not count."""
    with suppress(OSError):
        return stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    return False


def is_same_file(folder_fd: int, first_name: str, second_name: str) -> bool:
    """Return whether two names in an open folder refer to the same file."""
    try:
        first_status, second_status = (
            os.stat(name, dir_fd=folder_fd, follow_symlinks=False) for name in (first_name, second_name)
        )
    except FileNotFoundError:
        return False
    return os.path.samestat(first_status, second_status)


def lock_folder(folder_fd: int) -> None:
    """Lock an open folder. Raises BlockingIOError if it is locked, or OSError if the file system has no locks."""
    fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_folder(folder_fd: int) -> None:
    """Release the lock on an open folder, if there is one."""
    with suppress(OSError):
        fcntl.flock(folder_fd, fcntl.LOCK_UN)


def write_file(folder_fd: int, name: str, content: bytes = b"") -> None:
    """Write a new file and sync it to disk. Raises OSError, including FileExistsError if the name is taken."""
    with _create_file(folder_fd, name) as file:
        file.write(content)


def copy_file(source: Path, folder_fd: int, name: str) -> None:
    """Copy a file to a new file and sync it to disk. Raises OSError, including FileExistsError if the name is taken."""
    with source.open("rb") as content, _create_file(folder_fd, name) as file:
        shutil.copyfileobj(content, file, COPY_BUFFER_BYTES)


@contextmanager
def _create_file(folder_fd: int, name: str) -> Iterator[IO[bytes]]:
    with os.fdopen(os.open(name, _CREATE_FLAGS, 0o666, dir_fd=folder_fd), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def copy_folder(source: Path, parent_fd: int, name: str, cancelled: CancellationCheck) -> None:
    """Copy the contents of a folder to an empty folder and sync them to disk. Raises OSError and Cancelled."""
    with open_subfolder(parent_fd, [name]) as folder_fd:
        for path in source.iterdir():
            if cancelled():
                raise Cancelled("The request was cancelled while its result was being copied to the destination.")
            if path.is_dir():
                os.mkdir(path.name, dir_fd=folder_fd)
                copy_folder(path, folder_fd, path.name, cancelled)
            else:
                copy_file(path, folder_fd, path.name)
        os.fsync(folder_fd)


def delete_file(folder_fd: int, name: str) -> None:
    """Delete a file if it exists. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder_fd)


def delete_folder(folder_fd: int, name: str) -> None:
    """Delete a folder and its contents if it exists. Ignore errors."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder_fd)


def list_files(folder: Path, glob: str, skipped_status: os.stat_result | None = None) -> list[str]:
    """Return the relative paths of the regular files below an open folder that match a pattern.

    The pattern has the syntax of `pathlib.Path.glob`. Links are not followed, and the folder with the status
    `skipped_status` is not searched. Raises BadParameter if the pattern is invalid or the folder contains too many
    entries.
    """
    pattern = tuple(glob.split("/"))
    if not set(pattern).isdisjoint({"", ".", ".."}):
        raise BadParameter.for_parameter(
            "glob",
            f"{glob} is not valid, because a pattern must consist of names separated by single slashes, such as"
            " **/*.tif.",
        )
    matches, entry_count = list[str](), 0
    for parent, folders, files, parent_fd in os.fwalk(f"{folder}/."):
        entry_count += len(folders) + len(files)
        if entry_count > MAX_SEARCHED_ENTRIES:
            raise BadParameter(
                f"The folder contains more than {MAX_SEARCHED_ENTRIES:,} files and folders. Choose one of its"
                " subfolders."
            )
        parts = Path(parent).relative_to(folder).parts
        is_recursive = "**" in pattern or len(parts) + 1 < len(pattern)
        folders[:] = [name for name in folders if is_recursive and not _is_skipped(name, parent_fd, skipped_status)]
        matches += ["/".join((*parts, name)) for name in files if _is_match((*parts, name), pattern, parent_fd)]
    return matches


def _is_skipped(name: str, folder_fd: int, skipped_status: os.stat_result | None) -> bool:
    try:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return True
    return skipped_status is not None and os.path.samestat(status, skipped_status)


def _is_match(parts: tuple[str, ...], pattern: tuple[str, ...], folder_fd: int) -> bool:
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

    return match(0, 0) and is_file(folder_fd, parts[-1])
