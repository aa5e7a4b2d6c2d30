"""Arrays that are too large for memory, in unnamed mapped files, and pools of memory for arrays that come and go."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from service.core.errors import OutOfStorage
from service.core.types import Array

Allocate = Callable[[tuple[int, ...], DTypeLike], Array]

# Arrays from this size on lie on disk, and volumes from this size on are read slab by slab.
LARGE_BYTES = 2**28

# Size of a cache line and of the widest vector, in bytes.
ALIGNMENT = 64


def make_allocator(folder: Path | None) -> Allocate:
    """Return a function that makes arrays of zeros: small ones in memory, large ones in mapped files.

    The files lie in `folder` (None: the system's temporary one). The function raises OutOfStorage where the disk has
    no room for the whole array.
    """

    def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        is_small = math.prod(shape) * np.dtype(dtype).itemsize < LARGE_BYTES
        return np.zeros(shape, dtype) if is_small else allocate_on_disk(shape, dtype, folder)

    return allocate


def allocate_on_disk(shape: tuple[int, ...], dtype: DTypeLike, folder: Path | None) -> Array:
    """Return an array of zeros in a mapped file without a name, which ends with the array. Raises OutOfStorage."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            # Writing to a mapped file on a full disk kills the process, so the room is reserved first.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OutOfStorage(
                f"The disk for intermediate results has no room for {size:,} bytes; send less, or try again later."
            ) from error
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), size))


class BufferPool:
    """Aligned buffers of one size; a buffer is used again once no array refers to it.

    malloc splits large freed blocks, and torch asks it for aligned ones, which then seldom fit. Without a pool the
    process grows by many arrays that follow each other.

    nbytes  size of each buffer
    idle    number of unused buffers that are kept
    cache   where buffers come from first, and where they go when the pool ends
    """

    def __init__(self, nbytes: int, idle: int, cache: BufferCache | None = None) -> None:
        self._nbytes, self._max_idle, self._cache = nbytes, idle, cache
        self._idle = list[Array]()

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer, uint8 [nbytes], with arbitrary content. Thread-safe, as is dropping the buffer."""
        try:
            memory = self._idle.pop()
        except IndexError:
            cached = None if self._cache is None else self._cache.take(self._nbytes)
            memory = _allocate_aligned(self._nbytes) if cached is None else cached
        return np.asarray(_Loan(memory, self))

    def __del__(self) -> None:
        # Each buffer leaves the pool before the cache gets it, so that no two owners ever hold the same one.
        while self._cache is not None and self._idle:
            self._cache.keep(self._idle.pop())

    def give_back(self, memory: Array) -> None:
        """Keep a buffer that no array refers to."""
        if len(self._idle) < self._max_idle:
            self._idle.append(memory)


class BufferCache:
    """Buffers of ended pools, for new pools of the same size: a request is often like the one before it.

    Fresh memory is slower, as the system fills its pages with zeros first.

    nbytes  size of all buffers together; the oldest are dropped first
    """

    def __init__(self, nbytes: int) -> None:
        self._max_bytes = nbytes
        # There is no lock, as a pool may end wherever Python collects garbage; `pop` gives a buffer to one caller only.
        self._idle = dict[int, Array]()
        self._numbers = itertools.count()

    def take(self, nbytes: int) -> Array | None:
        """Return the newest buffer of exactly this size, or None."""
        for number, memory in reversed(self._idle.copy().items()):
            if memory.nbytes == nbytes and self._idle.pop(number, None) is not None:
                return memory
        return None

    def keep(self, memory: Array) -> None:
        """Keep a buffer that no array refers to, and drop the oldest ones beyond the limit."""
        if not 0 < memory.nbytes <= self._max_bytes:
            return
        self._idle[next(self._numbers)] = memory
        idle = self._idle.copy()
        held = sum(buffer.nbytes for buffer in idle.values())
        for number, oldest in idle.items():
            if held <= self._max_bytes:
                return
            self._idle.pop(number, None)
            held -= oldest.nbytes


class _Loan:
    """Base object of the arrays made from one buffer; it is collected after the last of their views."""

    def __init__(self, memory: Array, pool: BufferPool) -> None:
        self._memory, self._pool = memory, pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


def _allocate_aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + nbytes]


def release_pages(array: Array) -> None:
    """Drop the pages of a mapped array from memory; they stay on disk. Arrays in memory are left alone."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
