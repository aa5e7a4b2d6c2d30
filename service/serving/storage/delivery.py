"""Atomic delivery of a finished file or Zarr store to a folder. It appears there after it has been written to disk.

The process may be killed at any moment. A ticket allows a second call to recognize what the first call has delivered.
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
from service.core.files.atomic_files import descriptor_path
from service.core.types import CancellationCheck, never_cancelled
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


class DeliveryTarget(NamedTuple):
    """The destination of a result: a name in an open folder.

    folder     file descriptor of the folder
    location   the destination as written in the request, for messages
    ticket     identifies the delivery until `confirm_delivery`; "" if the target is only checked
    overwrite  whether the result may replace an existing result of the same kind
    """

    folder: int
    name: str
    location: str
    ticket: str = ""
    overwrite: bool = False

    @property
    def path(self) -> Path:
        return descriptor_path(self.folder) / self.name

    @property
    def partial(self) -> str:
        """Name of an incomplete result, and of the empty file that marks a delivered store."""
        return f".stackseg-{self.ticket}.part"

    @property
    def replaced(self) -> str:
        """Temporary name of an existing store while it is being replaced."""
        return f"{self.partial}.old"

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file or a folder. Raises OSError."""
        os.rename(name, new_name, src_dir_fd=self.folder, dst_dir_fd=self.folder)


def check_file(target: DeliveryTarget) -> None:
    """Raise BadParameter if the target is a folder, and OutputExists if it exists and must not be overwritten."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(target.name, dir_fd=target.folder, follow_symlinks=False).st_mode):
            raise BadParameter.about("output_to", f"{target.location} is a folder. Add a file name.")
        if not target.overwrite:
            raise _output_exists_error(target)


def check_store(target: DeliveryTarget) -> None:
    """Raise OutputExists if the target must not be overwritten, and BadParameter if it is not a Zarr store."""
    with suppress(FileNotFoundError):
        while True:
            status_before = target.path.lstat()
            if not target.overwrite:
                raise _output_exists_error(target)
            if _is_store(target.path):
                return
            # Check again if another call has replaced it in the meantime.
            status_after = target.path.lstat()
            if (status_after.st_ino, status_after.st_ctime_ns) == (status_before.st_ino, status_before.st_ctime_ns):
                raise BadParameter.about(
                    "output_to",
                    f"{target.location} exists and is not a Zarr folder, so it is not replaced. Choose another name.",
                )


def _output_exists_error(target: DeliveryTarget) -> OutputExists:
    return OutputExists.about(
        "output_to",
        f"{target.location} already exists. Choose another name, or set overwrite=true.",
        suggested={"overwrite": "true"},
    )


def put_file(source: Path, target: DeliveryTarget) -> None:
    """Copy a file to its target.

    Until `confirm_delivery`, a second call, for example after a crash, recognizes its own file. Raises OSError, and
    OutputExists if another file exists and must not be overwritten.
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


def _link_new(target: DeliveryTarget) -> None:
    """Link a finished file to its final name. Raises OutputExists if the name is taken."""
    folder = target.folder
    try:
        os.link(target.partial, target.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        check_file(target)
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # A file that is created between these two lines is overwritten. Without hard links, this cannot be prevented.
        check_file(target)
        target.rename(target.partial, target.name)


def put_store(source: Path, target: DeliveryTarget, cancelled: CancellationCheck = never_cancelled) -> None:
    """Copy a Zarr store to its target. Only another Zarr store can be overwritten.

    Until `confirm_delivery`, the delivered store contains an empty marker file. A second call, for example after a
    crash, recognizes its own store by the marker. Links are not followed. Raises OSError, Cancelled, BadParameter
    and OutputExists.
    """
    if _is_own(target):
        return
    folder, marker = target.folder, target.partial
    if (descriptor_path(folder) / target.replaced).exists() and not os.path.lexists(target.path):
        # The process was killed between the two renames.
        target.rename(target.replaced, target.name)
    remove_folder(folder, marker)
    check_store(target)
    remove_folder(folder, target.replaced)
    try:
        os.mkdir(marker, dir_fd=folder)
        copy_folder(source, folder, marker, cancelled)
        write_file(folder, f"{marker}/{marker}")
        while not _rename_to_target(target):
            # The name was taken in the meantime. Another store can be replaced, anything else raises an error.
            with _reporting_replaced_store(target):
                check_store(target)
            remove_folder(folder, target.replaced)
        os.fsync(folder)
        remove_folder(folder, target.replaced)
    finally:
        remove_folder(folder, marker)


def _rename_to_target(target: DeliveryTarget) -> bool:
    """Rename the finished store to its final name, replacing a store if allowed. Return False if the name is taken."""
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
def _reporting_replaced_store(target: DeliveryTarget) -> Iterator[None]:
    """Add the name of the store that was being replaced to errors, if something else took its name."""
    try:
        yield
    except (BadParameter, OutputExists) as error:
        if not (descriptor_path(target.folder) / target.replaced).exists():
            raise
        message = f"{error} The previous store is in the same folder, as {target.replaced}."
        raise type(error)(message, parameter=error.parameter, suggested=error.suggested) from None


def _is_own(target: DeliveryTarget) -> bool:
    """Return whether the store at the target was delivered with this ticket and is not settled."""
    return not target.path.is_symlink() and (target.path / target.partial).is_file()


def confirm_delivery(target: DeliveryTarget) -> None:
    """Forget the ticket of a delivered result, after the result has been recorded."""
    if _is_own(target):
        remove_folder(target.folder, target.replaced)
        # Another store may have replaced it in the meantime.
        remove_file(target.folder, f"{target.name}/{target.partial}")
    remove_file(target.folder, target.partial)


def undo_delivery(target: DeliveryTarget) -> None:
    """Delete a store that `put_store` has delivered, unless it is settled."""
    if _is_own(target):
        remove_folder(target.folder, target.name)


def register_labels(labels: Path, folder: int, cancelled: CancellationCheck) -> None:
    """Add the labels listed in the group `labels` to the group in an open folder, which is created if necessary.

    Metadata files are replaced atomically. Links are not followed. Raises OSError, BadFile and Cancelled.
    """
    with _locked(folder, cancelled):
        for path in sorted(labels.iterdir()):
            if path.name in METADATA_NAMES:
                existing = read_json(FolderStore(partial(open_file, folder)), path.name)
                with translate_errors(f"labels/{path.name}"):
                    merged = _merge(existing or {}, json.loads(path.read_bytes()))
                part = f".{path.name}.part"
                remove_file(folder, part)
                write_file(folder, part, json.dumps(merged, indent=2).encode())
                os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _locked(folder: int, cancelled: CancellationCheck) -> Iterator[None]:
    """Wait for an exclusive lock on a folder, which any program on the host may hold. Raises Cancelled."""
    while not _try_lock(folder):
        if cancelled():
            raise Cancelled("cancelled while waiting for the lock on the output folder")
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        unlock(folder)


def _try_lock(folder: int) -> bool:
    """Try to lock a folder. Return False if another process holds the lock."""
    # Some file systems do not support locks. Continue without one.
    with suppress(OSError):
        try:
            lock(folder)
        except BlockingIOError:
            return False
    return True


def _merge(existing: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata `existing` of a group, extended with the labels listed in `added`."""
    merged = added | existing
    if "labels" in added:
        return merged | {"labels": sorted({*map(str, existing.get("labels", ())), *added["labels"]})}
    nested = {key: value for key, value in added.items() if isinstance(value, dict)}
    return merged | {key: _merge(existing.get(key, {}), value) for key, value in nested.items()}
