"""Delivery of a finished file or Zarr store into an open folder, where it appears whole and after it is on disk.

A process may be killed at any moment. A ticket lets a second call recognise what the first one has delivered.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from service.core.errors import BadParameter, Cancelled, OutputExists
from service.core.files.whole_file import descriptor_path
from service.core.types import Cancelling, never
from service.formats.zarr.store import (
    METADATA_NAMES,
    FolderStore,
    is_zarr_folder,
    open_file,
    read_json,
    translate_errors,
)
from service.serving.storage.host_folder import (
    copy_file,
    copy_folder,
    is_same_file,
    lock,
    remove_file,
    remove_folder,
    unlock,
    write_file,
)

# Errors of file systems without hard links.
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_POLL_SECONDS = 0.1


class Target(NamedTuple):
    """The name in an open folder under which a result is to appear.

    folder     descriptor
    place      the name as the request states it, for messages
    ticket     names the delivery until `settle`; "" for a target that is only checked
    overwrite  whether the result may replace another one of its kind
    """

    folder: int
    name: str
    place: str
    ticket: str = ""
    overwrite: bool = False

    @property
    def path(self) -> Path:
        return descriptor_path(self.folder) / self.name

    @property
    def partial(self) -> str:
        """Name of the result until it is complete, and of the empty file that marks a delivered store."""
        return f".stackseg-{self.ticket}.part"

    @property
    def replaced(self) -> str:
        """Name of the store that the new one replaces, until that has its name."""
        return f"{self.partial}.old"

    def rename(self, name: str, other: str) -> None:
        """Rename a file or a folder. Raises OSError."""
        os.rename(name, other, src_dir_fd=self.folder, dst_dir_fd=self.folder)


def check_file(target: Target) -> None:
    """Raise BadParameter for a folder, and OutputExists for anything else that must not be overwritten."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(target.name, dir_fd=target.folder, follow_symlinks=False).st_mode):
            raise BadParameter.about("output_to", f"{target.place} is a folder; add the name of a file.")
        if not target.overwrite:
            raise _exists(target)


def check_store(target: Target) -> None:
    """Raise OutputExists for what must not be overwritten, and BadParameter for what is no store of Zarr."""
    with suppress(FileNotFoundError):
        while True:
            found = target.path.lstat()
            if not target.overwrite:
                raise _exists(target)
            if _is_store(target.path):
                return
            # Where another call has replaced it meanwhile, it is looked at again.
            after = target.path.lstat()
            if (after.st_ino, after.st_ctime_ns) == (found.st_ino, found.st_ctime_ns):
                raise BadParameter.about(
                    "output_to",
                    f"{target.place} is no folder of Zarr, and is not replaced by one; choose another name.",
                )


def _exists(target: Target) -> OutputExists:
    return OutputExists.about(
        "output_to",
        f"{target.place} is there already; choose another name, or say overwrite=true.",
        suggested={"overwrite": "true"},
    )


