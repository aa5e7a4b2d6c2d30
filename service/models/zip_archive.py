"""Zip archives that all readers understand alike, so that what is checked is what is loaded.

Readers disagree about archives with two directories, with bytes before, between or behind the members, and with names
that differ in case only. Such archives are refused, and torch is given a copy of the members that were read.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

MAX_ENTRIES = 10_000
MAX_DEPTH = 32
# A directory of that many entries with long names; each entry becomes an object of some 500 bytes.
MAX_DIRECTORY_BYTES = 2**22
# torch compresses code only, which is small.
MAX_COMPRESSED_BYTES = 2**26

HEADER_BYTES, END_BYTES, LOCATOR_BYTES, END64_BYTES = 30, 22, 20, 56
HAS_DESCRIPTOR, ENCRYPTED = 8, 1


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive that consists of its members, one after the other, and their directory, and of nothing else.

    Raise zipfile.BadZipFile, naming what is refused: another layout, more members than a model has, members that are
    encrypted, links or devices, that would be written outside of a folder, or whose names differ in case only.
    """
    with path.open("rb") as file:
        start = _find_directory(file)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_ENTRIES:
                raise zipfile.BadZipFile(f"it has {len(entries)} entries; a model needs no more than {MAX_ENTRIES}.")
            for entry in entries:
                _check_entry(entry)
            if len({entry.filename.lower() for entry in entries}) < len(entries):
                raise zipfile.BadZipFile("several of its entries have the same name.")
            _check_layout(file, sorted(entries, key=lambda entry: entry.header_offset), start)
            yield archive


def copy_members(archive: zipfile.ZipFile) -> io.BytesIO:
    """Return an archive of the same members, not compressed. Raise zipfile.BadZipFile where they unpack to too much."""
    _check_compressed(archive)
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as other:
        for entry in archive.infolist():
            other.writestr(entry.filename, archive.read(entry))
    copy.seek(0)
    return copy


def _check_compressed(archive: zipfile.ZipFile) -> None:
    """Raise zipfile.BadZipFile where members unpack to more than the code of a network takes.

    No member unpacks to more than it states.
    """
    compressed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if sum(entry.file_size for entry in compressed) > MAX_COMPRESSED_BYTES:
        largest = max(compressed, key=lambda entry: entry.file_size)
        raise zipfile.BadZipFile(f"{largest.filename} is compressed, which torch does with code only.")


def _find_directory(file: BinaryIO) -> int:
    """Return where the directory starts that ends the file. Raise zipfile.BadZipFile where none does."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - END_BYTES - LOCATOR_BYTES - END64_BYTES))
    tail = file.read()
    if tail[-END_BYTES:][:4] != b"PK\5\6" or tail[-2:] != bytes(2):
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
    if length > MAX_DIRECTORY_BYTES:
        raise zipfile.BadZipFile(f"its directory is longer than {MAX_DIRECTORY_BYTES} bytes.")
    return int(start)


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path, kind = PurePosixPath(entry.filename), stat.S_IFMT(entry.external_attr >> 16)
    escapes = path.is_absolute() or ".." in path.parts or "\\" in entry.orig_filename or "\0" in entry.orig_filename
    if escapes or kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise zipfile.BadZipFile(f"{entry.orig_filename!r}: the archive wants to write outside of its own folder.")
    if len(path.parts) > MAX_DEPTH:
        raise zipfile.BadZipFile(f"{entry.filename[:80]!r}...: lies more than {MAX_DEPTH} folders deep.")
    if entry.flag_bits & ENCRYPTED or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise zipfile.BadZipFile(f"{entry.filename!r}: is encrypted, or compressed by another method than deflate.")
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
        raise zipfile.BadZipFile(f"{entry.filename!r}: is not compressed, and states two sizes.")


def _check_layout(file: BinaryIO, entries: list[zipfile.ZipInfo], start: int) -> None:
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
