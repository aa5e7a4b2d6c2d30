"""A host folder for the results of a run. Only one run at a time can use it."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from service.core.errors import BadParameter
from service.core.files.atomic_files import descriptor_path, open_folder_by_path, open_subfolder
from service.serving.storage.host_folder import is_file, lock, remove_folder

# Prefix of the folder in which files are written before they are moved to their final path.
STAGING = ".stackseg-run-"


class ResultFolder:
    """An open folder for results. Results appear in it atomically.

    staging  a temporary folder for files before `put`
    """

    def __init__(self, folder: int, staging: int) -> None:
        self._folder, self._staging = folder, staging
        self.staging = descriptor_path(staging)

    def put(self, name: str, path: str) -> None:
        """Move a file or folder from `staging` to a path. Create parent folders, and replace an existing result.

        Raises BadParameter if another kind of file is in the way.
        """
        try:
            with self._parent(path, make=True) as (parent, last):
                if stat.S_ISDIR(os.stat(name, dir_fd=self._staging, follow_symlinks=False).st_mode):
                    # A rename cannot replace a folder that is not empty, so move the existing folder away first.
                    with suppress(FileNotFoundError), open_subfolder(parent, [last]):
                        os.rename(last, uuid.uuid4().hex, src_dir_fd=parent, dst_dir_fd=self._staging)
                os.replace(name, last, src_dir_fd=self._staging, dst_dir_fd=parent)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise BadParameter(f"{path} cannot be written: a folder, a file or a link is in the way.") from error

    def has_file(self, path: str) -> bool:
        """Return whether a regular file exists at a path."""
        with suppress(OSError), self._parent(path) as (parent, last):
            return is_file(parent, last)
        return False

    @property
    def is_empty(self) -> bool:
        """Whether the folder contains nothing except `staging`."""
        return all(path.name.startswith(STAGING) for path in descriptor_path(self._folder).iterdir())

    @contextmanager
    def open(self, path: str, flags: int = os.O_RDONLY) -> Iterator[IO[str]]:
        """Open a UTF-8 text file. Raises OSError, for example for a link."""
        with self._parent(path) as (parent, last):
            descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=parent)
        mode = "a" if flags & os.O_APPEND else "r"
        with os.fdopen(descriptor, mode, encoding="utf-8", newline="") as file:
            yield file

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        *folders, last = path.split("/")
        with open_subfolder(self._folder, folders, make=make) as parent:
            yield parent, last

    def append(self, name: str, line: str) -> None:
        """Append a line to a file, which is created if it does not exist. Raises OSError."""
        with self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(f"{line}\n")


@contextmanager
def lock_results(folder: int) -> Iterator[ResultFolder]:
    """Context manager that locks an open folder for the results of one run.

    Raises BadParameter if another run uses the folder or may be using it. Without file locks, the files of a running
    process cannot be distinguished from those of a killed process.
    """
    leftovers = list(descriptor_path(folder).glob(f"{STAGING}*"))
    try:
        lock(folder)
    except BlockingIOError as error:
        raise BadParameter(
            "The results folder is in use by another run. Wait for that run, or choose another folder."
        ) from error
    except OSError as error:
        if leftovers:
            raise BadParameter(
                f"The results folder is in use by another run, or an earlier run was killed, which cannot be told apart"
                f" because its file system has no locks. If no run is active, delete {leftovers[0].name} in it."
            ) from error
    for leftover in leftovers:
        remove_folder(folder, leftover.name)
    name = f"{STAGING}{uuid.uuid4().hex}"
    os.mkdir(name, 0o700, dir_fd=folder)
    try:
        with open_subfolder(folder, [name]) as staging:
            yield ResultFolder(folder, staging)
    finally:
        remove_folder(folder, name)


@contextmanager
def open_results(path: Path) -> Iterator[ResultFolder]:
    """Context manager that locks a results folder, which is created if it does not exist."""
    path.mkdir(parents=True, exist_ok=True)
    with open_folder_by_path(path) as folder, lock_results(folder) as results:
        yield results
