"""Open folders of the host: names in them are looked up, read and written without following links.

A folder is a descriptor. The file that was checked is the one that is used, whoever renames or links meanwhile.
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
from service.core.files.whole_file import open_below
from service.core.types import Cancelling

COPY_BYTES = 2**26
# Makes a file that does not exist.
_MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Files and folders that are looked at below one folder.
MAX_ENTRIES = 200_000


def is_file(folder: int, name: str) -> bool:
    """Return whether an open folder has a regular file of this name, which is no link."""
    with suppress(OSError):
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def is_same_file(folder: int, one: str, other: str) -> bool:
    """Return whether two names in an open folder are those of one file."""
    try:
        first, second = (os.stat(name, dir_fd=folder, follow_symlinks=False) for name in (one, other))
    except FileNotFoundError:
        return False
    return os.path.samestat(first, second)


def lock(folder: int) -> None:
    """Lock an open folder. Raises BlockingIOError where others hold it, OSError for a file system without locks."""
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(folder: int) -> None:
    """Give up the lock of an open folder, if there is one."""
    with suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_UN)


def write_file(folder: int, name: str, content: bytes = b"") -> None:
    """Write a new file to the disk. Raises OSError, also where the name is taken."""
    with _make_file(folder, name) as file:
        file.write(content)


def copy_file(source: Path, folder: int, name: str) -> None:
    """Copy a file into a new one on the disk. Raises OSError, also where the name is taken."""
    with source.open("rb") as content, _make_file(folder, name) as file:
        shutil.copyfileobj(content, file, COPY_BYTES)


@contextmanager
def _make_file(folder: int, name: str) -> Iterator[IO[bytes]]:
    with os.fdopen(os.open(name, _MAKE_FILE, 0o666, dir_fd=folder), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def copy_folder(source: Path, parent: int, name: str, cancelled: Cancelling) -> None:
    """Copy the content of a folder into an empty one, and write it to the disk. Raises OSError and Cancelled."""
    with open_below(parent, [name]) as folder:
        for path in source.iterdir():
            if cancelled():
                raise Cancelled("given up while its result was put in its place")
            if path.is_dir():
                os.mkdir(path.name, dir_fd=folder)
                copy_folder(path, folder, path.name, cancelled)
            else:
                copy_file(path, folder, path.name)
        os.fsync(folder)


def remove_file(folder: int, name: str) -> None:
    """Delete a file, if there is one. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def remove_folder(folder: int, name: str) -> None:
    """Delete a folder with all that is in it, if there is one, as far as that is possible."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def list_files(folder: Path, glob: str, skipped: os.stat_result | None = None) -> list[str]:
    """Return the regular files below an open folder that match a pattern, by the way to them.

    The pattern is one of `pathlib.Path.glob`. Neither links nor the folder `skipped` are walked. Raises BadParameter
    for a pattern that is none, and for a folder that has too much in it.
    """
    pattern = tuple(glob.split("/"))
    if not set(pattern).isdisjoint({"", ".", ".."}):
        raise BadParameter.about("glob", f"{glob}: a pattern has names with single slashes in between, as in **/*.tif.")
    found, entries = list[str](), 0
    for place, folders, files, opened in os.fwalk(f"{folder}/."):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise BadParameter(f"The folder has more than {MAX_ENTRIES:,} files; name one of the folders in it.")
        parts = Path(place).relative_to(folder).parts
        deep = "**" in pattern or len(parts) + 1 < len(pattern)
        folders[:] = [name for name in folders if deep and not _is_skipped(name, opened, skipped)]
        found += ["/".join((*parts, name)) for name in files if _matches((*parts, name), pattern, opened)]
    return found


def _is_skipped(name: str, folder: int, skipped: os.stat_result | None) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return True
    return skipped is not None and os.path.samestat(status, skipped)


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...], folder: int) -> bool:
    """Return whether a path matches, and is that of a regular file in the open folder."""

    @cache
    def match(part: int, place: int) -> bool:
        if place == len(pattern):
            return part == len(parts)
        if pattern[place] == "**":
            return match(part, place + 1) or (part < len(parts) - 1 and match(part + 1, place))
        return part < len(parts) and fnmatchcase(parts[part], pattern[place]) and match(part + 1, place + 1)

    return match(0, 0) and is_file(folder, parts[-1])
