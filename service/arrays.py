"""Arrays that are too large for memory: they lie in files without a name, which go with them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from service.errors import OutOfStorage

Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...], DTypeLike], Array]

# From here on an array lies on disk, and what is read of a volume is read slab by slab.
LARGE_BYTES = 2**28


def allocator(folder: Path | None) -> Allocate:
    """Makes arrays of zeros: small ones in memory, large ones in the folder (None: the system's temporary one).

    Raises OutOfStorage where the disk has no room for the whole of a large one.
    """

    def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return np.zeros(shape, dtype) if size < LARGE_BYTES else on_disk(shape, dtype, folder)

    return allocate


def on_disk(shape: tuple[int, ...], dtype: DTypeLike, folder: Path | None) -> Array:
    """An array of zeros in a mapped file. Raises OutOfStorage."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            # A mapped file whose disk turns out to be full ends the process; so its room is taken beforehand.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OutOfStorage(
                f"The disk for intermediate results has no room for {size:,} bytes; send less, or try again later."
            ) from error
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), size))


def release(array: Array) -> None:
    """Let memory forget the pages of an array that lies on disk, where they remain; others are left alone."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
