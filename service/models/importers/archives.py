"""Folder or zip archive -> folder, without trusting what the archive says of itself."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from service.core.errors import UnsupportedPackage

ENTRIES = 10_000
CHUNK = 2**20


@contextmanager
def unpacked(path: Path, limit_bytes: int) -> Iterator[Path]:
    """The package's root folder; an archive lies in a temporary one as long as the context lasts.

    Raises UnsupportedPackage for entries that would land elsewhere, links, and more than `limit_bytes` altogether,
    counted while they are written.
    """
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="stackseg-import-") as folder:
        root = Path(folder)
        try:
            with zipfile.ZipFile(path) as archive:
                _extract(archive, root, limit_bytes)
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
            raise UnsupportedPackage(f"{path.name}: cannot be unpacked: {error}") from error
        yield _top(root)


def _extract(archive: zipfile.ZipFile, root: Path, limit_bytes: int) -> None:
    entries = archive.infolist()
    if len(entries) > ENTRIES:
        raise UnsupportedPackage(f"The archive has {len(entries)} entries; a model needs no more than {ENTRIES}.")
    left = limit_bytes
    for entry in entries:
        place = PurePosixPath(entry.filename)
        if place.is_absolute() or ".." in place.parts or "\\" in entry.filename or (entry.external_attr >> 28) == 0xA:
            raise UnsupportedPackage(f"{entry.filename!r}: the archive wants to write outside of its own folder.")
        if entry.is_dir():
            continue
        target = root / place
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as file:
            while chunk := source.read(CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise UnsupportedPackage(f"The archive holds more than {limit_bytes} bytes.")
                file.write(chunk)


def _top(root: Path) -> Path:
    """Archives often hold one folder with everything in it."""
    inside = list(root.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else root
