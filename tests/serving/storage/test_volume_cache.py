from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from service.core.errors import TooLarge
from service.core.types import Volume
from service.serving.storage.scratch import ScratchSpace
from service.serving.storage.volume_cache import ReadVolumeFunction, VolumeCache, VolumeKey


def make_read(nbytes: int, before: Callable[[], object] = lambda: None) -> ReadVolumeFunction:
    """Return a function that calls `before` and reads a volume."""

    def read(reserve: Callable[[int], None]) -> Volume:
        before()
        reserve(nbytes)
        return Volume.from_array(np.zeros((1, 1, 1, nbytes), np.uint8))

    return read


def make_key(source_id: str, selection: int = 0) -> VolumeKey:
    return VolumeKey(source_id, selection)


def test_least_recently_used_volume_is_evicted() -> None:
    cache, space, reads = VolumeCache(limit_bytes=100), ScratchSpace(10_000), list[str]()

    def open_volume(source_id: str) -> Volume:
        return cache.get_or_read(make_key(source_id), "ann", space, make_read(40, lambda: reads.append(source_id)))

    for source_id in ("a", "b", "a", "c", "a", "b"):
        open_volume(source_id)
    assert reads == ["a", "b", "c", "b"]
    assert space.used_bytes == 80
    assert cache.find(make_key("c")) is None


def test_single_volume_may_exceed_the_limit() -> None:
    cache, space = VolumeCache(limit_bytes=100), ScratchSpace(1000)
    cache.get_or_read(make_key("a"), "ann", space, make_read(50))
    large = cache.get_or_read(make_key("b"), "ann", space, make_read(300))
    assert cache.find(make_key("b")) is large
    assert cache.find(make_key("a")) is None
    assert space.used_bytes == 300


def test_client_that_opens_many_volumes_evicts_only_its_own() -> None:
    cache, space = VolumeCache(max_volumes=10, max_client_volumes=3), ScratchSpace(10_000)
    cache.get_or_read(make_key("a"), "ann", space, make_read(1))
    for selection in range(1000):
        cache.get_or_read(make_key("b", selection), "bob", space, make_read(1))
    assert cache.find(make_key("a")) is not None
    assert [number for number in range(1000) if cache.find(make_key("b", number))] == [997, 998, 999]
    assert space.used_bytes == 4


def test_number_of_volumes_is_limited() -> None:
    cache, space = VolumeCache(max_volumes=10, max_client_volumes=3), ScratchSpace(10_000)
    for client in range(100):
        cache.get_or_read(make_key(str(client)), str(client), space, make_read(1))
    assert [number for number in range(100) if cache.find(make_key(str(number)))] == list(range(90, 100))
    assert space.used_bytes == 10


def test_volumes_of_a_deleted_stack_are_evicted() -> None:
    cache, space = VolumeCache(), ScratchSpace(1000)
    for selection in range(3):
        cache.get_or_read(make_key("a", selection), "ann", space, make_read(10))
    cache.get_or_read(make_key("b"), "ann", space, make_read(10))
    cache.discard("a")
    assert [cache.find(make_key("a", selection)) for selection in range(3)] == [None] * 3
    assert cache.find(make_key("b")) is not None
    assert space.used_bytes == 10


def test_stack_that_is_deleted_while_it_is_read_is_not_cached() -> None:
    cache, space = VolumeCache(), ScratchSpace(1000)
    assert cache.get_or_read(make_key("a"), "ann", space, make_read(10, lambda: cache.discard("a"))).nbytes == 10
    assert cache.find(make_key("a")) is None
    assert space.used_bytes == 0
    # The next read of a source with the same ID is cached.
    cache.get_or_read(make_key("a"), "ann", space, make_read(10))
    assert cache.find(make_key("a")) is not None


def test_volume_that_exceeds_the_scratch_space_is_rejected() -> None:
    cache, space = VolumeCache(), ScratchSpace(100)
    for _ in range(2):
        with pytest.raises(TooLarge):
            cache.get_or_read(make_key("a"), "ann", space, make_read(51))
    assert cache.find(make_key("a")) is None
    assert space.used_bytes == 0


def test_concurrent_reads_of_a_volume_are_cached_once() -> None:
    cache, space = VolumeCache(), ScratchSpace(1000)
    nested_results = list[Volume]()

    def read_in_between() -> None:
        nested_results.append(cache.get_or_read(make_key("a"), "ann", space, make_read(40)))

    assert cache.get_or_read(make_key("a"), "ann", space, make_read(40, read_in_between)) is nested_results[0]
    assert space.used_bytes == 40


def test_space_is_reserved_before_decoding_and_released_after_errors() -> None:
    cache, space = VolumeCache(), ScratchSpace(1000)

    def read(reserve: Callable[[int], None]) -> Volume:
        reserve(100)
        assert space.used_bytes == 100
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_read(make_key("a"), "ann", space, read)
    assert space.used_bytes == 0
