from __future__ import annotations

import numpy as np
import pytest

from service.core.errors import TooLarge
from service.core.types import Volume
from service.serving.storage.scratch import ScratchSpace
from service.serving.storage.volume_cache import VolumeCache


def volume(nbytes: int) -> Volume:
    return Volume.from_array(np.zeros((1, 1, 1, nbytes), np.uint8))


def test_volumes_are_read_once_and_the_least_recently_used_goes() -> None:
    cache, space, reads = VolumeCache(limit_bytes=100), ScratchSpace(10_000), list[str]()

    def open_volume(key: str) -> Volume:
        def read() -> Volume:
            reads.append(key)
            return volume(40)

        return cache.open(key, space, read)

    for key in ("a", "b", "a", "c", "a", "b"):
        open_volume(key)
    assert reads == ["a", "b", "c", "b"]
    assert space.used == 80
    assert cache.find("c") is None


def test_one_volume_may_be_larger_than_the_cache() -> None:
    cache, space = VolumeCache(limit_bytes=100), ScratchSpace(1000)
    cache.open("a", space, lambda: volume(50))
    large = cache.open("b", space, lambda: volume(300))
    assert cache.find("b") is large
    assert cache.find("a") is None
    assert space.used == 300


def test_a_volume_beyond_the_scratch_space_is_refused_each_time() -> None:
    cache, space = VolumeCache(), ScratchSpace(100)
    for _ in range(2):
        with pytest.raises(TooLarge):
            cache.open("a", space, lambda: volume(51))
    assert cache.find("a") is None
    assert space.used == 0


def test_a_volume_that_was_read_twice_is_kept_once() -> None:
    cache, space = VolumeCache(), ScratchSpace(1000)
    inner = list[Volume]()

    def read() -> Volume:
        inner.append(cache.open("a", space, lambda: volume(40)))
        return volume(40)

    assert cache.open("a", space, read) is inner[0]
    assert space.used == 40
