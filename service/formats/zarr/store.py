"""Files of a Zarr store by their keys: in a folder, or in a zip archive; and JSON among them."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from zipfile import ZIP_STORED, BadZipFile

from service.core.errors import BadFile
from service.core.files.whole_file import open_below
from service.core.files.zip_archive import ZipLimits, locate_stored, open_archive

# Of one file of metadata; consolidated metadata of a large plate have a few MB.
MAX_JSON_BYTES = 2**24
METADATA_NAMES = frozenset((".zgroup", ".zattrs", ".zarray", "zarr.json"))

# O_NONBLOCK: a pipe that lies in the place of a chunk would wait for its writer.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What a path in metadata may be made of, without control characters and halves of characters; no part begins with a
# dot but the names of Zarr itself.
_PART = re.compile(r"(?!\.)[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,255}\Z")
_MOST_PARTS = 64
# Of the 255 that file systems take, less those of `.NAME.part`.
_MOST_NAME_BYTES = 249
# A store of more files is better packed with shards. The comment of an archive of OME-Zarr tells its version.
_ZIP_LIMITS = ZipLimits(entries=2**18, directory_bytes=2**25, comment=True)


class Part(NamedTuple):
    """Bytes of one file of a store.

    start  of the part, from the end where it is negative; None for the whole file
    size   bytes of the part; of a whole file the largest number
    """

    key: str
    size: int
    start: int | None = None


class Store(Protocol):
    """Read-only files by keys such as `0/c/0/0/0`; safe in several threads."""

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """Read parts of files, None for each whose file is not there.

        Raises BadFile for a part beyond the end of its file, and for a whole file that is larger than it may be.
        """


def place_part(part: Part, size: int) -> tuple[int, int]:
    """Return start and length of a part in its file of `size` bytes. Raises BadFile where it does not lie within."""
    if part.start is None:
        if size > part.size:
            raise BadFile(f"{part.key[:80]} of the Zarr store has {size} bytes, and takes no more than {part.size}.")
        return 0, size
    start = part.start if part.start >= 0 else size + part.start
    if not 0 <= start <= start + part.size <= size:
        raise BadFile("The Zarr store is damaged: a chunk lies outside of its file. Copy or export it again.")
    return start, part.size


def read_exactly(descriptor: int, start: int, length: int) -> bytes:
    """Read a range of an open file. Raises BadFile where it ends before."""
    parts, rest = list[bytes](), length
    while rest and (part := os.pread(descriptor, rest, start + length - rest)):
        parts.append(part)
        rest -= len(part)
    if rest:
        raise BadFile("A file of the Zarr store is cut short. Copy or export it again.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


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


def is_store_name(name: str) -> bool:
    """Return whether a store may have this name beside metadata, and a longer one until it is complete."""
    return _PART.match(name) is not None and name not in METADATA_NAMES and len(name.encode()) <= _MOST_NAME_BYTES


def split_key(key: str) -> tuple[list[str], str]:
    """Return the folders and the name that a key leads over. Raises BadFile for keys that could lead elsewhere."""
    *folders, name = key.split("/")
    parts = [*folders, *([] if name in METADATA_NAMES else [name])]
    if len(parts) > _MOST_PARTS or not all(_PART.match(part) for part in parts):
        raise BadFile(f"The Zarr store names {key[:80]!r}, which is no path within it.")
    return folders, name


def open_file(folder: int, key: str) -> int | None:
    """Open a regular file below an open folder for reading, without following links; None where there is none.

    Raises BadFile for links, folders and devices, and for keys that could lead elsewhere.
    """
    folders, name = split_key(key)
    try:
        with open_below(folder, folders) as opened:
            file = os.open(name, _OPEN_FILE, dir_fd=opened)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFile(f"{key[:80]} of the Zarr store is a link, or cannot be opened ({error.strerror}).") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadFile(f"{key[:80]} of the Zarr store is a folder or a device, not a file.")
    return file


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise BadFile for metadata that are not what the specification says."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise BadFile(f"The Zarr store is damaged: {what} makes no sense ({repr(error)[:120]}).") from error


def read_json(store: Store, key: str) -> dict[str, Any] | None:
    """Read a file of metadata, None where there is none. Raises BadFile."""
    (text,) = store.read([Part(key, MAX_JSON_BYTES)])
    if text is None:
        return None
    with translate_errors(key):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise BadFile(f"The Zarr store is damaged: {key} holds no object.")
    return content


class FolderStore:
    """A folder. `open_file` returns the descriptor of the file with a key, or None, as `open_file` does."""

    def __init__(self, open_file: Callable[[str], int | None]) -> None:
        self._open_file = open_file

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """Read parts of files, None for each whose file is not there. Raises BadFile.

        A file is opened once for parts that follow each other, such as the chunks of a shard.
        """
        files = itertools.groupby(parts, attrgetter("key"))
        return [content for key, parts_of_file in files for content in self._read(key, list(parts_of_file))]

    def _read(self, key: str, parts: Sequence[Part]) -> list[bytes | None]:
        descriptor = self._open_file(key)
        if descriptor is None:
            return [None] * len(parts)
        try:
            size = os.fstat(descriptor).st_size
            return [read_exactly(descriptor, *place_part(part, size)) for part in parts]
        finally:
            os.close(descriptor)


class FetchedStore:
    """A store whose parts others fetch.

    `fetch` returns their sizes, -1 for each whose file is not there, and the descriptor of a file that holds them one
    after the other.
    """

    def __init__(self, fetch: Callable[[Sequence[Part]], tuple[list[int], int]]) -> None:
        self._fetch = fetch

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """Read parts of files, None for each whose file is not there. Raises BadFile."""
        if not parts:
            return []
        sizes, content = self._fetch(parts)
        with os.fdopen(content, "rb") as file:
            file.seek(0)
            return [None if size < 0 else file.read(size) for size in sizes]


class ZipStore:
    """An archive that holds one store, at its root or in one folder. Raises BadFile where it holds several."""

    def __init__(self, stream: IO[bytes]) -> None:
        with _translate_zip_errors():
            self._archive = open_archive(stream, _ZIP_LIMITS)
        self._stream = stream
        self._entries = {entry.filename: entry for entry in self._archive.infolist()}
        folders = {name.rpartition("/")[0] for name in self._entries if name.rpartition("/")[2] in METADATA_NAMES}
        depth = min((folder.count("/") + bool(folder) for folder in folders), default=0)
        roots = sorted(folder for folder in folders if folder.count("/") + bool(folder) == depth)
        if len(roots) > 1:
            raise BadFile(f"The archive holds {len(roots)} Zarr stores, {roots[0]} and others; send one of them.")
        self.holds_zarr = bool(roots)
        self._prefix = f"{roots[0]}/" if roots and roots[0] else ""

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """Read parts of files, None for each whose file is not there. Raises BadFile."""
        return [self._read(part) for part in parts]

    def _read(self, part: Part) -> bytes | None:
        entry = self._entries.get(self._prefix + part.key)
        if entry is None:
            return None
        start, length = place_part(part, entry.file_size)
        with _translate_zip_errors():
            if part.start is None:
                # It checks the CRC-32 of the archive.
                return self._archive.read(entry)
            if entry.compress_type == ZIP_STORED:
                descriptor = self._stream.fileno()
                return read_exactly(descriptor, locate_stored(descriptor, entry) + start, length)
            with self._archive.open(entry) as file:
                file.seek(start)
                return file.read(length)


@contextmanager
def _translate_zip_errors() -> Iterator[None]:
    try:
        yield
    except (BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise BadFile(f"The archive is damaged, encrypted or of an unknown kind: {str(error)[:160]}") from error
