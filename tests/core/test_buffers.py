from __future__ import annotations

import gc
import mmap
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core import buffers
from service.core.buffers import (
    ALIGNMENT_BYTES,
    BufferCache,
    BufferPool,
    allocate_on_disk,
    make_allocator,
    release_pages,
)
from service.core.errors import OutOfStorage


def test_large_arrays_are_zeros_in_an_unnamed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE_ARRAY_BYTES", 4000)
    allocate = make_allocator(tmp_path)
    small, large = allocate((999,), np.float32), allocate((10, 100), np.float32)
    assert small.base is None
    assert isinstance(large.base, mmap.mmap)
    assert not large.any()
    assert list(tmp_path.iterdir()) == []


def test_releasing_pages_keeps_the_content(tmp_path: Path) -> None:
    for array in (allocate_on_disk((64, 4096), np.uint16, tmp_path), np.zeros((64, 4096), np.uint16)):
        array[3:5] = 7
        release_pages(array[3:5])
        release_pages(array)
        assert (array[3:5] == 7).all()
        assert array.sum() == 7 * 2 * 4096


def test_releasing_pages_frees_resident_memory(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        """Return the resident bytes of this array. Other threads may map other files."""
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(tmp_path))
        return 1024 * int(mapping.partition("\nRss:")[2].split()[0])

    array = allocate_on_disk((2**25,), np.uint8, tmp_path)
    assert resident_bytes() == 0
    array[:] = 1
    assert resident_bytes() > 2**24
    release_pages(array)
    assert resident_bytes() < 2**22


def test_allocation_fails_before_writing_if_the_disk_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(OutOfStorage, match="no space"):
        allocate_on_disk((2**50,), np.uint8, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_buffer_is_reused_after_its_last_view_is_deleted() -> None:
    pool = BufferPool(1000, max_idle_buffers=2)
    one = pool.take()
    address, view = one.ctypes.data, one.view(np.float32)[10:20]
    view[:] = 7
    del one
    other = pool.take()
    other[:] = 1
    assert (view == 7).all()
    assert other.ctypes.data != address
    del view
    assert pool.take().ctypes.data == address


def test_buffers_are_aligned_to_cache_lines() -> None:
    pool = BufferPool(100, max_idle_buffers=0)
    buffers = [pool.take() for _ in range(20)]
    assert all(array.nbytes == 100 and array.ctypes.data % ALIGNMENT_BYTES == 0 for array in buffers)
    assert len({array.ctypes.data for array in buffers}) == 20


def test_pool_keeps_at_most_its_number_of_idle_buffers() -> None:
    pool, kept_bytes = BufferPool(2**24, max_idle_buffers=1), 2**24 + ALIGNMENT_BYTES
    tracemalloc.start()
    try:
        held = [pool.take() for _ in range(3)]
        assert tracemalloc.get_traced_memory()[0] > 3 * 2**24
        held.clear()
        assert 2**24 < tracemalloc.get_traced_memory()[0] < kept_bytes + 2**20
    finally:
        tracemalloc.stop()


def test_cache_passes_buffers_of_a_deleted_pool_to_a_pool_of_the_same_size() -> None:
    cache = BufferCache(10_000)
    one = BufferPool(1000, 2, cache).take()
    address = one.ctypes.data
    assert BufferPool(1000, 2, cache).take().ctypes.data != address, "the first buffer is still in use"
    del one
    assert BufferPool(999, 2, cache).take().ctypes.data != address
    again = BufferPool(1000, 2, cache).take()
    assert again.ctypes.data == address
    assert BufferPool(1000, 2, cache).take().ctypes.data != address


def test_deleted_pool_does_not_share_a_buffer_with_the_cache() -> None:
    """A finalizer may use the pool after its own finalizer has run, because both are part of one reference cycle."""
    cache, taken = BufferCache(10_000), list[Any]()

    class LateUser:
        def __init__(self, pool: BufferPool) -> None:
            self.pool, self.me = pool, self

        def __del__(self) -> None:
            taken.append(self.pool.take())

    pool = BufferPool(1000, 2, cache)
    pool.take()
    pool.user = user = LateUser(pool)  # type: ignore[attr-defined]
    del pool, user
    gc.collect()
    (one,) = taken
    assert BufferPool(1000, 2, cache).take().ctypes.data != one.ctypes.data


def test_cache_drops_the_oldest_buffers_beyond_its_limit() -> None:
    cache, array = BufferCache(2500), [np.empty(1000, np.uint8) for _ in range(4)]
    for memory in (*array, np.empty(3000, np.uint8), np.empty(0, np.uint8)):
        cache.add(memory)
    assert cache.take(3000) is None
    assert cache.take(0) is None
    assert [id(cache.take(1000)) for _ in range(3)] == [id(array[3]), id(array[2]), id(None)]


def test_threads_never_take_the_same_buffer() -> None:
    cache, array = BufferCache(2**20), [np.empty(100, np.uint8) for _ in range(1000)]
    for memory in array:
        cache.add(memory)
    with ThreadPoolExecutor(8) as pool:
        taken = [one for one in pool.map(lambda _index: cache.take(100), range(1100)) if one is not None]
    assert len(taken) == len({id(one) for one in taken}) == 1000
