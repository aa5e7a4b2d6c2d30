from __future__ import annotations

import numpy as np
import pytest

from service.core.errors import TooLarge
from service.core.types import Volume
from service.serving.storage.scratch import ScratchSpace
from service.serving.storage.volume_cache import VolumeCache


def make_volume(nbytes: int) -> Volume:
    return Volume.from_array(np.zeros((1, 1, 1, nbytes), np.uint8))


def test_least_recently_used_volume_is_evicted() -> None:
    cache, space, reads = VolumeCache(limit_bytes=100), ScratchSpace(10_000), list[str]()

    def open_volume(key: str) -> Volume:
        def read() -> Volume:
            reads.append(key)
            return make_volume(40)

        return cache.get_or_read(key, space, read)

    for key in ("a", "b", "a", "c", "a", "b"):
        open_volume(key)
    assert reads == ["a", "b", "c", "b"]
    assert space.used_bytes == 80
    assert cache.find("c") is None


def test_single_volume_may_exceed_the_limit() -> None:
    cache, space = VolumeCache(limit_bytes=100), ScratchSpace(1000)
    cache.get_or_read("a", space, lambda: make_volume(50))
    large = cache.get_or_read("b", space, lambda: make_volume(300))
    assert cache.find("b") is large
    assert cache.find("a") is None
    assert space.used_bytes == 300


def test_volume_that_exceeds_the_scratch_space_is_rejected() -> None:
    cache, space = VolumeCache(), ScratchSpace(100)
    for _ in range(2):
        with pytest.raises(TooLarge):
            cache.get_or_read("a", space, lambda: make_volume(51))
    assert cache.find("a") is None
    assert space.used_bytes == 0


def test_concurrent_reads_of_a_volume_are_cached_once() -> None:
    cache, space = VolumeCache(), ScratchSpace(1000)
    nested_results = list[Volume]()

    def read() -> Volume:
        nested_results.append(cache.get_or_read("a", space, lambda: make_volume(40)))
        return make_volume(40)

    assert cache.get_or_read("a", space, read) is nested_results[0]
    assert space.used_bytes == 40
