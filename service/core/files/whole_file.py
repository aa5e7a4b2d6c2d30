"""A file that is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole(path: Path, partial: Path | None = None, *, sync: bool = True) -> Iterator[Path]:
    """Write a file at the path that is yielded; it gets its name after the block, and is deleted where that fails.

    Args:
        path: its name, which takes the place of another file
        partial: where it is written, in the same folder; `.NAME.part` if None, which one process writes at a time
        sync: whether the content is on disk before the file has its name, so that a loss of power leaves no empty one

    Raises OSError.
    """
    partial = path.with_name(f".{path.name}.part") if partial is None else partial
    # Others may write into the folder, too: where a link has the name, what it leads to would be replaced.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        if sync:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(*paths: Path) -> None:
    """Have files, or the names in folders, written to the disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
