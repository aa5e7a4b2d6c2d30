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
from service.serving.learning.annotation import (
    MAX_OVERLAPS,
    Annotation,
    LabelProvenance,
    NewAnnotation,
    Region,
    find_overlaps,
)
from service.serving.learning.annotations import PARTIAL_PREFIX, RECORD_FILE, AnnotationStore
from service.serving.storage.scratch import make_locked_folder

SMALL_VOLUME = Volume.from_array(np.ones((1, 1, 2, 2), np.uint8))


@pytest.fixture
def store(tmp_path: Path) -> AnnotationStore:
    return AnnotationStore(tmp_path, quota_bytes=2**30, max_stacks=2)


def make_numbered_labels(first: int, shape: tuple[int, int, int, int]) -> tuple[Volume, Volume]:
    """Return an image, and labels with a unique number for each voxel, starting from `first`."""
    labels = np.arange(first, first + np.prod(shape), dtype=np.uint32).reshape(shape)
    return Volume.from_array(np.zeros(shape, np.uint8)), Volume.from_array(labels)


def test_objects_with_large_label_numbers_are_counted_once(store: AnnotationStore) -> None:
    image, labels = make_numbered_labels(2**32 - 600, (1, 2, 16, 16))
    doubled_labels = Volume.from_array(np.concatenate([labels.read_all(), labels.read_all()], axis=1))
    image = Volume.from_array(np.zeros(doubled_labels.shape, np.uint8))
    assert store.add(image, doubled_labels, NewAnnotation(name="a", owner="ann")).objects == 512
    region = Region.parse("0:1,0:16,0:16", (4, 16, 16))
    assert store.add(image, doubled_labels, NewAnnotation(name="a", owner="ann", region=region)).objects == 256


def test_too_many_large_label_numbers_are_rejected_with_little_memory(store: AnnotationStore, tmp_path: Path) -> None:
    image, labels = make_numbered_labels(2**24, (1, 8, 512, 512))
    tracemalloc.start()
    try:
        with pytest.raises(BadParameter, match="starting from 1"):
            store.add(image, labels, NewAnnotation(name="a", owner="ann"))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_records_are_cached_until_another_process_changes_them(tmp_path: Path) -> None:
    store, other_store = (AnnotationStore(tmp_path, quota_bytes=2**30) for _ in range(2))
    first, second = (
        store.add(SMALL_VOLUME, SMALL_VOLUME, NewAnnotation(name=name, owner="ann")) for name in ("one", "two")
    )
    assert [annotation.name for annotation in store.list_newest_first("ann")] == ["two", "one"]
    record = first.folder / RECORD_FILE
    status, content = record.stat(), record.read_text()
    # A record with an unchanged inode and modification time is not read again.
    record.write_text("{")
    os.utime(record, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.list_newest_first("ann") == [second, first]
    # A record that could not be read is read again, even if its modification time is unchanged.
    assert other_store.list_newest_first("ann") == [second]
    record.write_text(content)
    os.utime(record, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert other_store.list_newest_first("ann") == [second, first]
    record.write_text(content.replace('"one"', '"three"'))
    assert [annotation.name for annotation in store.list_newest_first("ann")] == ["two", "three"]
    record.unlink()
    assert store.list_newest_first("ann") == [second]


def test_overlaps_of_thousands_of_annotations_are_found_quickly() -> None:
    fields: dict[str, Any] = {"name": "a", "owner": "ann", "shape": (1, 9, 9), "voxel_size": None, "objects": 1}
    fields |= {"digest": "", "provenance": LabelProvenance(), "nbytes": 1, "created": 0.0}
    regions = [None, *[Region((0, 1), (y, y + 1), (0, 9)) for y in range(4)]]
    stacks = [Annotation(folder=Path(f"{n:032x}"), region=regions[n % 5], **fields) for n in range(10_000)]
    start_time = time.process_time()
    overlaps = find_overlaps(stacks)
    assert time.process_time() - start_time < 1.5
    for stack in stacks[:5]:
        expected_overlaps = [
            other for other in stacks if None in {other.region, stack.region} or other.region == stack.region
        ]
        expected_overlaps.remove(stack)
        assert [other.id for other in overlaps[stack.id]] == [other.id for other in expected_overlaps[:MAX_OVERLAPS]]


def test_clean_up_deletes_only_incomplete_folders_of_killed_processes(store: AnnotationStore, tmp_path: Path) -> None:
    abandoned_folder, locked_folder = (tmp_path / f"{PARTIAL_PREFIX}{number}" for number in (1, 2))
    os.close(make_locked_folder(abandoned_folder))
    lock_fd = make_locked_folder(locked_folder)
    store.clean_up()
    assert list(tmp_path.iterdir()) == [locked_folder]
    os.close(lock_fd)
    annotation = store.add(SMALL_VOLUME, SMALL_VOLUME, NewAnnotation(name="a", owner="ann"))
    assert list(tmp_path.iterdir()) == [annotation.folder]
    assert {path.name for path in annotation.folder.iterdir()} == {"annotation.json", "image.ome.tif", "labels.ome.tif"}


@pytest.mark.parametrize("region", ["٠:١,0:2,0:2", "0:1,0:2,0:²", "0:1, 0:2,0:2", "-0:1,0:2,0:2"])  # noqa: RUF001 - digits of other scripts
def test_region_must_use_ascii_digits(region: str) -> None:
    with pytest.raises(BadParameter, match="expected z0:z1"):
        Region.parse(region, (1, 2, 2))


def test_usage_is_measured_and_the_number_of_stacks_per_owner_is_limited(
    store: AnnotationStore, tmp_path: Path
) -> None:
    assert AnnotationStore(tmp_path / "absent", quota_bytes=1).measure_usage() == (0, 0)
    annotations = [
        store.add(SMALL_VOLUME, SMALL_VOLUME, NewAnnotation(name="a", owner=owner)) for owner in ("ann", "bob", "ann")
    ]
    assert store.measure_usage() == (3, sum(annotation.nbytes for annotation in annotations))
    with pytest.raises(OutOfStorage, match="Delete some"):
        store.add(SMALL_VOLUME, SMALL_VOLUME, NewAnnotation(name="a", owner="ann"))
    store.delete(annotations[0].id, "ann")
    assert store.measure_usage() == (2, annotations[1].nbytes + annotations[2].nbytes)
    store.add(SMALL_VOLUME, SMALL_VOLUME, NewAnnotation(name="a", owner="ann"))


@pytest.mark.parametrize("limit", [0, 100, 5_000, 20_000])
def test_full_disk_at_any_point_leaves_no_files(store: AnnotationStore, tmp_path: Path, limit: int) -> None:
    rng = np.random.default_rng(0)
    image = Volume.from_array(rng.integers(0, 2**8, (1, 4, 64, 64), np.uint8))
    # The labels are twice as large as the image.
    labels = Volume.from_array(rng.integers(1, 2**16, (1, 4, 64, 64), np.uint16))
    with full_disk(limit), pytest.raises(OutOfStorage, match="disk"):
        store.add(image, labels, NewAnnotation(name="a", owner="ann"))
    assert list(tmp_path.iterdir()) == []
    assert store.add(image, labels, NewAnnotation(name="a", owner="ann")).objects > 0
