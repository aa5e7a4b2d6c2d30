"""A folder that is held open, below which names are looked up without following links."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO

from service.core.errors import BadParameter
from service.core.whole_file import descriptor_path

# Opens a folder to look names up in it.
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Of the folder in which files are written before they get their names.
STAGING = ".stackseg-run-"
# Files and folders that are looked at below one folder.
MAX_ENTRIES = 200_000


def open_below(folder: int, parts: Sequence[str], *, make: bool = False) -> int:
    """Open a folder by the names that lead to it from an open one; `make` those that are missing.

    Raises OSError, also for a name that leads out of a folder.
    """
    if ".." in parts:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    folder = os.dup(folder)
    try:
        for part in parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = os.open(part, OPEN_FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
    except BaseException:
        os.close(folder)
        raise
    return folder


def list_files(folder: Path, glob: str, skipped: os.stat_result | None = None) -> list[str]:
    """Return the regular files below an open folder that match a pattern, by the way to them.

    The pattern is one of `pathlib.Path.glob`. Neither links nor the folder `skipped` are walked. Raises BadParameter
    for a pattern that is none, and for a folder that has too much in it.
    """
    pattern = tuple(glob.split("/"))
    if not set(pattern).isdisjoint({"", ".", ".."}):
        raise BadParameter(f"glob: {glob}: a pattern has names with single slashes in between, as in **/*.tif.")
    found, entries = list[str](), 0
    for place, folders, files, opened in os.fwalk(f"{folder}/."):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise BadParameter(f"The folder has more than {MAX_ENTRIES:,} files; name one of the folders in it.")
        parts = Path(place).relative_to(folder).parts
        deep = "**" in pattern or len(parts) + 1 < len(pattern)
        folders[:] = [name for name in folders if deep and not _is_same(name, opened, skipped)]
        found += ["/".join((*parts, name)) for name in files if _matches((*parts, name), pattern, opened)]
    return found


def _is_same(name: str, folder: int, other: os.stat_result | None) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return True
    return other is not None and os.path.samestat(status, other)


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...], folder: int) -> bool:
    """Return whether a path matches, and is that of a regular file in the open folder."""

    @cache
    def match(part: int, place: int) -> bool:
        if place == len(pattern):
            return part == len(parts)
        if pattern[place] == "**":
            return match(part, place + 1) or (part < len(parts) - 1 and match(part + 1, place))
        return part < len(parts) and fnmatchcase(parts[part], pattern[place]) and match(part + 1, place + 1)

    if not match(0, 0):
        return False
    with suppress(OSError):
        return stat.S_ISREG(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode)
    return False


class ResultFolder:
    """An open folder that gets results, each of which appears whole under its name.

    staging  an empty folder in it, for files before `put`
    """

    def __init__(self, folder: int, staging: int) -> None:
        self._folder, self._staging = folder, staging
        self.staging = descriptor_path(staging)

    def put(self, name: str, place: str) -> None:
        """Move a file or a folder of `staging` to a place, into folders that are made; it replaces one that is there.

        Raises BadParameter where something else is in the way.
        """
        try:
            with self._parent(place, make=True) as (parent, last):
                if stat.S_ISDIR(os.stat(name, dir_fd=self._staging, follow_symlinks=False).st_mode):
                    # No name is given to a folder while another one with something in it has it.
                    with suppress(FileNotFoundError):
                        os.close(os.open(last, OPEN_FOLDER, dir_fd=parent))
                        os.rename(last, uuid.uuid4().hex, src_dir_fd=parent, dst_dir_fd=self._staging)
                os.replace(name, last, src_dir_fd=self._staging, dst_dir_fd=parent)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise BadParameter(f"{place} cannot be written: a folder, a file or a link is in the way.") from error

    def has(self, place: str) -> bool:
        """Return whether there is a regular file at a place."""
        with suppress(OSError), self._parent(place) as (parent, last):
            return stat.S_ISREG(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode)
        return False

    @property
    def empty(self) -> bool:
        """Whether nothing is in the folder but `staging`."""
        return all(path.name.startswith(STAGING) for path in descriptor_path(self._folder).iterdir())

    @contextmanager
    def open(self, place: str, flags: int = os.O_RDONLY) -> Iterator[IO[str]]:
        """Open a file of text in UTF-8. Raises OSError, as for a link."""
        with self._parent(place) as (parent, last):
            descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=parent)
        mode = "a" if flags & os.O_APPEND else "r"
        with os.fdopen(descriptor, mode, encoding="utf-8", newline="") as file:
            yield file

    @contextmanager
    def _parent(self, place: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        *folders, last = place.split("/")
        parent = open_below(self._folder, folders, make=make)
        try:
            yield parent, last
        finally:
            os.close(parent)

    def append(self, name: str, line: str) -> None:
        """Add a line to a file, which is made where there is none. Raises OSError."""
        with self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(f"{line}\n")


@contextmanager
def hold_results(folder: int) -> Iterator[ResultFolder]:
    """Use an open folder for results until the end of the block.

    Raises BadParameter where another process does, or may do so: where the file system has no locks, nothing tells the
    files of a run that goes on from those that a killed one has left.
    """
    left_behind = list(descriptor_path(folder).glob(f"{STAGING}*"))
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BadParameter(
            "The folder for the results is in use by another run; wait for it, or name another."
        ) from error
    except OSError as error:
        if left_behind:
            raise BadParameter(
                f"The folder for the results is in use by another run, or one was killed there; if none is under way,"
                f" delete {left_behind[0].name} in it. Its file system has no locks that would tell."
            ) from error
    for left in left_behind:
        shutil.rmtree(left.name, ignore_errors=True, dir_fd=folder)
    name = f"{STAGING}{uuid.uuid4().hex}"
    os.mkdir(name, 0o700, dir_fd=folder)
    try:
        staging = os.open(name, OPEN_FOLDER, dir_fd=folder)
        try:
            yield ResultFolder(folder, staging)
        finally:
            os.close(staging)
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


@contextmanager
def open_results(path: Path) -> Iterator[ResultFolder]:
    """Make a folder where there is none, and use it for results until the end of the block."""
    path.mkdir(parents=True, exist_ok=True)
    folder = os.open(path, OPEN_FOLDER & ~os.O_NOFOLLOW)
    try:
        with hold_results(folder) as results:
            yield results
    finally:
        os.close(folder)
