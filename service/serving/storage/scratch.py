"""The scratch folder of this process for the files of requests, and the limits on the size of these files.

The folder contains uploads, decoded pixels, and results until they are sent. If the service is killed, the next service
process deletes the folder.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from service.core.errors import ConfigError, OutOfStorage, RateLimited, TooLarge
from service.serving.storage.memory_budget import ClientShares

FOLDER_PREFIX = "stackseg-"
# Folders without this file are not deleted, because other programs may use the same prefix.
MARKER_FILE = ".stackseg-scratch"
RETRY_AFTER_SECONDS = 5


class ScratchFolder:
    """The scratch folder of this process. It is deleted when the service stops.

    path             path of the folder, whose name is unique
    requests_folder  path of the folder with a subfolder for each request
    results_folder   path of the folder with the cached results

    Raises ConfigError if the process cannot write to the parent folder.
    """

    def __init__(self, parent: Path | None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
            raise ConfigError(f"server.scratch_folder: {parent} is not a folder that this process can write to.")
        self.path = parent / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self.requests_folder, self.results_folder = self.path / "requests", self.path / "cache"
        self._request_numbers = itertools.count()
        self._lock_fd: int

    def create(self) -> None:
        """Create and lock the folder. Delete the folders of killed services."""
        delete_abandoned_folders(self.path.parent)
        self._lock_fd = make_locked_folder(self.path)
        self.requests_folder.mkdir()
        self.results_folder.mkdir()

    def repair(self) -> str | None:
        """Recreate the folder or its subfolders if they were deleted. Return the problem as one sentence, or None."""
        subfolders = self.requests_folder, self.results_folder
        try:
            if (self.path / MARKER_FILE).exists() and all(folder.is_dir() for folder in subfolders):
                return None
            if not self.path.is_dir():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                old_lock_fd, self._lock_fd = self._lock_fd, make_locked_folder(self.path)
                os.close(old_lock_fd)
            (self.path / MARKER_FILE).touch(mode=0o600)
            for folder in subfolders:
                folder.mkdir(exist_ok=True)
        except OSError as error:
            return f"The scratch folder was deleted and cannot be recreated: {error.strerror}."
        return "The scratch folder was deleted and has been recreated."

    def delete(self) -> None:
        """Delete the folder."""
        _delete_folder(self.path)
        os.close(self._lock_fd)

    def make_request_folder(self) -> Path:
        """Create a folder for one request."""
        return Path(tempfile.mkdtemp(dir=self.requests_folder))

    def get_next_request_folder(self) -> Path:
        """Return a path at which a request can create its folder. The name is unique among all processes."""
        return self.requests_folder / f"{self.path.name}-{next(self._request_numbers)}"


def delete_abandoned_folders(parent: Path, prefix: str = FOLDER_PREFIX) -> None:
    """Delete the folders of killed processes, which contain the marker file but are not locked."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_marker(lock_fd):
                _delete_folder(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(lock_fd)


def make_locked_folder(folder: Path) -> int:
    """Create a folder, and lock it against `delete_abandoned_folders` until the returned file descriptor is closed."""
    folder.mkdir(mode=0o700)
    with ExitStack() as cleanup:
        cleanup.callback(folder.rmdir)
        lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        cleanup.callback(os.close, lock_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        # Create the marker after locking. The process of a marked folder without a lock has therefore ended.
        (folder / MARKER_FILE).touch(mode=0o600)
        cleanup.pop_all()
    return lock_fd


def _delete_folder(folder: Path) -> None:
    """Delete a locked folder. Delete the marker last, so that the next process can finish an interrupted deletion."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER_FILE:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _has_marker(folder_fd: int) -> bool:
    """Return whether an open folder contains the marker file and both belong to the current user."""
    try:
        marker = os.stat(MARKER_FILE, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == os.fstat(folder_fd).st_uid == os.getuid()


class ScratchSpace:
    """A limited amount of disk space that clients share, see `ClientShares`. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._shares = ClientShares(limit_bytes)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved by all clients."""
        return self._shares.used_bytes.total()

    @property
    def max_client_bytes(self) -> int:
        """Maximum number of bytes that a client can reserve if no other client has reserved any."""
        return self.limit_bytes // 2

    def make_reservation(self, client: str) -> SpaceReservation:
        """Return an empty reservation for a client. Close the reservation after the client's files are deleted."""
        return SpaceReservation(self, client)

    def add(self, reservation: SpaceReservation, nbytes: int, *, is_limited: bool = False) -> None:
        """Add `nbytes` to an open reservation. With `is_limited`, raise the errors of `SpaceReservation.reserve`."""
        with self._lock:
            if is_limited and not reservation.is_closed:
                self._check_limits(reservation.client, nbytes)
            if not reservation.is_closed:
                reservation.nbytes += nbytes
                self._shares.add(reservation.client, nbytes)

    def release(self, reservation: SpaceReservation) -> None:
        """Close a reservation."""
        with self._lock:
            self._shares.add(reservation.client, -reservation.nbytes)
            reservation.nbytes, reservation.is_closed = 0, True

    def _check_limits(self, client: str, nbytes: int) -> None:
        if self._shares.has_room(client, nbytes):
            return
        if 2 * nbytes > self.limit_bytes:
            raise TooLarge(
                f"The request needs {nbytes:,} bytes of disk space on the service, but a client can use at most"
                f" {self.max_client_bytes:,} bytes. Select a channel or a time point, crop the stack, or downsample it."
            )
        if client_bytes := self._shares.used_bytes[client]:
            raise RateLimited(
                f"Your other requests use {client_bytes:,} bytes of disk space on the service, and {nbytes:,} more"
                " would leave too little for other users. Fetch the results of those requests, or wait until one of"
                " the requests ends.",
                RETRY_AFTER_SECONDS,
            )
        raise OutOfStorage(
            "Requests from other users use up the disk space of the service. Try again later, or send a smaller file."
        )


class SpaceReservation:
    """The disk space that one request of a client has reserved. Changes to a closed reservation are ignored."""

    def __init__(self, space: ScratchSpace, client: str) -> None:
        self._space, self.client = space, client
        self.nbytes, self.is_closed = 0, False

    def reserve(self, nbytes: int) -> None:
        """Reserve space for a file before it is written.

        Raises TooLarge if the size exceeds the limit per client, RateLimited if the client already uses too much
        space, and OutOfStorage if all clients together use too much space.
        """
        self._space.add(self, nbytes, is_limited=True)

    def add(self, nbytes: int) -> None:
        """Count an existing file. Pass a negative number for a deleted file."""
        self._space.add(self, nbytes)

    def close(self) -> None:
        """Release the reserved space."""
        self._space.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
