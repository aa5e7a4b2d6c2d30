"""Zip archives that all readers understand alike, so that what is checked is what is loaded.

Readers disagree about archives with two directories, with bytes before, between or behind the members, and with names
that differ in case only. Such archives are refused.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

MAX_DEPTH = 32
# torch compresses code only, which is small.
MAX_COMPRESSED_BYTES = 2**26

HEADER_BYTES, END_BYTES, LOCATOR_BYTES, END64_BYTES = 30, 22, 20, 56
HAS_DESCRIPTOR, ENCRYPTED = 8, 1
_MOST_COMMENT_BYTES = 2**16 - 1


class ZipLimits(NamedTuple):
    """Limits and demands on archives of one kind.

    entries          members and folders; each becomes an object of some 500 bytes
    directory_bytes  of the list of all entries, with their names
    comment          whether text may follow the directory
    """

    entries: int
    directory_bytes: int
    comment: bool = False


# More members than any model has; the directory has room for that many long names.
TORCH_LIMITS = ZipLimits(entries=10_000, directory_bytes=2**22)


def open_archive(file: IO[bytes], limits: ZipLimits) -> zipfile.ZipFile:
    """Open an archive that consists of its members, one after the other, and their directory, and of nothing else.

    Raise zipfile.BadZipFile, naming what is refused: another layout, more than the limits, members that are encrypted,
    links or devices, that would be written outside of a folder, or whose names differ in case only.
    """
    start = _find_directory(file, limits)
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if len(entries) > limits.entries:
        raise zipfile.BadZipFile(f"it has {len(entries)} entries; no more than {limits.entries} are read.")
    for entry in entries:
        _check_entry(entry)
    if len({entry.filename.lower() for entry in entries}) < len(entries):
        raise zipfile.BadZipFile("several of its entries have the same name.")
    _check_layout(file, sorted(entries, key=lambda entry: entry.header_offset), start)
    return archive


@contextmanager
def open_torch_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive of a model or its weights until the end of the block. Raise zipfile.BadZipFile."""
    with path.open("rb") as file, open_archive(file, TORCH_LIMITS) as archive:
        yield archive


def copy_members(archive: zipfile.ZipFile) -> io.BytesIO:
    """Return an archive of the same members, not compressed, so that torch reads the bytes that were checked.

    Raise zipfile.BadZipFile where compressed members are larger than the code of a network.
    """
    _check_compressed(archive)
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as other:
        for entry in archive.infolist():
            other.writestr(entry.filename, archive.read(entry))
    copy.seek(0)
    return copy


def _check_compressed(archive: zipfile.ZipFile) -> None:
    """Raise zipfile.BadZipFile where compressed members are too large. No member unpacks to more than it states."""
    compressed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if sum(entry.file_size for entry in compressed) > MAX_COMPRESSED_BYTES:
        largest = max(compressed, key=lambda entry: entry.file_size)
        raise zipfile.BadZipFile(f"{largest.filename} is compressed, which torch does with code only.")


def locate_stored(descriptor: int, entry: zipfile.ZipInfo) -> int:
    """Return where the bytes of a member begin that is not compressed, in an archive that was opened here.

    Other threads may read the same file meanwhile, whose position stays as it is.
    """
    name, extra = struct.unpack("<HH", os.pread(descriptor, HEADER_BYTES, entry.header_offset)[-4:])
    return int(entry.header_offset + HEADER_BYTES + name + extra)


def _find_directory(file: IO[bytes], limits: ZipLimits) -> int:
    """Return where the directory starts that ends the file. Raise zipfile.BadZipFile where none does."""
    size = file.seek(0, io.SEEK_END)
    comment_bytes = _measure_comment(file, size) if limits.comment else 0
    size -= comment_bytes
    file.seek(max(0, size - END_BYTES - LOCATOR_BYTES - END64_BYTES))
    tail = file.read(min(size, END_BYTES + LOCATOR_BYTES + END64_BYTES))
    if tail[-END_BYTES:][:4] != b"PK\5\6" or tail[-2:] != struct.pack("<H", comment_bytes):
        raise zipfile.BadZipFile("it is no zip archive that ends with its directory.")
    length, start = struct.unpack("<LL", tail[-10:-2])
    end = size - END_BYTES
    if tail[-END_BYTES - LOCATOR_BYTES :][:4] == b"PK\6\7":
        end -= LOCATOR_BYTES + END64_BYTES
        (place,) = struct.unpack("<Q", tail[-34:-26])
        if tail[:4] != b"PK\6\6" or place != end:
            raise zipfile.BadZipFile("its directory is ambiguous.")
        length, start = struct.unpack("<QQ", tail[40:56])
    if start + length != end:
        raise zipfile.BadZipFile("something lies before or behind the archive.")
    if length > limits.directory_bytes:
        raise zipfile.BadZipFile(f"its directory is longer than {limits.directory_bytes} bytes.")
    return int(start)


def _measure_comment(file: IO[bytes], size: int) -> int:
    """Return the bytes behind the last record that may end a directory, 0 where there is none."""
    file.seek(max(0, size - END_BYTES - _MOST_COMMENT_BYTES))
    tail = file.read()
    place = tail.rfind(b"PK\5\6")
    return max(0, len(tail) - place - END_BYTES) if place >= 0 else 0


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename)
    if _escapes(entry, path):
        raise zipfile.BadZipFile(f"{entry.orig_filename!r}: the archive wants to write outside of its own folder.")
    if len(path.parts) > MAX_DEPTH:
        raise zipfile.BadZipFile(f"{entry.filename[:80]!r}...: lies more than {MAX_DEPTH} folders deep.")
    if entry.flag_bits & ENCRYPTED or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise zipfile.BadZipFile(f"{entry.filename!r}: is encrypted, or compressed by another method than deflate.")
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
        raise zipfile.BadZipFile(f"{entry.filename!r}: is not compressed, and states two sizes.")


def _escapes(entry: zipfile.ZipInfo, path: PurePosixPath) -> bool:
    """Return whether an entry would be written outside of a folder, or is a link or a device."""
    kind = stat.S_IFMT(entry.external_attr >> 16)
    escapes = path.is_absolute() or ".." in path.parts or "\\" in entry.orig_filename or "\0" in entry.orig_filename
    return escapes or kind not in {0, stat.S_IFREG, stat.S_IFDIR}


def _check_layout(file: IO[bytes], entries: list[zipfile.ZipInfo], start: int) -> None:
    """Raise zipfile.BadZipFile where entries, in the order of the file, overlap or leave room up to the directory."""
    position = 0
    ends = [*(entry.header_offset for entry in entries[1:]), start]
    for entry, end in zip(entries, ends, strict=True):
        file.seek(position)
        header = file.read(HEADER_BYTES)
        if entry.header_offset != position or len(header) < HEADER_BYTES:
            raise zipfile.BadZipFile("something lies before its first entry.")
        position += HEADER_BYTES + sum(struct.unpack("<HH", header[-4:])) + entry.compress_size
        file.seek(position)
        described = entry.flag_bits & HAS_DESCRIPTOR and end - position in {16, 24} and file.read(4) == b"PK\7\x08"
        if position != end and not described:
            raise zipfile.BadZipFile(f"{entry.filename!r}: overlaps with the next entry, or something lies between.")
        position = end
    if position != start:
        raise zipfile.BadZipFile("something lies before its directory.")
