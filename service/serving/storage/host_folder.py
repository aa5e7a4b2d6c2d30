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
from pathlib import Path
from typing import IO

from service.core.errors import BadParameter, Cancelled
from service.core.files.atomic_files import make_descriptor_path, open_folder_by_path, open_subfolder
from service.core.types import CancellationCheck, never_cancelled
from service.formats.zarr.store import is_zarr_folder

# Size of the buffer for copying files.
COPY_BUFFER_BYTES = 2**26
# Flags of `os.open` for creating a file. With these flags, opening a file that exists fails.
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Maximum number of files and folders that are searched below one folder.
MAX_SEARCHED_ENTRIES = 200_000
# Maximum nesting depth of a search. All folders on the path to the current folder are open during the search.
MAX_SEARCH_DEPTH = 64
# Maximum number of components in a file name pattern.
MAX_PATTERN_COMPONENTS = 32


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


def would_replace(folder_fd: int, name: str, path: Path) -> bool:
    """Return whether a new file or store in an open folder would replace the one at `path`, or a folder above it.

    Different paths may lead to the same folder, for example in containers.
    """
    try:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        resolved_path = path.resolve()
        return any(os.path.samestat(parent.stat(), status) for parent in (resolved_path, *resolved_path.parents))
    except OSError:
        return False


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
                raise Cancelled("The request was canceled while its result was being copied to the destination.")
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


def list_files(
    folder: Path,
    glob: str,
    skipped_status: os.stat_result | None = None,
    cancelled: CancellationCheck = never_cancelled,
) -> list[str]:
    """Return the relative paths of the regular files and OME-Zarr folders below an open folder that match a pattern.

    The pattern has the syntax of `pathlib.Path.glob`. Links, OME-Zarr folders and the folder with the status
    `skipped_status` are not searched. Raises Cancelled, and BadParameter if the pattern is invalid or the folder
    contains too many entries.
    """
    pattern = _parse_pattern(glob)
    search = _Search(pattern, skipped_status, cancelled)
    with open_folder_by_path(folder) as folder_fd:
        search.search_folder(folder_fd, (), _add_positions_after_wildcards(pattern, {0}))
    return search.matches


def _parse_pattern(glob: str) -> tuple[str, ...]:
    """Return the components of a pattern, without repetitions of `**`. Raises BadParameter."""
    components = glob.split("/")
    if not set(components).isdisjoint({"", ".", ".."}):
        raise BadParameter.for_parameter(
            "glob",
            f"{glob} is not valid, because a pattern must consist of names separated by single slashes, such as"
            " **/*.tif.",
        )
    pattern = tuple(
        name
        for name, previous_name in zip(components, [None, *components], strict=False)
        if (name, previous_name) != ("**", "**")
    )
    if len(pattern) > MAX_PATTERN_COMPONENTS:
        raise BadParameter.for_parameter(
            "glob", f"the pattern has {len(pattern)} components, but the maximum is {MAX_PATTERN_COMPONENTS}."
        )
    return pattern


def _add_positions_after_wildcards(pattern: tuple[str, ...], positions: set[int]) -> set[int]:
    """Add the positions after each `**`, because `**` may match no folder at all."""
    return positions | {position + 1 for position in positions if pattern[position : position + 1] == ("**",)}


class _Search:
    """Search for the files that match a pattern. Each folder is read once, regardless of the pattern.

    A position in the pattern is the index of the component that the next name has to match. All positions that the
    path of a folder can lead to are followed at the same time, like the states of a nondeterministic automaton.

    matches  relative paths of the files and OME-Zarr folders that have been found
    """

    def __init__(
        self, pattern: tuple[str, ...], skipped_status: os.stat_result | None, cancelled: CancellationCheck
    ) -> None:
        self._pattern, self._skipped_status, self._cancelled = pattern, skipped_status, cancelled
        self._entry_count = 0
        self.matches: list[str] = []

    def search_folder(self, folder_fd: int, components: tuple[str, ...], positions: set[int]) -> None:
        """Search an open folder with the path components `components`, which lead to these positions."""
        if len(components) > MAX_SEARCH_DEPTH:
            raise BadParameter(
                f"The folder has more than {MAX_SEARCH_DEPTH} levels of subfolders. Choose one of its subfolders."
            )
        for name, next_positions in self._list_folder(folder_fd, components, positions):
            with suppress(OSError), open_subfolder(folder_fd, [name]) as subfolder_fd:
                if self._skipped_status is not None and os.path.samestat(os.fstat(subfolder_fd), self._skipped_status):
                    continue
                if not is_zarr_folder(make_descriptor_path(subfolder_fd)):
                    self.search_folder(subfolder_fd, (*components, name), next_positions)
                elif self._is_match(name, positions):
                    self.matches.append("/".join((*components, name)))

    def _list_folder(
        self, folder_fd: int, components: tuple[str, ...], positions: set[int]
    ) -> list[tuple[str, set[int]]]:
        """Add the matching files of a folder. Return the subfolders to search, and the positions after their names."""
        subfolders = list[tuple[str, set[int]]]()
        with os.scandir(folder_fd) as entries:
            for entry in entries:
                self._count_entry()
                is_match, next_positions = self._is_match(entry.name, positions), self._enter(entry.name, positions)
                if entry.is_dir(follow_symlinks=False) and (is_match or next_positions):
                    subfolders.append((entry.name, next_positions))
                elif is_match and entry.is_file(follow_symlinks=False):
                    self.matches.append("/".join((*components, entry.name)))
        return subfolders

    def _count_entry(self) -> None:
        self._entry_count += 1
        if self._entry_count > MAX_SEARCHED_ENTRIES:
            raise BadParameter(
                f"The folder contains more than {MAX_SEARCHED_ENTRIES:,} files and folders. Choose one of its"
                " subfolders."
            )
        if self._cancelled():
            raise Cancelled("The request was canceled while the folder was being searched.")

    def _enter(self, name: str, positions: set[int]) -> set[int]:
        """Return the positions after the name of a folder."""
        pattern = self._pattern
        next_positions = {position for position in positions if pattern[position : position + 1] == ("**",)}
        # The last component matches only a file or an OME-Zarr folder.
        next_positions |= {
            position + 1
            for position in positions - next_positions
            if position < len(pattern) - 1 and fnmatchcase(name, pattern[position])
        }
        return _add_positions_after_wildcards(pattern, next_positions)

    def _is_match(self, name: str, positions: set[int]) -> bool:
        """Return whether the name of a file matches the last component of the pattern."""
        last_index = len(self._pattern) - 1
        return (
            last_index in positions
            and self._pattern[last_index] != "**"
            and fnmatchcase(name, self._pattern[last_index])
        )
