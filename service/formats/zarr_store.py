"""Files of a Zarr store by their keys: in a folder, or in a zip archive."""

from __future__ import annotations

import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol
from zipfile import BadZipFile, ZipFile

from service.core.errors import BadFile

METADATA_NAMES = frozenset((".zgroup", ".zattrs", ".zarray", "zarr.json"))

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe that lies in the place of a chunk would wait for its writer.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What a path in metadata may be made of; no part begins with a dot but the names of Zarr itself.
_PART = re.compile(r"(?!\.)[^/\\\0]{1,255}\Z")
_MOST_PARTS = 64


class StoredFile(NamedTuple):
    """An open file of a store, and its bytes."""

    file: IO[bytes]
    size: int

    def read(self, start: int, length: int) -> bytes:
        """Read a range. Raises BadFile where it does not lie within the file."""
        if not 0 <= start <= start + length <= self.size:
            raise BadFile("The Zarr store is damaged: a chunk lies outside of its file. Copy or export it again.")
        self.file.seek(start)
        parts, rest = list[bytes](), length
        while rest and (part := self.file.read(rest)):
            parts.append(part)
            rest -= len(part)
        if rest:
            raise BadFile("A file of the Zarr store is cut short. Copy or export it again.")
        return b"".join(parts)


class Store(Protocol):
    """Read-only files by keys such as `0/c/0/0/0`; safe in several threads."""

    @contextmanager
    def open(self, key: str) -> Iterator[StoredFile | None]:
        """Open a file until the end of the block; None where there is none. Raises BadFile."""


def is_zarr_folder(folder: Path) -> bool:
    """Return whether a path leads to a folder of Zarr."""
    return folder.is_dir() and any((folder / name).is_file() for name in METADATA_NAMES)


def find_image(labels: Path) -> Path | None:
    """Return the image whose labels a path such as `image.ome.zarr/labels/nuclei` is among, None for other paths."""
    image = labels.parent.parent
    return image if labels.parent.name == "labels" and is_zarr_folder(image) else None


def join(folder: str, path: str) -> str:
    """Return a path below a folder of the store, "" for the store itself. Raises BadFile where it leads elsewhere."""
    parts = [part for part in path.split("/") if part]
    if len(parts) > _MOST_PARTS or not all(_PART.match(part) for part in parts) or path.startswith("/"):
        raise BadFile(f"The Zarr store names {path[:80]!r}, which is no path within it.")
    return "/".join([*filter(None, [folder]), *parts])


def open_below(folder: int, key: str) -> int | None:
    """Open a regular file below an open folder for reading, without following links; None where there is none.

    Raises BadFile for links, folders and devices, and for keys that could lead elsewhere.
    """
    *folders, name = key.split("/")
    parts = [*folders, *([] if name in METADATA_NAMES else [name])]
    if len(parts) > _MOST_PARTS or not all(_PART.match(part) for part in parts):
        raise BadFile(f"The Zarr store names {key[:80]!r}, which is no path within it.")
    opened = os.dup(folder)
    try:
        for part in folders:
            inner = os.open(part, _OPEN_FOLDER, dir_fd=opened)
            os.close(opened)
            opened = inner
        file = os.open(name, _OPEN_FILE, dir_fd=opened)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFile(f"{key[:80]} of the Zarr store is a link, or cannot be opened ({error.strerror}).") from error
    finally:
        os.close(opened)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadFile(f"{key[:80]} of the Zarr store is a folder or a device, not a file.")
    return file


class FolderStore:
    """A folder. `open_file` returns the descriptor of the file with a key, or None, as `open_below` does."""

    def __init__(self, open_file: Callable[[str], int | None]) -> None:
        self._open_file = open_file

    @contextmanager
    def open(self, key: str) -> Iterator[StoredFile | None]:
        """Open a file until the end of the block; None where there is none. Raises BadFile."""
        descriptor = self._open_file(key)
        if descriptor is None:
            yield None
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            yield StoredFile(file, os.fstat(descriptor).st_size)


class ZipStore:
    """An archive that holds one store, at its root or in one folder. Raises BadFile where it holds several."""

    def __init__(self, stream: IO[bytes]) -> None:
        with _translate_zip_errors():
            self._archive = ZipFile(stream)
            self._sizes = {entry.filename: entry.file_size for entry in self._archive.infolist()}
        folders = {name.rpartition("/")[0] for name in self._sizes if name.rpartition("/")[2] in METADATA_NAMES}
        depth = min((folder.count("/") + bool(folder) for folder in folders), default=0)
        roots = sorted(folder for folder in folders if folder.count("/") + bool(folder) == depth)
        if len(roots) > 1:
            raise BadFile(f"The archive holds {len(roots)} Zarr stores, {roots[0]} and others; send one of them.")
        self.holds_zarr = bool(roots)
        self._prefix = f"{roots[0]}/" if roots and roots[0] else ""

    @contextmanager
    def open(self, key: str) -> Iterator[StoredFile | None]:
        """Open a file until the end of the block; None where there is none. Raises BadFile."""
        name = self._prefix + key
        if name not in self._sizes:
            yield None
            return
        with _translate_zip_errors(), self._archive.open(name) as file:
            yield StoredFile(file, self._sizes[name])


@contextmanager
def _translate_zip_errors() -> Iterator[None]:
    try:
        yield
    except (BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise BadFile(f"The archive is damaged, encrypted or of an unknown kind: {str(error)[:160]}") from error
