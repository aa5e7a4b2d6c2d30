"""Strict validation of zip archives, so that every zip reader finds the same members in an accepted archive.

Zip readers disagree about archives that have two central directories, bytes before, between or after the members, or
names that differ only in case. Such archives are rejected.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from service.core.errors import BadFile

# Maximum nesting depth of an entry.
MAX_DEPTH = 32
# Maximum total size of the compressed members after decompression. PyTorch compresses only code, which is small.
MAX_DECOMPRESSED_BYTES = 2**26

# Sizes of the records of the zip format, excluding names, extra fields and comments.
LOCAL_HEADER_BYTES = 30
END_RECORD_BYTES = 22
ZIP64_LOCATOR_BYTES = 20
ZIP64_END_RECORD_BYTES = 56
# Flag bits of an entry.
DESCRIPTOR_FLAG = 8
ENCRYPTION_FLAG = 1
_MAX_COMMENT_BYTES = 2**16 - 1
# Errors that a damaged archive or member causes when it is opened or read.
ARCHIVE_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error)


class ZipLimits(NamedTuple):
    """Limits on archives of one kind.

    max_entries          maximum number of entries (members and folders); each takes about 500 bytes of memory
    max_directory_bytes  maximum size of the central directory, which lists all entries with their names
    allows_comment       whether a comment may follow the central directory
    """

    max_entries: int
    max_directory_bytes: int
    allows_comment: bool = False


# Limits for PyTorch archives. No known model exceeds them, even if all names are long.
TORCH_LIMITS = ZipLimits(max_entries=10_000, max_directory_bytes=2**22)


def open_archive(file: IO[bytes], limits: ZipLimits) -> zipfile.ZipFile:
    """Open an archive that consists only of contiguous members followed by the central directory.

    Raises zipfile.BadZipFile, with the reason, for any other layout; for archives that exceed the limits; for members
    that are encrypted, that are links or devices, or that would be extracted outside the target folder; and for names
    that differ only in case.
    """
    directory_start = _find_directory(file, limits)
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if len(entries) > limits.max_entries:
        raise zipfile.BadZipFile(f"the archive has {len(entries)} entries; the maximum is {limits.max_entries}.")
    for entry in entries:
        _check_entry(entry)
    if len({entry.filename.lower() for entry in entries}) < len(entries):
        raise zipfile.BadZipFile("several entries have the same name, ignoring case.")
    _check_layout(file, sorted(entries, key=lambda entry: entry.header_offset), directory_start)
    return archive


@contextmanager
def translate_zip_errors() -> Iterator[None]:
    """Translate the errors that a damaged archive causes to BadFile."""
    try:
        yield
    except ARCHIVE_ERRORS as error:
        raise BadFile(f"The archive is damaged, encrypted or not supported: {str(error)[:160]}") from error


@contextmanager
def open_torch_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive of a model or its weights for the duration of the block. Raises zipfile.BadZipFile."""
    with path.open("rb") as file, open_archive(file, TORCH_LIMITS) as archive:
        yield archive


def copy_members(archive: zipfile.ZipFile) -> io.BytesIO:
    """Return an uncompressed archive with the same members, so that PyTorch reads the bytes that have been validated.

    Raises zipfile.BadZipFile if the compressed members exceed `MAX_DECOMPRESSED_BYTES`.
    """
    _check_decompressed_size(archive)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as copied_archive:
        for entry in archive.infolist():
            copied_archive.writestr(entry.filename, archive.read(entry))
    buffer.seek(0)
    return buffer


def _check_decompressed_size(archive: zipfile.ZipFile) -> None:
    """Raise zipfile.BadZipFile if compressed members are too large. No decompressed member exceeds its `file_size`."""
    compressed_entries = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if sum(entry.file_size for entry in compressed_entries) > MAX_DECOMPRESSED_BYTES:
        largest_entry = max(compressed_entries, key=lambda entry: entry.file_size)
        raise zipfile.BadZipFile(
            f"{largest_entry.filename} is compressed and too large; PyTorch compresses only the code of a network."
        )


