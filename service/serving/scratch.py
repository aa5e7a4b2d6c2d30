"""Folders of this process for requests, swept by the next service after a crash."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from service.core.config import Settings
from service.core.errors import ConfigError, OutOfStorage

FOLDER_PREFIX = "stackseg-"
# Says that a folder is ours to delete; others may choose the same beginning of a name.
MARKER = ".stackseg-scratch"


@cache
def _access() -> Callable[[bytes, int], int]:
    access = ctypes.PyDLL(None).access
    access.argtypes, access.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    found: Callable[[bytes, int], int] = access
    return found


def is_there(path: Path) -> bool:
    """Whether there is such a file: without letting others run Python, which takes a busy service longer than this."""
    return _access()(os.fsencode(path), os.F_OK) == 0


@contextmanager
def storage() -> Iterator[None]:
    """A full disk is nobody's fault: OSError -> OutOfStorage; any other OSError passes through."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise OutOfStorage("The disk that holds uploads is full; try again later, or send less.") from error


def sweep(parent: Path) -> None:
    """Delete the folders of services that were killed: those that carry the marker and whose lock nobody holds."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_marked(hold):
                discard(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(hold)


def discard(folder: Path) -> None:
    """Delete a held folder; the marker goes last, so that what a kill leaves of it is swept by the next service."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_marked(folder: int) -> bool:
    """Whether an open folder holds our marker, and both are this user's."""
    try:
        marker = os.stat(MARKER, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == os.fstat(folder).st_uid == os.getuid()


def make_held_folder(folder: Path) -> int:
    """Make a folder that `sweep` spares as long as the returned descriptor is open."""
    folder.mkdir(mode=0o700)
    hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(hold, fcntl.LOCK_EX)
    # Only now may it be swept: whoever gets the lock of a marked folder knows that its owner is gone.
    (folder / MARKER).touch(mode=0o600)
    return hold


def scratch_parent(settings: Settings) -> Path:
    parent = settings.server.scratch_folder or Path(tempfile.gettempdir())
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        raise ConfigError(f"server.scratch_folder: {parent} is not a folder that this process may write to.")
    return parent
