"""The folder of this process for files of requests. The next service deletes it if this one is killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from service.core.errors import ConfigError, OutOfStorage, StorageUnavailable

FOLDER_PREFIX = "stackseg-"
# A folder without this file is not deleted: folders of others may have the same prefix.
MARKER = ".stackseg-scratch"
# A file larger than the process may write counts as a full disk.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A disk that fails or is gone, and files of the service that somebody has deleted.
DISK_FAULTS = {errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT, errno.ENOTDIR}


class ScratchFolder:
    """A folder that no other process uses, deleted with all that is in it when the service stops.

    path      the folder itself; its name is unique
    requests  has a folder per request
    results   has the cached results
    Raises ConfigError for a parent that this process may not write to.
    """

    def __init__(self, parent: Path | None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
            raise ConfigError(f"server.scratch_folder: {parent} is not a folder that this process may write to.")
        self.path = parent / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self.requests, self.results = self.path / "requests", self.path / "cache"
        self._numbers = itertools.count()
        self._lock: int

    def create(self) -> None:
        """Make the folder and lock it. Delete the folders of services that were killed."""
        sweep(self.path.parent)
        self._lock = make_locked_folder(self.path)
        self.requests.mkdir()
        self.results.mkdir()

    def mend(self) -> str | None:
        """Make the folder again where somebody has deleted it or part of it; return what is wrong, in one sentence."""
        inner = self.requests, self.results
        try:
            if (self.path / MARKER).exists() and all(folder.is_dir() for folder in inner):
                return None
            if not self.path.is_dir():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lost, self._lock = self._lock, make_locked_folder(self.path)
                os.close(lost)
            (self.path / MARKER).touch(mode=0o600)
            for folder in inner:
                folder.mkdir(exist_ok=True)
        except OSError as error:
            return f"The scratch folder was deleted, and cannot be made again: {error.strerror}."
        return "The scratch folder was deleted, and is made again."

    def delete(self) -> None:
        """Delete the folder."""
        _delete(self.path)
        os.close(self._lock)

    def make_request_folder(self) -> Path:
        """Make a folder for one request."""
        return Path(tempfile.mkdtemp(dir=self.requests))

    def next_request_folder(self) -> Path:
        """Return a path where a request may make its folder. Its name is unique among all processes."""
        return self.requests / f"{self.path.name}-{next(self._numbers)}"


def sweep(parent: Path, prefix: str = FOLDER_PREFIX) -> None:
    """Delete the folders of services that were killed: those with the marker and without a lock."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_marked(lock):
                _delete(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def make_locked_folder(folder: Path) -> int:
    """Make a folder that `sweep` spares as long as the returned file descriptor is open."""
    folder.mkdir(mode=0o700)
    with ExitStack() as undo:
        undo.callback(folder.rmdir)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The marker comes after the lock: whoever can lock a marked folder knows that its owner is gone.
        (folder / MARKER).touch(mode=0o600)
        undo.pop_all()
    return lock


def _delete(folder: Path) -> None:
    """Delete a locked folder. The marker goes last, so that the next service finds what a kill leaves behind."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_marked(folder: int) -> bool:
    """Return whether an open folder has our marker, and both belong to this user."""
    try:
        marker = os.stat(MARKER, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == os.fstat(folder).st_uid == os.getuid()


@cache
def _libc_access() -> Callable[[bytes, int], int]:
    access = ctypes.PyDLL(None).access
    access.argtypes, access.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    typed: Callable[[bytes, int], int] = access
    return typed


def path_exists(path: Path) -> bool:
    """Return whether a file exists, without releasing the GIL: getting it back takes a busy service longer."""
    return _libc_access()(os.fsencode(path), os.F_OK) == 0


@contextmanager
def translate_disk_faults() -> Iterator[None]:
    """Raise OutOfStorage for the OSError of a full disk, StorageUnavailable for others of the service's own files.

    Any other OSError passes through, such as that of a connection.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OutOfStorage("The disk that holds uploads is full; try again later, or send less.") from error
        if error.errno in DISK_FAULTS:
            raise StorageUnavailable(
                f"A file that the service keeps cannot be used ({error.strerror}); try again later."
            ) from error
        raise