def add_file(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    """Add a file without its modification time and mode, so that archives with the same content are equal."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    # Sizes of more than 4 GiB require a different header.
    entry.file_size = path.stat().st_size
    with path.open("rb") as source, archive.open(entry, "w") as member:
        shutil.copyfileobj(source, member, 2**20)


def locate_stored_member(descriptor: int, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an uncompressed member's content in a validated archive.

    The file position does not change, so other threads may read the same file concurrently.
    """
    name_bytes, extra_bytes = struct.unpack("<HH", os.pread(descriptor, LOCAL_HEADER_BYTES, entry.header_offset)[-4:])
    return int(entry.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


def _find_directory(file: IO[bytes], limits: ZipLimits) -> int:
    """Return the offset of the central directory at the end of the file. Raises zipfile.BadZipFile."""
    size = file.seek(0, io.SEEK_END)
    comment_bytes = _measure_comment(file, size) if limits.allows_comment else 0
    size -= comment_bytes
    file.seek(max(0, size - END_RECORD_BYTES - ZIP64_LOCATOR_BYTES - ZIP64_END_RECORD_BYTES))
    tail = file.read(min(size, END_RECORD_BYTES + ZIP64_LOCATOR_BYTES + ZIP64_END_RECORD_BYTES))
    if tail[-END_RECORD_BYTES:][:4] != b"PK\5\6" or tail[-2:] != struct.pack("<H", comment_bytes):
        raise zipfile.BadZipFile("the file is not a zip archive, or has content after its central directory.")
    directory_bytes, directory_start = struct.unpack("<LL", tail[-10:-2])
    directory_end = size - END_RECORD_BYTES
    if tail[-END_RECORD_BYTES - ZIP64_LOCATOR_BYTES :][:4] == b"PK\6\7":
        directory_end -= ZIP64_LOCATOR_BYTES + ZIP64_END_RECORD_BYTES
        (end_record_offset,) = struct.unpack("<Q", tail[-34:-26])
        if tail[:4] != b"PK\6\6" or end_record_offset != directory_end:
            raise zipfile.BadZipFile("the position of the central directory is ambiguous.")
        directory_bytes, directory_start = struct.unpack("<QQ", tail[40:56])
    if directory_start + directory_bytes != directory_end:
        raise zipfile.BadZipFile("there are extra bytes before or after the archive.")
    if directory_bytes > limits.max_directory_bytes:
        raise zipfile.BadZipFile(f"the central directory is larger than {limits.max_directory_bytes} bytes.")
    return int(directory_start)


def _measure_comment(file: IO[bytes], size: int) -> int:
    """Return the size of the comment after the last end-of-central-directory record; 0 if there is no such record."""
    file.seek(max(0, size - END_RECORD_BYTES - _MAX_COMMENT_BYTES))
    tail = file.read()
    offset = tail.rfind(b"PK\5\6")
    return max(0, len(tail) - offset - END_RECORD_BYTES) if offset >= 0 else 0


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename)
    if "\\" in entry.orig_filename:
        raise zipfile.BadZipFile(
            f"the name {entry.orig_filename[:40]!r} has backslashes instead of slashes. Pack the folder with another"
            " program, such as 7-Zip."
        )
    if _is_unsafe(entry, path):
        raise zipfile.BadZipFile(
            f"{entry.orig_filename!r} would be extracted outside the target folder, or is a link or a device."
        )
    if len(path.parts) > MAX_DEPTH:
        raise zipfile.BadZipFile(f"{entry.filename[:80]!r}... is nested more than {MAX_DEPTH} folders deep.")
    if entry.flag_bits & ENCRYPTION_FLAG or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise zipfile.BadZipFile(f"{entry.filename!r} is encrypted, or uses a compression method other than deflate.")
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
        raise zipfile.BadZipFile(f"{entry.filename!r} is not compressed, but specifies two different sizes.")


def _is_unsafe(entry: zipfile.ZipInfo, path: PurePosixPath) -> bool:
    """Return whether an entry would be extracted outside the target folder, or is a link or a device."""
    file_type = stat.S_IFMT(entry.external_attr >> 16)
    is_outside = path.is_absolute() or ".." in path.parts or "\0" in entry.orig_filename
    return is_outside or file_type not in {0, stat.S_IFREG, stat.S_IFDIR}


def _check_layout(file: IO[bytes], entries: list[zipfile.ZipInfo], directory_start: int) -> None:
    """Raise zipfile.BadZipFile if the entries, sorted by offset, overlap or have gaps around them."""
    position = 0
    ends = [*(entry.header_offset for entry in entries[1:]), directory_start]
    for entry, end in zip(entries, ends, strict=True):
        file.seek(position)
        header = file.read(LOCAL_HEADER_BYTES)
        if entry.header_offset != position or len(header) < LOCAL_HEADER_BYTES:
            raise zipfile.BadZipFile("there are extra bytes before the first entry.")
        position += LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[-4:])) + entry.compress_size
        file.seek(position)
        has_descriptor = (
            entry.flag_bits & DESCRIPTOR_FLAG and end - position in {16, 24} and file.read(4) == b"PK\7\x08"
        )
        if position != end and not has_descriptor:
            raise zipfile.BadZipFile(
                f"{entry.filename!r} overlaps the next entry, or there are extra bytes between them."
            )
        position = end
    if position != directory_start:
        raise zipfile.BadZipFile("there are extra bytes before the central directory.")
