"""A folder on the host for the results of a run. Only one run at a time can use the folder."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from service.core.errors import BadParameter
from service.core.files.atomic_files import make_descriptor_path, open_folder_by_path, open_subfolder
from service.serving.storage.host_folder import delete_folder, is_file, lock_folder

# Prefix of the name of the folder in which files are written before they are moved to their final path.
STAGING_PREFIX = ".stackseg-run-"


class ResultFolder:
    """An open folder for results. Results appear in the folder atomically.

    staging  path of a temporary subfolder, to which files are written before `put`
    """

    def __init__(self, folder_fd: int, staging_fd: int) -> None:
        self._folder_fd, self._staging_fd = folder_fd, staging_fd
        self.staging = make_descriptor_path(staging_fd)

    def put(self, name: str, path: str) -> None:
        """Move a file or folder from `staging` to a path. Create parent folders, and replace an existing result.

        Raises BadParameter if an existing file is not of the same kind.
        """
        try:
            with self._open_parent(path, create_missing=True) as (parent_fd, file_name):
                if stat.S_ISDIR(os.stat(name, dir_fd=self._staging_fd, follow_symlinks=False).st_mode):
                    # A rename cannot replace a folder that is not empty, so move the existing folder away first.
                    with suppress(FileNotFoundError), open_subfolder(parent_fd, [file_name]):
                        os.rename(file_name, uuid.uuid4().hex, src_dir_fd=parent_fd, dst_dir_fd=self._staging_fd)
                os.replace(name, file_name, src_dir_fd=self._staging_fd, dst_dir_fd=parent_fd)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise BadParameter(
                f"{path} cannot be written, because a folder, a file or a link with this name exists. Delete it first."
            ) from error

    def put_text(self, name: str, content: str) -> None:
        """Write a UTF-8 text file, and replace an existing file."""
        (self.staging / name).write_text(content, encoding="utf-8")
        self.put(name, name)

    def has_file(self, path: str) -> bool:
        """Return whether a regular file exists at a path."""
        with suppress(OSError), self._open_parent(path) as (parent_fd, file_name):
            return is_file(parent_fd, file_name)
        return False

    @property
    def is_empty(self) -> bool:
        """Whether the folder contains nothing except `staging`."""
        return all(path.name.startswith(STAGING_PREFIX) for path in make_descriptor_path(self._folder_fd).iterdir())

    @contextmanager
    def open(self, path: str, flags: int = os.O_RDONLY) -> Iterator[IO[str]]:
        """Open a UTF-8 text file. Raises OSError, for example if the path is a link."""
        with self._open_parent(path) as (parent_fd, file_name):
            file_fd = os.open(file_name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=parent_fd)
        mode = "a" if flags & os.O_APPEND else "r"
        with os.fdopen(file_fd, mode, encoding="utf-8", newline="") as file:
            yield file

    @contextmanager
    def _open_parent(self, path: str, *, create_missing: bool = False) -> Iterator[tuple[int, str]]:
        *folders, file_name = path.split("/")
        with open_subfolder(self._folder_fd, folders, create_missing=create_missing) as parent_fd:
            yield parent_fd, file_name

    def append(self, name: str, line: str) -> None:
        """Append a line to a file. Create the file if it does not exist. Raises OSError."""
        with self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(f"{line}\n")


@contextmanager
def lock_results(folder_fd: int) -> Iterator[ResultFolder]:
    """Context manager that locks an open folder for the results of one run.

    Raises BadParameter if another run is using the folder or may be using it. If the file system does not support
    locks, the files of a running process cannot be distinguished from the files of a killed process.
    """
    leftover_folders = list(make_descriptor_path(folder_fd).glob(f"{STAGING_PREFIX}*"))
    try:
        lock_folder(folder_fd)
    except BlockingIOError as error:
        raise BadParameter(
            "The results folder is in use by another run. Wait for that run, or choose another folder."
        ) from error
    except OSError as error:
        if leftover_folders:
            raise BadParameter(
                "The results folder is in use by another run, or an earlier run was killed. The file system does not"
                " support locks, so these two cases cannot be distinguished. If no run is active, delete"
                f" {leftover_folders[0].name} in the results folder."
            ) from error
    for leftover_folder in leftover_folders:
        delete_folder(folder_fd, leftover_folder.name)
    name = f"{STAGING_PREFIX}{uuid.uuid4().hex}"
    os.mkdir(name, 0o700, dir_fd=folder_fd)
    try:
        with open_subfolder(folder_fd, [name]) as staging_fd:
            yield ResultFolder(folder_fd, staging_fd)
    finally:
        delete_folder(folder_fd, name)


@contextmanager
def open_results(path: Path) -> Iterator[ResultFolder]:
    """Context manager that opens and locks a results folder. Create the folder if it does not exist."""
    path.mkdir(parents=True, exist_ok=True)
    with open_folder_by_path(path) as folder_fd, lock_results(folder_fd) as results:
        yield results
