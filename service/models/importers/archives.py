"""Unpack zip archives without trusting the sizes and paths that they contain."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from service.core.errors import UnsupportedPackage
from service.core.files.zip_archive import ARCHIVE_ERRORS, open_torch_archive

CHUNK_BYTES = 2**20
SYSTEM_FILE_NAMES = frozenset([".DS_Store", "Thumbs.db", "desktop.ini"])


@contextmanager
def unpack(path: Path, limit_bytes: int) -> Iterator[Path]:
    """Yield the root folder of a package. An archive is unpacked into a temporary folder, which is deleted afterwards.

    Raises UnsupportedPackage if the archive is damaged or unsafe, or if more than `limit_bytes` would be written.
    """
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="stackseg-import-") as folder:
        root = Path(folder)
        try:
            with open_torch_archive(path) as archive:
                _extract(archive, root, limit_bytes)
        except (OSError, *ARCHIVE_ERRORS) as error:
            reason = getattr(error, "strerror", None) or error
            raise UnsupportedPackage(f"{path.name} cannot be unpacked: {reason}") from error
        yield _find_root(root)


def _extract(archive: zipfile.ZipFile, root: Path, limit_bytes: int) -> None:
    remaining_bytes = limit_bytes
    for entry in archive.infolist():
        if entry.is_dir() or _is_system_file(PurePosixPath(entry.filename)):
            continue
        target = root / entry.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as file:
            while chunk := source.read(CHUNK_BYTES):
                remaining_bytes -= len(chunk)
                if remaining_bytes < 0:
                    raise UnsupportedPackage(
                        f"The files in the archive contain more than {limit_bytes} bytes in total."
                    )
                file.write(chunk)


def _is_system_file(path: PurePosixPath) -> bool:
    """Return whether macOS or Windows added a file to an archive, such as the resource forks in `__MACOSX`."""
    return path.parts[0] == "__MACOSX" or path.name in SYSTEM_FILE_NAMES or path.name.startswith("._")


def _find_root(root: Path) -> Path:
    """Return the first folder that contains anything other than a single folder."""
    entries = list(root.iterdir())
    while len(entries) == 1 and entries[0].is_dir():
        root = entries[0]
        entries = list(root.iterdir())
    return root
