"""Atomic delivery of a finished file or Zarr store to a folder.

A result appears in the folder only after it has been completely written to disk. The process may be killed at any
moment. A ticket allows a second call to recognize the result that the first call has delivered.
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
from service.core.files.atomic_files import make_descriptor_path
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
    delete_file,
    delete_folder,
    is_same_file,
    lock_folder,
    unlock_folder,
    write_file,
)

# Error numbers of `os.link` on file systems without hard links.
_NO_HARD_LINK_ERRNOS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_LOCK_POLL_SECONDS = 0.1


class DeliveryTarget(NamedTuple):
    """The destination of a result: a name in an open folder.

    folder_fd  file descriptor of the folder
    location   the destination as written in the request, for messages
    ticket     identifies the delivery until `confirm_delivery`; "" if nothing is delivered to the target
    overwrite  whether the result may replace an existing result of the same kind
    """

    folder_fd: int
    name: str
    location: str
    ticket: str = ""
    overwrite: bool = False

    @property
    def path(self) -> Path:
        return make_descriptor_path(self.folder_fd) / self.name

    @property
    def partial_name(self) -> str:
        """Name of an incomplete result, and of the empty marker file in a delivered store."""
        return f".stackseg-{self.ticket}.part"

    @property
    def replaced_name(self) -> str:
        """Temporary name of an existing store while it is being replaced."""
        return f"{self.partial_name}.old"

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file or a folder. Raises OSError."""
        os.rename(name, new_name, src_dir_fd=self.folder_fd, dst_dir_fd=self.folder_fd)


