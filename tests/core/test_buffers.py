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
from service.core.buffers import ALIGNMENT, BufferCache, BufferPool, allocate_on_disk, make_allocator, release_pages
from service.core.errors import OutOfStorage


def test_large_array_is_zeros_on_disk_in_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE_BYTES", 4000)
    allocate = make_allocator(tmp_path)
    small, large = allocate((999,), np.float32), allocate((10, 100), np.float32)
    assert small.base is None
    assert isinstance(large.base, mmap.mmap)
    assert not large.any()
    assert list(tmp_path.iterdir()) == []


def test_what_is_released_is_still_there(tmp_path: Path) -> None:
    for made in (allocate_on_disk((64, 4096), np.uint16, tmp_path), np.zeros((64, 4096), np.uint16)):
        made[3:5] = 7
        release_pages(made[3:5])
        release_pages(made)
        assert (made[3:5] == 7).all()
        assert made.sum() == 7 * 2 * 4096


def test_pages_of_a_released_array_leave_the_process(tmp_path: Path) -> None:
    def mapped() -> int:
        """Of this array alone: what else the process has of files is a matter of its other threads."""
        _, _, mine = Path("/proc/self/smaps").read_text().partition(str(tmp_path))
        return 1024 * int(mine.partition("\nRss:")[2].split()[0])

    made = allocate_on_disk((2**25,), np.uint8, tmp_path)
    assert mapped() == 0
    made[:] = 1
    assert mapped() > 2**24
    release_pages(made)
    assert mapped() < 2**22


def test_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfStorage, match="no room"):
        allocate_on_disk((2**50,), np.uint8, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_pool_serves_again_once_no_view_of_it_is_left() -> None:
    pool = BufferPool(1000, idle=2)
    one = pool.take()
    place, view = one.ctypes.data, one.view(np.float32)[10:20]
    view[:] = 7
    del one
    other = pool.take()
    other[:] = 1
    assert (view == 7).all()
    assert other.ctypes.data != place
    del view
    assert pool.take().ctypes.data == place


def test_arrays_of_a_pool_begin_where_lines_of_the_cache_do() -> None:
    pool = BufferPool(100, idle=0)
    buffers = [pool.take() for _ in range(20)]
    assert all(made.nbytes == 100 and made.ctypes.data % ALIGNMENT == 0 for made in buffers)
    assert len({made.ctypes.data for made in buffers}) == 20


def test_no_more_memory_waits_in_a_pool_than_it_may_keep() -> None:
    pool, kept = BufferPool(2**24, idle=1), 2**24 + ALIGNMENT
    tracemalloc.start()
    try:
        held = [pool.take() for _ in range(3)]
        assert tracemalloc.get_traced_memory()[0] > 3 * 2**24
        held.clear()
        assert 2**24 < tracemalloc.get_traced_memory()[0] < kept + 2**20
    finally:
        tracemalloc.stop()


def test_memory_of_a_pool_that_has_ended_serves_the_next_of_its_size() -> None:
    spare = BufferCache(10_000)
    one = BufferPool(1000, 2, spare).take()
    place = one.ctypes.data
    assert BufferPool(1000, 2, spare).take().ctypes.data != place, "somebody still has it"
    del one
    assert BufferPool(999, 2, spare).take().ctypes.data != place
    again = BufferPool(1000, 2, spare).take()
    assert again.ctypes.data == place
    assert BufferPool(1000, 2, spare).take().ctypes.data != place


def test_what_a_pool_has_left_behind_is_not_its_own_any_more() -> None:
    """Not even where one is asked after its end, as Python may end both what asks and what it asks."""
    spare, taken = BufferCache(10_000), list[Any]()

    class Late:
        def __init__(self, pool: BufferPool) -> None:
            self.pool, self.me = pool, self

        def __del__(self) -> None:
            taken.append(self.pool.take())

    pool = BufferPool(1000, 2, spare)
    pool.take()
    pool.late = late = Late(pool)  # type: ignore[attr-defined]
    del pool, late
    gc.collect()
    (one,) = taken
    assert BufferPool(1000, 2, spare).take().ctypes.data != one.ctypes.data


def test_no_more_is_spared_than_was_said_and_the_oldest_goes_first() -> None:
    spare, made = BufferCache(2500), [np.empty(1000, np.uint8) for _ in range(4)]
    for memory in (*made, np.empty(3000, np.uint8), np.empty(0, np.uint8)):
        spare.keep(memory)
    assert spare.take(3000) is None
    assert spare.take(0) is None
    assert [id(spare.take(1000)) for _ in range(3)] == [id(made[3]), id(made[2]), id(None)]


def test_what_several_threads_take_is_never_the_same() -> None:
    spare, made = BufferCache(2**20), [np.empty(100, np.uint8) for _ in range(1000)]
    for memory in made:
        spare.keep(memory)
    with ThreadPoolExecutor(8) as crew:
        taken = [one for one in crew.map(lambda _turn: spare.take(100), range(1100)) if one is not None]
    assert len(taken) == len({id(one) for one in taken}) == 1000
