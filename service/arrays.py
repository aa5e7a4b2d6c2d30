"""Arrays that are too large for memory, in files without a name, which go with them; and memory that is used again."""

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

# A line of the cache, and the widest vector.
ALIGNMENT = 64


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


class Pool:
    """Arrays of so many bytes, each in memory that an earlier one had, once nothing refers to that any more.

    What a large array leaves malloc divides among others, and torch asks it for aligned memory, for which there is
    hardly ever room where the like was freed. So a process would grow by many an array that comes after another.

    nbytes  of each; where it begins, vectors and lines of the cache do
    idle    so many wait for the next use, at most
    """

    def __init__(self, nbytes: int, idle: int) -> None:
        self._nbytes, self._most = nbytes, idle
        self._idle = list[Array]()

    def take(self) -> NDArray[np.uint8]:
        """One in which anything may stand. Any thread may take it, and let go of it."""
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = _aligned(self._nbytes)
        return np.asarray(_Loan(memory, self))

    def give_back(self, memory: Array) -> None:
        """To be called once nobody looks at it any more."""
        if len(self._idle) < self._most:
            self._idle.append(memory)


class _Loan:
    """What arrays refer to that are made of it, and so do all views of these; its end is theirs."""

    def __init__(self, memory: Array, pool: Pool) -> None:
        self._memory, self._pool = memory, pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


def _aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + nbytes]


def release(array: Array) -> None:
    """Let memory forget the pages of an array that lies on disk, where they remain; others are left alone."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
