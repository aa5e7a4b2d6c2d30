"""Read the files of a Zarr store by key, from a folder or a zip archive, and parse JSON files."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from zipfile import ZIP_STORED

from service.core.errors import BadFile
from service.core.files.atomic_files import open_subfolder
from service.core.files.zip_archive import ZipLimits, locate_stored_member, open_archive, translate_zip_errors

# Maximum size of one metadata file. Consolidated metadata of a large plate takes a few MB.
MAX_JSON_BYTES = 2**24
METADATA_NAMES = frozenset((".zgroup", ".zattrs", ".zarray", "zarr.json"))

# O_NONBLOCK: without this flag, opening a pipe with the name of a chunk would block until a writer appears.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Valid components of a path in metadata. Control characters and unpaired surrogates are not allowed. Only metadata
# files of Zarr may begin with a dot.
_PATH_COMPONENT = re.compile(r"(?!\.)[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,255}\Z")
_MAX_PATH_DEPTH = 64
# File systems allow names of up to 255 bytes. The temporary name `.NAME.part` adds six bytes.
_MAX_NAME_BYTES = 249
# Limits for zip archives. A store with more files should use shards. The comment contains the OME-Zarr version.
_ZIP_LIMITS = ZipLimits(max_entries=2**18, max_directory_bytes=2**25, allows_comment=True)


class FileRange(NamedTuple):
    """Byte range of one file in a store.

    start  first byte of the range; negative values count from the end; None selects the whole file
    size   size of the range in bytes; for a whole file, its maximum size
    """

    key: str
    size: int
    start: int | None = None


class Store(Protocol):
    """Thread-safe collection of read-only files with keys such as `0/c/0/0/0`."""

    def read(self, ranges: Sequence[FileRange]) -> list[bytes | None]:
        """Read ranges of files. The result contains None for each missing file.

        Raises BadFile if a range extends beyond the end of its file, or if a whole file exceeds its maximum size.
        """


def resolve_range(file_range: FileRange, size: int) -> tuple[int, int]:
    """Return the start and length of a range in a file of `size` bytes. Raises BadFile if it extends beyond the end."""
    if file_range.start is None:
        if size > file_range.size:
            raise BadFile(
                f"{file_range.key[:80]} in the Zarr store has {size} bytes, but at most {file_range.size} are accepted."
            )
        return 0, size
    start = file_range.start if file_range.start >= 0 else size + file_range.start
    if not 0 <= start <= start + file_range.size <= size:
        raise BadFile(
            "The Zarr store is damaged: a chunk extends beyond the end of its file. Copy or export the store again."
        )
    return start, file_range.size


def read_exactly(descriptor: int, start: int, length: int) -> bytes:
    """Read a range of an open file. Raises BadFile if the file ends before the end of the range."""
    chunks, remaining_bytes = list[bytes](), length
    while remaining_bytes and (chunk := os.pread(descriptor, remaining_bytes, start + length - remaining_bytes)):
        chunks.append(chunk)
        remaining_bytes -= len(chunk)
    if remaining_bytes:
        raise BadFile("A file in the Zarr store is truncated. Copy or export the store again.")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def is_zarr_folder(folder: Path) -> bool:
    """Return whether a path is a folder that contains a Zarr store."""
    return folder.is_dir() and any((folder / name).is_file() for name in METADATA_NAMES)


def find_labeled_image(path: Path) -> Path | None:
    """Return the image to which labels with a path such as `image.ome.zarr/labels/nuclei` belong, or None."""
    image = path.parent.parent
    return image if path.parent.name == "labels" and is_zarr_folder(image) else None


def join(folder: str, path: str) -> str:
    """Join a folder of the store ("" for the root) and a path. Raises BadFile if the result is outside the folder."""
    components = [component for component in path.split("/") if component]
    if (
        len(components) > _MAX_PATH_DEPTH
        or not all(_PATH_COMPONENT.match(component) for component in components)
        or path.startswith("/")
    ):
        raise BadFile(f"The Zarr store refers to {path[:80]!r}, which is not a path inside the store.")
    return "/".join([*filter(None, [folder]), *components])


def is_store_name(name: str) -> bool:
    """Return whether a file name is valid for a store, both with and without the suffix for incomplete stores."""
    return (
        _PATH_COMPONENT.match(name) is not None and name not in METADATA_NAMES and len(name.encode()) <= _MAX_NAME_BYTES
    )


def split_key(key: str) -> tuple[list[str], str]:
    """Split a key into folders and file name. Raises BadFile if the key could lead outside the store."""
    *folders, name = key.split("/")
    components = [*folders, *([] if name in METADATA_NAMES else [name])]
    if len(components) > _MAX_PATH_DEPTH or not all(_PATH_COMPONENT.match(component) for component in components):
        raise BadFile(f"The Zarr store refers to {key[:80]!r}, which is not a path inside the store.")
    return folders, name


def open_file(folder_fd: int, key: str) -> int | None:
    """Open a regular file in a folder for reading, without following links. Return None if it does not exist.

    Raises BadFile for links, folders and devices, and for keys that could lead outside the folder.
    """
    folders, name = split_key(key)
    try:
        with open_subfolder(folder_fd, folders) as subfolder_fd:
            file_fd = os.open(name, _OPEN_FLAGS, dir_fd=subfolder_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFile(f"{key[:80]} in the Zarr store cannot be opened, or is a link ({error.strerror}).") from error
    if not stat.S_ISREG(os.fstat(file_fd).st_mode):
        os.close(file_fd)
        raise BadFile(f"{key[:80]} in the Zarr store is a folder or a device, not a file.")
    return file_fd


@contextmanager
def translate_errors(subject: str) -> Iterator[None]:
    """Replace errors that are caused by invalid metadata with BadFile."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise BadFile(
            f"The Zarr store is damaged: {subject} is not valid ({repr(error)[:120]}). Copy or export the store again."
        ) from error