def put_file(source: Path, target: Target) -> None:
    """Copy a file to its target.

    A second call, as after a crash, recognises its own file until `settle`. Raises OSError, and OutputExists for a file
    of others unless it may be overwritten.
    """
    folder, name = target.folder, target.name
    if is_same_file(folder, target.partial, name):
        return
    remove_file(folder, target.partial)
    try:
        copy_file(source, folder, target.partial)
        if target.overwrite:
            os.replace(target.partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            _link_new(target)
        os.fsync(folder)
    except BaseException:
        remove_file(folder, target.partial)
        raise


def _link_new(target: Target) -> None:
    """Link a finished file to its name. Raises OutputExists if a file has that name."""
    folder = target.folder
    try:
        os.link(target.partial, target.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        check_file(target)
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # A file that appears between these two lines is overwritten; without hard links nothing prevents that.
        check_file(target)
        target.rename(target.partial, target.name)


def put_store(source: Path, target: Target, cancelled: Cancelling = never) -> None:
    """Copy a Zarr store to its target; only another store is overwritten.

    The store holds an empty file until `settle`, by which a second call, as after a crash, recognises its own. Links
    are not followed. Raises OSError, Cancelled, BadParameter and OutputExists.
    """
    if _is_own(target):
        return
    folder, mark = target.folder, target.partial
    if (descriptor_path(folder) / target.replaced).exists() and not os.path.lexists(target.path):
        # Killed between two names.
        target.rename(target.replaced, target.name)
    remove_folder(folder, mark)
    check_store(target)
    remove_folder(folder, target.replaced)
    try:
        os.mkdir(mark, dir_fd=folder)
        copy_folder(source, folder, mark, cancelled)
        write_file(folder, f"{mark}/{mark}")
        while not _take_name(target):
            # Another one has it meanwhile, and what is no store has it for good.
            with _naming_replaced(target):
                check_store(target)
            remove_folder(folder, target.replaced)
        os.fsync(folder)
        remove_folder(folder, target.replaced)
    finally:
        remove_folder(folder, mark)


def _take_name(target: Target) -> bool:
    """Give the finished store its name, in place of another store if that may be. Return whether the name was free."""
    if target.overwrite:
        with suppress(FileNotFoundError):
            target.rename(target.name, target.replaced)
            if not _is_store(descriptor_path(target.folder) / target.replaced):
                target.rename(target.replaced, target.name)
                return False
    try:
        target.rename(target.partial, target.name)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        with suppress(FileNotFoundError):
            target.rename(target.replaced, target.name)
        raise
    return True


def _is_store(path: Path) -> bool:
    return not path.is_symlink() and is_zarr_folder(path)


@contextmanager
def _naming_replaced(target: Target) -> Iterator[None]:
    """Say where a store is that was to be replaced when something else took its name."""
    try:
        yield
    except (BadParameter, OutputExists) as error:
        if not (descriptor_path(target.folder) / target.replaced).exists():
            raise
        text = f"{error} The store that it was to replace is beside it, as {target.replaced}."
        raise type(error)(text, parameter=error.parameter, suggested=error.suggested) from None


def _is_own(target: Target) -> bool:
    """Return whether `put_store` has delivered the store of this name, and it was not settled."""
    return not target.path.is_symlink() and (target.path / target.partial).is_file()


def settle(target: Target) -> None:
    """Forget the ticket of a result that is on record."""
    if _is_own(target):
        remove_folder(target.folder, target.replaced)
        # Another one may have taken its place.
        remove_file(target.folder, f"{target.name}/{target.partial}")
    remove_file(target.folder, target.partial)


def take_back(target: Target) -> None:
    """Delete a store that `put_store` has delivered, unless it was settled."""
    if _is_own(target):
        remove_folder(target.folder, target.name)


def list_labels(labels: Path, folder: int, cancelled: Cancelling) -> None:
    """Add what a group of labels lists to the group that is, or is to be, in an open folder.

    Each file of metadata appears whole. Links are not followed. Raises OSError, BadFile, and Cancelled.
    """
    with _locked(folder, cancelled):
        for path in sorted(labels.iterdir()):
            if path.name in METADATA_NAMES:
                present = read_json(FolderStore(partial(open_file, folder)), path.name)
                with translate_errors(f"labels/{path.name}"):
                    merged = _merge(present or {}, json.loads(path.read_bytes()))
                part = f".{path.name}.part"
                remove_file(folder, part)
                write_file(folder, part, json.dumps(merged, indent=2).encode())
                os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _locked(folder: int, cancelled: Cancelling) -> Iterator[None]:
    """Hold a folder once nobody else does, as any program of the host may. Raises Cancelled."""
    while not _try_lock(folder):
        if cancelled():
            raise Cancelled("given up while others held the folder of its result")
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        unlock(folder)


def _try_lock(folder: int) -> bool:
    """Lock a folder and return True; return False if others hold it."""
    # Not every file system has locks.
    with suppress(OSError):
        try:
            lock(folder)
        except BlockingIOError:
            return False
    return True


def _merge(present: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Return metadata of a group with the labels of another one listed, too."""
    merged = added | present
    if "labels" in added:
        return merged | {"labels": sorted({*map(str, present.get("labels", ())), *added["labels"]})}
    inner = {key: value for key, value in added.items() if isinstance(value, dict)}
    return merged | {key: _merge(present.get(key, {}), value) for key, value in inner.items()}
