"""A folder of the host that gets the results of a run, of which one at a time may use it."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from service.core.errors import BadParameter
from service.core.files.whole_file import descriptor_path, open_below, open_root
from service.serving.storage.host_folder import is_file, lock, remove_folder

# Of the folder in which files are written before they get their names.
STAGING = ".stackseg-run-"


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
                    with suppress(FileNotFoundError), open_below(parent, [last]):
                        os.rename(last, uuid.uuid4().hex, src_dir_fd=parent, dst_dir_fd=self._staging)
                os.replace(name, last, src_dir_fd=self._staging, dst_dir_fd=parent)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise BadParameter(f"{place} cannot be written: a folder, a file or a link is in the way.") from error

    def has(self, place: str) -> bool:
        """Return whether there is a regular file at a place."""
        with suppress(OSError), self._parent(place) as (parent, last):
            return is_file(parent, last)
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
        with open_below(self._folder, folders, make=make) as parent:
            yield parent, last

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
        lock(folder)
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
        remove_folder(folder, left.name)
    name = f"{STAGING}{uuid.uuid4().hex}"
    os.mkdir(name, 0o700, dir_fd=folder)
    try:
        with open_below(folder, [name]) as staging:
            yield ResultFolder(folder, staging)
    finally:
        remove_folder(folder, name)


@contextmanager
def open_results(path: Path) -> Iterator[ResultFolder]:
    """Make a folder where there is none, and use it for results until the end of the block."""
    path.mkdir(parents=True, exist_ok=True)
    with open_root(path) as folder, hold_results(folder) as results:
        yield results
