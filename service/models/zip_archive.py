"""Models and weights in zip archives: torch is given a copy of the members that were read."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.core import zip_archive
from service.core.zip_archive import ZipLimits

# More than any model has; a directory of that many entries with long names.
LIMITS = ZipLimits(entries=10_000, directory_bytes=2**22)
# torch compresses code only, which is small.
MAX_COMPRESSED_BYTES = 2**26


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive until the end of the block. Raise zipfile.BadZipFile as `core.zip_archive` does."""
    with path.open("rb") as file, zip_archive.open_archive(file, LIMITS) as archive:
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
