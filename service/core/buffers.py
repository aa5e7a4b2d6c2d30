"""Allocation of large arrays: memory-mapped temporary files, and pools of reusable buffers."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from service.core.errors import OutOfStorage

Allocator = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]

# Arrays of at least this size are allocated on disk, and volumes of at least this size are read slab by slab.
LARGE_ARRAY_BYTES = 2**28

# Alignment of buffers in bytes: the size of a cache line and of the widest vector register.
ALIGNMENT_BYTES = 64


def make_allocator(folder: Path | None) -> Allocator:
    """Return a function that allocates arrays of zeros: small ones in memory, large ones in memory-mapped files.

    The files are created in `folder` (None: the system's temporary folder). The returned function raises OutOfStorage
    if the disk has too little space for the array.
    """

    def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        is_small = math.prod(shape) * np.dtype(dtype).itemsize < LARGE_ARRAY_BYTES
        return np.zeros(shape, dtype) if is_small else allocate_on_disk(shape, dtype, folder)

    return allocate


def allocate_on_disk(shape: tuple[int, ...], dtype: DTypeLike, folder: Path | None) -> NDArray[Any]:
    """Return an array of zeros in an unnamed memory-mapped file that is freed with the array.

    Raises OutOfStorage if the disk has too little space.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            # Writing to a memory-mapped file on a full disk kills the process, so reserve the space first.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise OutOfStorage(
                f"The disk for intermediate results has no space for {nbytes:,} bytes. Send a smaller stack, or try"
                " again later."
            ) from error
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), nbytes))


class BufferPool:
    """A pool of aligned buffers of one size; a buffer is reused once no array refers to it.

    `malloc` splits large freed blocks, so they are often too small for the aligned blocks that PyTorch allocates.
    Without a pool, allocating many arrays in succession would increase the memory usage of the process.

    nbytes            size of each buffer in bytes
    max_idle_buffers  maximum number of unused buffers in the pool
    cache             cache that is searched for a buffer before new memory is allocated, and that receives the unused
                      buffers when the pool is deleted
    """

    def __init__(self, nbytes: int, max_idle_buffers: int, cache: BufferCache | None = None) -> None:
        self._nbytes, self._max_idle_buffers, self._cache = nbytes, max_idle_buffers, cache
        self._idle_buffers = list[NDArray[Any]]()

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer, uint8 [nbytes], with arbitrary content. Taking and dropping buffers is thread-safe."""
        try:
            memory = self._idle_buffers.pop()
        except IndexError:
            cached_memory = None if self._cache is None else self._cache.take(self._nbytes)
            memory = _allocate_aligned(self._nbytes) if cached_memory is None else cached_memory
        return np.asarray(_BufferView(memory, self))

    def __del__(self) -> None:
        # Remove each buffer from the pool before passing it to the cache, so that it never has two owners.
        while self._cache is not None and self._idle_buffers:
            self._cache.add(self._idle_buffers.pop())

    def return_buffer(self, memory: NDArray[Any]) -> None:
        """Return a buffer to the pool. No array may refer to it."""
        if len(self._idle_buffers) < self._max_idle_buffers:
            self._idle_buffers.append(memory)


class BufferCache:
    """A cache of buffers from deleted pools, for new pools with the same buffer size.

    Consecutive requests often have the same size. Allocating new memory is slower, because the system zeroes its pages.

    max_bytes  maximum total size of the buffers; if it is exceeded, the oldest buffers are dropped first
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # There is no lock, because Python may delete a pool at any point, even in the thread that holds the lock.
        # `pop` is atomic.
        self._idle_buffers = dict[int, NDArray[Any]]()
        self._sequence_numbers = itertools.count()

    def take(self, nbytes: int) -> NDArray[Any] | None:
        """Remove and return the newest buffer of exactly this size, or return None."""
        for sequence_number, memory in reversed(self._idle_buffers.copy().items()):
            if memory.nbytes == nbytes and self._idle_buffers.pop(sequence_number, None) is not None:
                return memory
        return None

    def add(self, memory: NDArray[Any]) -> None:
        """Add a buffer that no array refers to, and drop the oldest buffers if the cache exceeds its limit."""
        if not 0 < memory.nbytes <= self._max_bytes:
            return
        self._idle_buffers[next(self._sequence_numbers)] = memory
        idle_buffers = self._idle_buffers.copy()
        total_bytes = sum(buffer.nbytes for buffer in idle_buffers.values())
        for sequence_number, oldest_buffer in idle_buffers.items():
            if total_bytes <= self._max_bytes:
                return
            self._idle_buffers.pop(sequence_number, None)
            total_bytes -= oldest_buffer.nbytes


class _BufferView:
    """Base object of all views of one buffer. It returns the buffer to the pool when the last view is deleted."""

    def __init__(self, memory: NDArray[Any], pool: BufferPool) -> None:
        self._memory, self._pool = memory, pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.return_buffer(self._memory)


def _allocate_aligned(nbytes: int) -> NDArray[Any]:
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[offset : offset + nbytes]


def release_pages(array: NDArray[Any]) -> None:
    """Evict the pages of a memory-mapped array from memory; the pages stay on disk. Do nothing for arrays in memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
