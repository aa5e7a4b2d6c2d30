"""The scratch folder of this process for the files of requests, and the limits on their size.

It contains uploads, decoded pixels, and results until they are sent. If the service is killed, the next one deletes the
folder.
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
# Folders without this file are not deleted, because other programs may use the same prefix.
MARKER = ".stackseg-scratch"
RETRY_SECONDS = 5


class ScratchFolder:
    """The scratch folder of this process. It is deleted when the service stops.

    path      the folder itself; its name is unique
    requests  folder with a subfolder for each request
    results   folder with the cached results

    Raises ConfigError if the process cannot write to the parent folder.
    """

    def __init__(self, parent: Path | None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
            raise ConfigError(f"server.scratch_folder: {parent} is not a folder that this process can write to.")
        self.path = parent / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self.requests, self.results = self.path / "requests", self.path / "cache"
        self._numbers = itertools.count()
        self._lock: int

    def create(self) -> None:
        """Create and lock the folder. Delete the folders of killed services."""
        sweep(self.path.parent)
        self._lock = make_locked_folder(self.path)
        self.requests.mkdir()
        self.results.mkdir()

    def repair(self) -> str | None:
        """Recreate the folder or parts of it after deletion. Return the current problem as one sentence, or None."""
        subfolders = self.requests, self.results
        try:
            if (self.path / MARKER).exists() and all(folder.is_dir() for folder in subfolders):
                return None
            if not self.path.is_dir():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                old_lock, self._lock = self._lock, make_locked_folder(self.path)
                os.close(old_lock)
            (self.path / MARKER).touch(mode=0o600)
            for folder in subfolders:
                folder.mkdir(exist_ok=True)
        except OSError as error:
            return f"The scratch folder was deleted and cannot be recreated: {error.strerror}."
        return "The scratch folder was deleted and has been recreated."

    def delete(self) -> None:
        """Delete the folder."""
        _delete(self.path)
        os.close(self._lock)

    def make_request_folder(self) -> Path:
        """Create a folder for one request."""
        return Path(tempfile.mkdtemp(dir=self.requests))

    def next_request_folder(self) -> Path:
        """Return a path at which a request can create its folder. The name is unique among all processes."""
        return self.requests / f"{self.path.name}-{next(self._numbers)}"


def sweep(parent: Path, prefix: str = FOLDER_PREFIX) -> None:
    """Delete the folders of killed services, which have the marker file but no lock."""
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
    """Create a folder that `sweep` does not delete while the returned file descriptor is open."""
    folder.mkdir(mode=0o700)
    with ExitStack() as cleanup:
        cleanup.callback(folder.rmdir)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        cleanup.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Create the marker after locking. A marked folder without a lock then has no owner process.
        (folder / MARKER).touch(mode=0o600)
        cleanup.pop_all()
    return lock


def _delete(folder: Path) -> None:
    """Delete a locked folder. Delete the marker last, so that the next service can finish an interrupted deletion."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_marked(folder: int) -> bool:
    """Return whether an open folder contains the marker file, and both belong to the current user."""
    try:
        marker = os.stat(MARKER, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == os.fstat(folder).st_uid == os.getuid()


class ScratchSpace:
    """Disk space of `limit` bytes that clients share. Thread-safe.

    A client cannot reserve more than it leaves free for others (dynamic thresholds, Choudhury and Hahne 1998). A single
    client gets half of the space at most, and there is always space for another client.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes reserved by all clients."""
        return self._used.total()

    @property
    def max_client_bytes(self) -> int:
        """Maximum number of bytes for a client if no other client uses the space."""
        return self.limit // 2

    def new_reservation(self, client: str) -> SpaceReservation:
        """Return an empty reservation for a client. Close it after its files have been deleted."""
        return SpaceReservation(self, client)

    def change(self, reservation: SpaceReservation, nbytes: int, *, checked: bool = False) -> None:
        """Change the size of an open reservation. With `checked`, raises the errors of `SpaceReservation.reserve`."""
        with self._lock:
            if checked and not reservation.closed:
                self._check(reservation.client, nbytes)
            if not reservation.closed:
                reservation.nbytes += nbytes
                self._add_used_bytes(reservation.client, nbytes)

    def release(self, reservation: SpaceReservation) -> None:
        """Close a reservation."""
        with self._lock:
            self._add_used_bytes(reservation.client, -reservation.nbytes)
            reservation.nbytes, reservation.closed = 0, True

    def _add_used_bytes(self, client: str, nbytes: int) -> None:
        self._used[client] += nbytes
        if not self._used[client]:
            del self._used[client]

    def _check(self, client: str, nbytes: int) -> None:
        free, used_by_client = self.limit - self._used.total() - nbytes, self._used[client]
        if used_by_client + nbytes <= free:
            return
        if 2 * nbytes > self.limit:
            raise TooLarge(
                f"The request needs {nbytes:,} bytes of disk space on the service. The limit per client is"
                f" {self.max_client_bytes:,} bytes. Select a channel or a time point, crop the stack, or downsample it."
            )
        if used_by_client:
            raise RateLimited(
                f"Your other requests use {used_by_client:,} bytes of disk space on the service, and {nbytes:,} more"
                " would leave too little for other users. Fetch their results, or wait until one of them ends.",
                RETRY_SECONDS,
            )
        raise OutOfStorage(
            "Requests of other users fill the disk space of the service. Try again later, or send a smaller file."
        )


class SpaceReservation:
    """The disk space reserved by one request of a client. A closed reservation ignores further changes."""

    def __init__(self, space: ScratchSpace, client: str) -> None:
        self._space, self.client = space, client
        self.nbytes, self.closed = 0, False

    def reserve(self, nbytes: int) -> None:
        """Reserve space for a file before it is written.

        Raises TooLarge if the size exceeds the limit per client, RateLimited if the client already uses too much, and
        OutOfStorage if all clients together use too much.
        """
        self._space.change(self, nbytes, checked=True)

    def add(self, nbytes: int) -> None:
        """Count an existing file. Pass a negative number for a deleted file."""
        self._space.change(self, nbytes)

    def close(self) -> None:
        """Release the reserved space."""
        self._space.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
