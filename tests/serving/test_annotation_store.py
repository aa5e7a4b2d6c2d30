from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from service.core.errors import BadParameter, OutOfStorage
from service.core.volume import Volume
from service.serving.annotation_store import AnnotationStore, Region

CELL = Volume.from_array(np.ones((1, 1, 2, 2), np.uint8))


@pytest.fixture
def store(tmp_path: Path) -> AnnotationStore:
    return AnnotationStore(tmp_path, quota_bytes=2**30, most=2)


def number(first: int, shape: tuple[int, int, int, int]) -> tuple[Volume, Volume]:
    """An image, and labels with a number of its own for every voxel."""
    labels = np.arange(first, first + np.prod(shape), dtype=np.uint32).reshape(shape)
    return Volume.from_array(np.zeros(shape, np.uint8)), Volume.from_array(labels)


def test_objects_with_large_numbers_are_counted_once(store: AnnotationStore) -> None:
    image, labels = number(2**32 - 600, (1, 2, 16, 16))
    twice = Volume.from_array(np.concatenate([labels.array(), labels.array()], axis=1))
    image = Volume.from_array(np.zeros(twice.shape, np.uint8))
    assert store.keep(image, twice, name="a", owner="ann").objects == 512
    region = Region.parse("0:1,0:16,0:16", (4, 16, 16))
    assert store.keep(image, twice, name="a", owner="ann", region=region).objects == 256


def test_a_number_for_every_voxel_takes_little_memory_and_is_refused(store: AnnotationStore, tmp_path: Path) -> None:
    image, labels = number(2**24, (1, 8, 512, 512))
    tracemalloc.start()
    try:
        with pytest.raises(BadParameter, match="from 1 on"):
            store.keep(image, labels, name="a", owner="ann")
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_keeps_so_many_and_no_more(store: AnnotationStore) -> None:
    kept = [store.keep(CELL, CELL, name="a", owner="ann") for _ in range(2)]
    with pytest.raises(OutOfStorage, match="delete some"):
        store.keep(CELL, CELL, name="a", owner="ann")
    store.keep(CELL, CELL, name="a", owner="bob")
    store.delete(kept[0].id, "ann")
    store.keep(CELL, CELL, name="a", owner="ann")
