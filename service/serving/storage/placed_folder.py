"""A store of Zarr as a result: copied into an open folder, where it appears whole, and listed among labels."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from service.core.errors import BadParameter, Cancelled, OutputExists
from service.core.whole_file import descriptor_path
from service.formats.zarr.array import read_json, translate_errors
from service.formats.zarr.store import METADATA_NAMES, FolderStore, is_zarr_folder, open_below
from service.serving.storage.open_folder import OPEN_FOLDER

# Of the folder that a new one replaces, until it has its name.
_REPLACED = ".old"
_POLL_SECONDS = 0.1


def check_target(folder: int, name: str, place: str, *, overwrite: bool) -> None:
    """Raise OutputExists for what must not be overwritten, and BadParameter for what is no store of Zarr."""
    target = descriptor_path(folder) / name
    with suppress(FileNotFoundError):
        while True:
            found = target.lstat()
            if not overwrite:
                raise OutputExists(f"output_to: {place} is there already; choose another name, or say overwrite=true.")
            if _is_store(target):
                return
            # Where another call has replaced it meanwhile, it is looked at again.
            after = target.lstat()
            if (after.st_ino, after.st_ctime_ns) == (found.st_ino, found.st_ctime_ns):
                raise BadParameter(
                    f"output_to: {place} is no folder of Zarr, and is not replaced by one; choose another name."
                )


def put(  # noqa: PLR0913
    source: Path, folder: int, name: str, mark: str, place: str, *, overwrite: bool, cancelled: Callable[[], bool]
) -> None:
    """Copy a folder into an open one, and give it its name once it is on disk.

    It holds an empty file `mark` until `settle`, by which a second call, as after a crash, recognises its own. Links
    are not followed. Raises OSError, Cancelled, BadParameter and OutputExists.
    """
    target = descriptor_path(folder)
    if is_own(folder, name, mark):
        return
    replaced = mark + _REPLACED
    if (target / replaced).exists() and not os.path.lexists(target / name):
        # Killed between two names.
        os.rename(replaced, name, src_dir_fd=folder, dst_dir_fd=folder)
    _remove(folder, mark)
    check_target(folder, name, place, overwrite=overwrite)
    _remove(folder, replaced)
    try:
        os.mkdir(mark, dir_fd=folder)
        _copy(source, folder, mark, cancelled)
        _write(folder, f"{mark}/{mark}", b"")
        while not _take_name(folder, name, mark, overwrite=overwrite):
            # Another one has it meanwhile, and what is no store has it for good.
            with _naming(folder, replaced):
                check_target(folder, name, place, overwrite=overwrite)
            _remove(folder, replaced)
        os.fsync(folder)
        _remove(folder, replaced)
    finally:
        _remove(folder, mark)


def _take_name(folder: int, name: str, mark: str, *, overwrite: bool) -> bool:
    """Give the folder `mark` its name, where it may `overwrite` in place of another. Return whether it was free."""
    replaced = mark + _REPLACED
    if overwrite:
        with suppress(FileNotFoundError):
            os.rename(name, replaced, src_dir_fd=folder, dst_dir_fd=folder)
            if not _is_store(descriptor_path(folder) / replaced):
                os.rename(replaced, name, src_dir_fd=folder, dst_dir_fd=folder)
                return False
    try:
        os.rename(mark, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        with suppress(FileNotFoundError):
            os.rename(replaced, name, src_dir_fd=folder, dst_dir_fd=folder)
        raise
    return True


def _is_store(path: Path) -> bool:
    return not path.is_symlink() and is_zarr_folder(path)


@contextmanager
def _naming(folder: int, replaced: str) -> Iterator[None]:
    """Say where a store is that was to be replaced when something else took its name."""
    try:
        yield
    except (BadParameter, OutputExists) as error:
        if not (descriptor_path(folder) / replaced).exists():
            raise
        raise type(error)(f"{error} The store that it was to replace is beside it, as {replaced}.") from None


def settle(folder: int, name: str, mark: str) -> None:
    """Take the mark from a folder that `put` has placed."""
    if is_own(folder, name, mark):
        _remove(folder, mark + _REPLACED)
        # Another one may have taken its place.
        with suppress(FileNotFoundError):
            os.unlink(f"{name}/{mark}", dir_fd=folder)


def is_own(folder: int, name: str, mark: str) -> bool:
    """Return whether `put` has placed the folder of this name, and it was not settled."""
    target = descriptor_path(folder) / name
    return not target.is_symlink() and (target / mark).is_file()


def take_back(folder: int, name: str, mark: str) -> None:
    """Delete a folder that `put` has placed, unless it was settled."""
    if is_own(folder, name, mark):
        _remove(folder, name)


def list_labels(labels: Path, folder: int, cancelled: Callable[[], bool]) -> None:
    """Add what a group of labels lists to the group that is, or is to be, in an open folder.

    Each file of metadata appears whole. Links are not followed. Raises OSError, BadFile, and Cancelled.
    """
    with _locked(folder, cancelled):
        for path in sorted(labels.iterdir()):
            if path.name in METADATA_NAMES:
                with FolderStore(partial(open_below, folder)) as store:
                    present = read_json(store, path.name)
                with translate_errors(f"labels/{path.name}"):
                    merged = _merge(present or {}, json.loads(path.read_bytes()))
                with suppress(FileNotFoundError):
                    os.unlink(f".{path.name}.part", dir_fd=folder)
                _write(folder, f".{path.name}.part", json.dumps(merged, indent=2).encode())
                os.replace(f".{path.name}.part", path.name, src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _locked(folder: int, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Hold a folder once nobody else does, as any program of the host may. Raises Cancelled."""
    while not _lock(folder):
        if cancelled():
            raise Cancelled("given up while others held the folder of its result")
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Not every file system has locks.
        return True
    return True


def _merge(present: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Return metadata of a group with the labels of another one listed, too."""
    merged = added | present
    if "labels" in added:
        return merged | {"labels": sorted({*map(str, present.get("labels", ())), *added["labels"]})}
    inner = {key: value for key, value in added.items() if isinstance(value, dict)}
    return merged | {key: _merge(present.get(key, {}), value) for key, value in inner.items()}


def _copy(source: Path, parent: int, name: str, cancelled: Callable[[], bool]) -> None:
    """Copy what is in a folder into an empty one, and write it to the disk."""
    folder = os.open(name, OPEN_FOLDER, dir_fd=parent)
    try:
        for path in source.iterdir():
            if cancelled():
                raise Cancelled("given up while its result was put in its place")
            if path.is_dir():
                os.mkdir(path.name, dir_fd=folder)
                _copy(path, folder, path.name, cancelled)
            else:
                _write(folder, path.name, path.read_bytes())
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(folder: int, name: str, content: bytes) -> None:
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    with os.fdopen(target, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(target)


def _remove(folder: int, *names: str) -> None:
    for name in names:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