def check_file(target: DeliveryTarget) -> None:
    """Raise BadParameter if the target is a folder, and OutputExists if it is a file that must not be overwritten."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(target.name, dir_fd=target.folder_fd, follow_symlinks=False).st_mode):
            raise BadParameter.for_parameter("output_to", f"{target.location} is a folder. Add a file name.")
        if not target.overwrite:
            raise _make_output_exists_error(target)


def check_store(target: DeliveryTarget) -> None:
    """Raise OutputExists if the target must not be overwritten, and BadParameter if it is not a Zarr store."""
    with suppress(FileNotFoundError):
        while True:
            status_before = target.path.lstat()
            if not target.overwrite:
                raise _make_output_exists_error(target)
            if _is_store(target.path):
                return
            # Check again if another call has replaced the target in the meantime.
            status_after = target.path.lstat()
            if (status_after.st_ino, status_after.st_ctime_ns) == (status_before.st_ino, status_before.st_ctime_ns):
                raise BadParameter.for_parameter(
                    "output_to",
                    f"{target.location} is not a Zarr store, so it cannot be replaced with one. Choose another name.",
                )


def _make_output_exists_error(target: DeliveryTarget) -> OutputExists:
    return OutputExists.for_parameter(
        "output_to",
        f"{target.location} already exists. Choose another name, or set overwrite=true.",
        suggested={"overwrite": "true"},
    )


def put_file(source: Path, target: DeliveryTarget) -> None:
    """Copy a file to its target.

    Until `confirm_delivery`, a second call, for example after a crash, recognizes the file that the first call has
    delivered. Raises OSError, and OutputExists if a different file exists and must not be overwritten.
    """
    folder_fd, name = target.folder_fd, target.name
    if is_same_file(folder_fd, target.partial_name, name):
        return
    delete_file(folder_fd, target.partial_name)
    try:
        copy_file(source, folder_fd, target.partial_name)
        if target.overwrite:
            os.replace(target.partial_name, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        else:
            _link_final_name(target)
        os.fsync(folder_fd)
    except BaseException:
        delete_file(folder_fd, target.partial_name)
        raise


def _link_final_name(target: DeliveryTarget) -> None:
    """Link a finished file to its final name. Raises OutputExists if the name is taken."""
    folder_fd = target.folder_fd
    try:
        os.link(target.partial_name, target.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except FileExistsError:
        check_file(target)
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINK_ERRNOS:
            raise
        # A file that is created between the next two lines is overwritten. Without hard links, this cannot be
        # prevented.
        check_file(target)
        target.rename(target.partial_name, target.name)


def put_store(source: Path, target: DeliveryTarget, cancelled: CancellationCheck = never_cancelled) -> None:
    """Copy a Zarr store to its target. Only another Zarr store can be overwritten.

    Until `confirm_delivery`, the delivered store contains an empty marker file. A second call, for example after a
    crash, recognizes the store of the first call by the marker. Links are not followed. Raises OSError, Cancelled,
    BadParameter and OutputExists.
    """
    if _is_unconfirmed_delivery(target):
        return
    folder_fd, partial_name = target.folder_fd, target.partial_name
    if (make_descriptor_path(folder_fd) / target.replaced_name).exists() and not os.path.lexists(target.path):
        # The process was killed between the two renames.
        target.rename(target.replaced_name, target.name)
    delete_folder(folder_fd, partial_name)
    check_store(target)
    delete_folder(folder_fd, target.replaced_name)
    try:
        os.mkdir(partial_name, dir_fd=folder_fd)
        copy_folder(source, folder_fd, partial_name, cancelled)
        # Write the marker file, which has the same name as the incomplete store.
        write_file(folder_fd, f"{partial_name}/{partial_name}")
        while not _rename_to_target(target):
            # Another process took the name in the meantime. A store can be replaced; anything else is an error.
            with _report_replaced_store(target):
                check_store(target)
            delete_folder(folder_fd, target.replaced_name)
        os.fsync(folder_fd)
        delete_folder(folder_fd, target.replaced_name)
    finally:
        delete_folder(folder_fd, partial_name)


def _rename_to_target(target: DeliveryTarget) -> bool:
    """Rename the finished store to its final name. Replace a store if allowed. Return False if the name is taken."""
    if target.overwrite:
        with suppress(FileNotFoundError):
            target.rename(target.name, target.replaced_name)
            if not _is_store(make_descriptor_path(target.folder_fd) / target.replaced_name):
                target.rename(target.replaced_name, target.name)
                return False
    try:
        target.rename(target.partial_name, target.name)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        with suppress(FileNotFoundError):
            target.rename(target.replaced_name, target.name)
        raise
    return True


def _is_store(path: Path) -> bool:
    return not path.is_symlink() and is_zarr_folder(path)


@contextmanager
def _report_replaced_store(target: DeliveryTarget) -> Iterator[None]:
    """Context manager that adds the temporary name of the previous store to an error, if that store was renamed."""
    try:
        yield
    except (BadParameter, OutputExists) as error:
        if not (make_descriptor_path(target.folder_fd) / target.replaced_name).exists():
            raise
        message = f"{error} The previous store is in the same folder, under the name {target.replaced_name}."
        raise type(error)(message, parameter=error.parameter, suggested=error.suggested) from None


def _is_unconfirmed_delivery(target: DeliveryTarget) -> bool:
    """Return whether the target is a store that was delivered with this ticket and has not been confirmed."""
    return not target.path.is_symlink() and (target.path / target.partial_name).is_file()


def confirm_delivery(target: DeliveryTarget) -> None:
    """Delete the marker of a delivered result. Call this after the result has been recorded."""
    if _is_unconfirmed_delivery(target):
        delete_folder(target.folder_fd, target.replaced_name)
        # If another store has replaced this one in the meantime, the marker does not exist.
        delete_file(target.folder_fd, f"{target.name}/{target.partial_name}")
    delete_file(target.folder_fd, target.partial_name)


def undo_delivery(target: DeliveryTarget) -> None:
    """Delete a store that `put_store` has delivered, unless its delivery has been confirmed."""
    if _is_unconfirmed_delivery(target):
        delete_folder(target.folder_fd, target.name)


def register_labels(labels_group: Path, folder_fd: int, cancelled: CancellationCheck) -> None:
    """Add the labels listed in the group at the path `labels_group` to the group in an open folder.

    Metadata files are created or replaced atomically. Links are not followed. Raises OSError, BadFile and Cancelled.
    """
    with _hold_lock(folder_fd, cancelled):
        for path in sorted(labels_group.iterdir()):
            if path.name in METADATA_NAMES:
                metadata = read_json(FolderStore(partial(open_file, folder_fd)), path.name)
                with translate_errors(f"labels/{path.name}"):
                    merged_metadata = _merge_metadata(metadata or {}, json.loads(path.read_bytes()))
                partial_name = f".{path.name}.part"
                delete_file(folder_fd, partial_name)
                write_file(folder_fd, partial_name, json.dumps(merged_metadata, indent=2).encode())
                os.replace(partial_name, path.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


@contextmanager
def _hold_lock(folder_fd: int, cancelled: CancellationCheck) -> Iterator[None]:
    """Context manager that holds an exclusive lock on a folder. Waits for other programs. Raises Cancelled."""
    while not _try_lock(folder_fd):
        if cancelled():
            raise Cancelled("The request was canceled while it was waiting for the lock on the output folder.")
        time.sleep(_LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        unlock_folder(folder_fd)


def _try_lock(folder_fd: int) -> bool:
    """Try to lock a folder. Return False if another process holds the lock."""
    # Some file systems do not support locks. In that case, continue without a lock.
    with suppress(OSError):
        try:
            lock_folder(folder_fd)
        except BlockingIOError:
            return False
    return True


def _merge_metadata(metadata: dict[str, Any], new_metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a group, extended with the labels listed in `new_metadata`."""
    merged_metadata = new_metadata | metadata
    if "labels" in new_metadata:
        return merged_metadata | {"labels": sorted({*map(str, metadata.get("labels", ())), *new_metadata["labels"]})}
    nested_metadata = {key: value for key, value in new_metadata.items() if isinstance(value, dict)}
    return merged_metadata | {
        key: _merge_metadata(metadata.get(key, {}), value) for key, value in nested_metadata.items()
    }
