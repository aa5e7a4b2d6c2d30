"""Arrays that are too large for memory, in files without a name, which go with them; and memory that is used again."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from service.core.errors import OutOfStorage
from service.core.volume import Array

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


class BufferPool:
    """Arrays of so many bytes, each in memory that an earlier one had, once nothing refers to that any more.

    What a large array leaves malloc divides among others, and torch asks it for aligned memory, for which there is
    hardly ever room where the like was freed. So a process would grow by many an array that comes after another.

    nbytes  of each; where it begins, vectors and lines of the cache do
    idle    so many wait for the next use, at most
    spare   where its memory comes from, and goes with its end
    """

    def __init__(self, nbytes: int, idle: int, spare: BufferCache | None = None) -> None:
        self._nbytes, self._most, self._spare = nbytes, idle, spare
        self._idle = list[Array]()

    def take(self) -> NDArray[np.uint8]:
        """One in which anything may stand. Any thread may take it, and let go of it."""
        try:
            memory = self._idle.pop()
        except IndexError:
            found = None if self._spare is None else self._spare.take(self._nbytes)
            memory = _aligned(self._nbytes) if found is None else found
        return np.asarray(_Loan(memory, self))

    def __del__(self) -> None:
        # One by one: whoever asks for memory after this end must not get what another pool has by then.
        while self._spare is not None and self._idle:
            self._spare.keep(self._idle.pop())

    def give_back(self, memory: Array) -> None:
        """To be called once nobody looks at it any more."""
        if len(self._idle) < self._most:
            self._idle.append(memory)


class BufferCache:
    """Memory that waits for a pool that needs arrays of its size: the next request is often like the last.

    A system hands out fresh memory in pages that it must first fill with zeros.

    nbytes  so much waits, at most; the oldest goes first
    """

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes
        # Whoever takes one out has it for himself. There is no lock, as pools end wherever Python looks for such.
        self._idle = dict[int, Array]()
        self._numbers = itertools.count()

    def take(self, nbytes: int) -> Array | None:
        """Some of exactly this size."""
        for number, memory in reversed(self._idle.copy().items()):
            if memory.nbytes == nbytes and self._idle.pop(number, None) is not None:
                return memory
        return None

    def keep(self, memory: Array) -> None:
        """To be called once nobody looks at it any more."""
        if not 0 < memory.nbytes <= self._most:
            return
        self._idle[next(self._numbers)] = memory
        idle = self._idle.copy()
        held = sum(one.nbytes for one in idle.values())
        for number, oldest in idle.items():
            if held <= self._most:
                return
            self._idle.pop(number, None)
            held -= oldest.nbytes


class _Loan:
    """What arrays refer to that are made of it, and so do all views of these; its end is theirs."""

    def __init__(self, memory: Array, pool: BufferPool) -> None:
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
