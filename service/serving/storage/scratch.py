"""The folder of this process for files of requests, and the accounting of the bytes that they hold there.

They are uploads, decoded pixels, and results until they are taken. The next service deletes the folder if this one is
killed.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import threading
import uuid
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from service.core.errors import ConfigError, OutOfStorage, RateLimited, TooLarge

FOLDER_PREFIX = "stackseg-"
# A folder without this file is not deleted: folders of others may have the same prefix.
MARKER = ".stackseg-scratch"
RETRY_SECONDS = 5


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

    def repair(self) -> str | None:
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


class ScratchSpace:
    """Bytes on disk that several clients share, `limit` at most. Safe to use from threads.

    No client holds more than it leaves free for others (dynamic thresholds, Choudhury and Hahne 1998): a client alone
    holds half of the space at most, and whoever comes next finds room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that all clients hold."""
        return self._used.total()

    @property
    def most(self) -> int:
        """Bytes that a client holds at most, which is alone with the space."""
        return self.limit // 2

    def hold(self, client: str) -> Hold:
        """Return an empty hold of this client, to be closed once the files are gone."""
        return Hold(self, client)

    def change(self, hold: Hold, nbytes: int, *, checked: bool = False) -> None:
        """Add to a hold that is not closed. Raises what `Hold.reserve` raises where it is `checked`."""
        with self._lock:
            if checked and not hold.closed:
                self._check(hold.client, nbytes)
            if not hold.closed:
                hold.nbytes += nbytes
                self._count(hold.client, nbytes)

    def release(self, hold: Hold) -> None:
        """Close a hold."""
        with self._lock:
            self._count(hold.client, -hold.nbytes)
            hold.nbytes, hold.closed = 0, True

    def _count(self, client: str, nbytes: int) -> None:
        self._used[client] += nbytes
        if not self._used[client]:
            del self._used[client]

    def _check(self, client: str, nbytes: int) -> None:
        free, held = self.limit - self._used.total() - nbytes, self._used[client]
        if held + nbytes <= free:
            return
        if 2 * nbytes > self.limit:
            raise TooLarge(
                f"The request needs {nbytes:,} bytes on the service's disk, of {self.limit:,} that no caller may have"
                " more than half of. Select a channel or a time point, crop the stack, or reduce it."
            )
        if held:
            raise RateLimited(
                f"Your other requests hold {held:,} bytes on the service's disk, and with {nbytes:,} more too little"
                " would be left for others. Take their results, or wait for one to end.",
                RETRY_SECONDS,
            )
        raise OutOfStorage("The requests of others hold too much of the service's disk; try again later, or send less.")


class Hold:
    """Bytes that one request of a client holds, until it is closed; then nothing counts any more."""

    def __init__(self, space: ScratchSpace, client: str) -> None:
        self._space, self.client = space, client
        self.nbytes, self.closed = 0, False

    def reserve(self, nbytes: int) -> None:
        """Take room for a file before it is written.

        Raises TooLarge for more than any client may hold, RateLimited where the client holds too much already, and
        OutOfStorage where all clients together do.
        """
        self._space.change(self, nbytes, checked=True)

    def add(self, nbytes: int) -> None:
        """Count a file that is there already; a negative number for one that is gone."""
        self._space.change(self, nbytes)

    def close(self) -> None:
        """Give everything back."""
        self._space.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
