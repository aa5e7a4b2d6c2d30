from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import full_disk

from service.core.errors import BadParameter, OutOfStorage
from service.core.types import Volume
from service.serving.learning.annotation import MOST_OVERLAPS, Annotation, NewAnnotation, Origin, Region, find_overlaps
from service.serving.learning.annotations import PARTIAL_PREFIX, RECORD, AnnotationStore
from service.serving.storage.scratch import make_locked_folder

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
    assert store.keep(image, twice, NewAnnotation(name="a", owner="ann")).objects == 512
    region = Region.parse("0:1,0:16,0:16", (4, 16, 16))
    assert store.keep(image, twice, NewAnnotation(name="a", owner="ann", region=region)).objects == 256


def test_a_number_for_every_voxel_takes_little_memory_and_is_refused(store: AnnotationStore, tmp_path: Path) -> None:
    image, labels = number(2**24, (1, 8, 512, 512))
    tracemalloc.start()
    try:
        with pytest.raises(BadParameter, match="from 1 on"):
            store.keep(image, labels, NewAnnotation(name="a", owner="ann"))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_read_once_and_again_where_another_process_has_changed_it(tmp_path: Path) -> None:
    store, again = (AnnotationStore(tmp_path, quota_bytes=2**30) for _ in range(2))
    one, two = (store.keep(CELL, CELL, NewAnnotation(name=name, owner="ann")) for name in ("one", "two"))
    assert [kept.name for kept in store.newest("ann")] == ["two", "one"]
    record = one.folder / RECORD
    status, text = record.stat(), record.read_text()
    # What has the time and the place of a record that was read is that record.
    record.write_text("{")
    os.utime(record, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.newest("ann") == [two, one]
    # One that could not be read for a moment is read again.
    assert again.newest("ann") == [two]
    record.write_text(text)
    os.utime(record, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert again.newest("ann") == [two, one]
    record.write_text(text.replace('"one"', '"three"'))
    assert [kept.name for kept in store.newest("ann")] == ["two", "three"]
    record.unlink()
    assert store.newest("ann") == [two]


def test_thousands_of_annotated_stacks_of_one_image_are_compared_in_a_moment() -> None:
    facts: dict[str, Any] = {"name": "a", "owner": "ann", "shape": (1, 9, 9), "voxel_size": None, "objects": 1}
    facts |= {"digest": "", "origin": Origin(), "nbytes": 1, "created": 0.0}
    regions = [None, *[Region((0, 1), (y, y + 1), (0, 9)) for y in range(4)]]
    stacks = [Annotation(folder=Path(f"{n:032x}"), region=regions[n % 5], **facts) for n in range(10_000)]
    began = time.process_time()
    found = find_overlaps(stacks)
    assert time.process_time() - began < 1.5
    for stack in stacks[:5]:
        alike = [each for each in stacks if None in {each.region, stack.region} or each.region == stack.region]
        alike.remove(stack)
        assert [each.id for each in found[stack.id]] == [each.id for each in alike[:MOST_OVERLAPS]]


def test_what_a_killed_process_has_written_by_half_goes_and_what_others_write_stays(
    store: AnnotationStore, tmp_path: Path
) -> None:
    killed, others = (tmp_path / f"{PARTIAL_PREFIX}{number}" for number in (1, 2))
    os.close(make_locked_folder(killed))
    lock = make_locked_folder(others)
    store.clean_up()
    assert list(tmp_path.iterdir()) == [others]
    os.close(lock)
    kept = store.keep(CELL, CELL, NewAnnotation(name="a", owner="ann"))
    assert list(tmp_path.iterdir()) == [kept.folder]
    assert {path.name for path in kept.folder.iterdir()} == {"annotation.json", "image.ome.tif", "labels.ome.tif"}


@pytest.mark.parametrize("region", ["٠:١,0:2,0:2", "0:1,0:2,0:²", "0:1, 0:2,0:2", "-0:1,0:2,0:2"])  # noqa: RUF001 - digits of other scripts
def test_a_region_is_stated_in_plain_digits(region: str) -> None:
    with pytest.raises(BadParameter, match="is expected"):
        Region.parse(region, (1, 2, 2))


def test_what_all_owners_keep_is_measured_and_each_keeps_so_many_and_no_more(
    store: AnnotationStore, tmp_path: Path
) -> None:
    assert AnnotationStore(tmp_path / "absent", quota_bytes=1).measure() == (0, 0)
    kept = [store.keep(CELL, CELL, NewAnnotation(name="a", owner=owner)) for owner in ("ann", "bob", "ann")]
    assert store.measure() == (3, sum(one.nbytes for one in kept))
    with pytest.raises(OutOfStorage, match="delete some"):
        store.keep(CELL, CELL, NewAnnotation(name="a", owner="ann"))
    store.delete(kept[0].id, "ann")
    assert store.measure() == (2, kept[1].nbytes + kept[2].nbytes)
    store.keep(CELL, CELL, NewAnnotation(name="a", owner="ann"))


@pytest.mark.parametrize("limit", [0, 100, 5_000, 20_000])
def test_a_full_disk_leaves_nothing_wherever_it_is_met(store: AnnotationStore, tmp_path: Path, limit: int) -> None:
    rng = np.random.default_rng(0)
    image = Volume.from_array(rng.integers(0, 2**8, (1, 4, 64, 64), np.uint8))
    # Twice as many bytes as the image.
    labels = Volume.from_array(rng.integers(1, 2**16, (1, 4, 64, 64), np.uint16))
    with full_disk(limit), pytest.raises(OutOfStorage, match="disk"):
        store.keep(image, labels, NewAnnotation(name="a", owner="ann"))
    assert list(tmp_path.iterdir()) == []
    assert store.keep(image, labels, NewAnnotation(name="a", owner="ann")).objects > 0