def read_json(store: Store, key: str) -> dict[str, Any] | None:
    """Read and parse a metadata file, or return None if it does not exist. Raises BadFile."""
    (json_bytes,) = store.read([FileRange(key, MAX_JSON_BYTES)])
    if json_bytes is None:
        return None
    with translate_errors(key):
        content = json.loads(json_bytes)
    if not isinstance(content, dict):
        raise BadFile(
            f"The Zarr store is damaged: {key} does not contain a JSON object. Copy or export the store again."
        )
    return content


def copy_metadata(store: Store, folder: Path) -> None:
    """Copy the metadata of the image in a store, and of the arrays of its resolutions, to an empty folder.

    Raises BadFile if the metadata is invalid.
    """
    metadata = read_json(store, "zarr.json") or {"attributes": read_json(store, ".zattrs") or {}}
    with translate_errors("its OME metadata"):
        attributes = metadata.get("attributes", {})
        multiscales = attributes.get("ome", attributes).get("multiscales") or [{}]
        datasets = [join("", dataset["path"]) for dataset in multiscales[0].get("datasets", ())]
    for path in ("", *datasets):
        for name in sorted(METADATA_NAMES):
            content = read_json(store, f"{path}/{name}" if path else name)
            if content is not None:
                (folder / path).mkdir(mode=0o700, parents=True, exist_ok=True)
                (folder / path / name).write_text(json.dumps(content), encoding="utf-8")


class FolderStore:
    """Zarr store in a folder. `open_file(key)` returns the descriptor of a file, or None if it does not exist."""

    def __init__(self, open_file: Callable[[str], int | None]) -> None:
        self._open_file = open_file

    def read(self, ranges: Sequence[FileRange]) -> list[bytes | None]:
        """Read ranges of files. The result contains None for each missing file. Raises BadFile.

        A file is opened only once for consecutive ranges, such as the chunks of a shard.
        """
        ranges_by_key = itertools.groupby(ranges, attrgetter("key"))
        return [content for key, file_ranges in ranges_by_key for content in self._read(key, list(file_ranges))]

    def _read(self, key: str, ranges: Sequence[FileRange]) -> list[bytes | None]:
        descriptor = self._open_file(key)
        if descriptor is None:
            return [None] * len(ranges)
        try:
            size = os.fstat(descriptor).st_size
            return [read_exactly(descriptor, *resolve_range(file_range, size)) for file_range in ranges]
        finally:
            os.close(descriptor)


class FetchedStore:
    """Zarr store that delegates reading to a function.

    `fetch` returns the size of each range, or -1 if the file does not exist, and the descriptor of a file that contains
    the ranges one after the other.
    """

    def __init__(self, fetch: Callable[[Sequence[FileRange]], tuple[list[int], int]]) -> None:
        self._fetch = fetch

    def read(self, ranges: Sequence[FileRange]) -> list[bytes | None]:
        """Read ranges of files. The result contains None for each missing file. Raises BadFile."""
        if not ranges:
            return []
        sizes, content = self._fetch(ranges)
        with os.fdopen(content, "rb") as file:
            file.seek(0)
            return [None if size < 0 else file.read(size) for size in sizes]


class ZipStore:
    """Zip archive that contains a store, at its root or in a folder. Raises BadFile if it contains several stores."""

    def __init__(self, stream: IO[bytes]) -> None:
        with translate_zip_errors():
            self._archive = open_archive(stream, _ZIP_LIMITS)
        self._stream = stream
        self._entries = {entry.filename: entry for entry in self._archive.infolist()}
        folders = {name.rpartition("/")[0] for name in self._entries if name.rpartition("/")[2] in METADATA_NAMES}
        depth = min((folder.count("/") + bool(folder) for folder in folders), default=0)
        roots = sorted(folder for folder in folders if folder.count("/") + bool(folder) == depth)
        if len(roots) > 1:
            raise BadFile(
                f"The archive contains {len(roots)} Zarr stores, including {roots[0]}. Upload an"
                " archive with one store."
            )
        self.has_zarr = bool(roots)
        self._prefix = f"{roots[0]}/" if roots and roots[0] else ""

    def read(self, ranges: Sequence[FileRange]) -> list[bytes | None]:
        """Read ranges of files. The result contains None for each missing file. Raises BadFile."""
        return [self._read(file_range) for file_range in ranges]

    def _read(self, file_range: FileRange) -> bytes | None:
        entry = self._entries.get(self._prefix + file_range.key)
        if entry is None:
            return None
        start, length = resolve_range(file_range, entry.file_size)
        with translate_zip_errors():
            if file_range.start is None:
                # `ZipFile.read` verifies the CRC-32.
                return self._archive.read(entry)
            if entry.compress_type == ZIP_STORED:
                descriptor = self._stream.fileno()
                return read_exactly(descriptor, locate_stored_member(descriptor, entry) + start, length)
            with self._archive.open(entry) as file:
                file.seek(start)
                return file.read(length)
