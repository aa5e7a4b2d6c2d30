"""ZIP archives that are sent while they are being written, so that they are neither in memory nor on disk."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from typing import IO, NamedTuple
from zipfile import ZIP_DEFLATED, ZipFile

CHUNK_BYTES = 2**20
MAX_NAME_CHARS = 100
# Files of at least this size get headers with 64-bit sizes (ZIP64).
LARGE_FILE_BYTES = 2**30
# Suffixes of files that are not compressed: they are already compressed, or they are weights, which compress poorly.
UNCOMPRESSED_SUFFIXES = (".tif", ".safetensors")
# Characters that a file name cannot contain on some operating system, and control characters.
_UNSAFE_CHARACTERS = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]')
# Names of devices, which Windows does not accept as names of files.
_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)


class ArchivedFile(NamedTuple):
    """A file of an archive.

    chunks     content, which is read only when the file is written
    max_bytes  upper limit of the size of the content
    """

    path: str
    chunks: Iterable[bytes]
    max_bytes: int


class _Output:
    """A file object that collects what is written to it. It cannot seek, so that entries have data descriptors."""

    def __init__(self) -> None:
        self._content = bytearray()

    def write(self, content: bytes) -> int:
        self._content += content
        return len(content)

    def flush(self) -> None:
        """Do nothing. ZipFile requires this method."""

    def close(self) -> None:
        """Do nothing. ZipFile requires this method."""

    def take(self) -> bytes:
        """Return what was written since the last call."""
        content, self._content = bytes(self._content), bytearray()
        return content


def stream_archive(files: Iterable[ArchivedFile]) -> Generator[bytes, None, None]:
    """Yield the chunks of an archive. The files may be a generator. The paths must be unique."""
    output = _Output()
    with ZipFile(output, "w", ZIP_DEFLATED) as archive:
        for path, chunks, max_bytes in files:
            # Level 0 has the headers of compressed files, because some programs refuse stored files of unknown size.
            archive.compresslevel = 0 if path.endswith(UNCOMPRESSED_SUFFIXES) else None
            # Some programs cannot read small files with the headers of large ones.
            with archive.open(path, "w", force_zip64=max_bytes >= LARGE_FILE_BYTES) as member:
                for chunk in chunks:
                    member.write(chunk)
                    if content := output.take():
                        yield content
    yield output.take()


def read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file, and close the file."""
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def make_path_part(text: str) -> str:
    """Return a name of a file or folder that all operating systems accept, and that cannot leave its folder."""
    name = _UNSAFE_CHARACTERS.sub("_", text)[:MAX_NAME_CHARS].strip().strip(".").strip()
    return f"_{name}" if not name or _DEVICE_NAME.match(name) else name


class UniquePaths:
    """Makes the paths of an archive unique, also on file systems that ignore case."""

    def __init__(self) -> None:
        self._used_paths: set[str] = set()

    def make(self, folders: Iterable[str], stem: str, suffix: str) -> str:
        """Return a path for a file. Empty folders are omitted."""
        parts = [make_path_part(folder) for folder in folders if folder]
        safe_stem = make_path_part(stem)
        number, path = 1, "/".join([*parts, safe_stem + suffix])
        while path.casefold() in self._used_paths:
            number += 1
            path = "/".join([*parts, f"{safe_stem} ({number}){suffix}"])
        self._used_paths.add(path.casefold())
        return path
