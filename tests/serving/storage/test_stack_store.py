from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.core.errors import OutOfStorage, UnknownStack
from service.serving.storage.stack_store import ENTRY_BYTES, RECORD_FILE, StackStore, StoredStack


class StoreFixture:
    """A stack store, and uploads that are added to it. `idle_seconds` is the time since the last use of a stack."""

    def __init__(self, path: Path, quota_bytes: int = 100, **limits: int) -> None:
        self._path, self._number = path, 0
        limits = {"entry_bytes": 0} | limits
        self.store = StackStore(path / "stacks", quota_bytes=quota_bytes, keep_seconds=60, **limits)

    def add_stack(self, nbytes: int, owner: str | None = None, idle_seconds: float = 0) -> StoredStack:
        self._number += 1
        folder = self._path / f"{self._number:032x}"
        folder.mkdir()
        (folder / "incoming").write_bytes(b"x" * nbytes)
        stack = self.store.add(folder / "incoming", f"{self._number}.tif", owner, "digest")
        record = stack.path.parent / RECORD_FILE
        os.utime(record, (time.time() - idle_seconds,) * 2)
        return stack

    def ids(self) -> set[str]:
        return {folder.name for folder in (self._path / "stacks").iterdir()}


def test_stack_is_found_only_by_its_owner_and_after_a_restart(tmp_path: Path) -> None:
    stack = StoreFixture(tmp_path).add_stack(10, "ann")
    store = StackStore(tmp_path / "stacks", quota_bytes=100, keep_seconds=60)
    found_stack = store.find(stack.id, "ann")
    assert (found_stack.path.read_bytes(), found_stack.name, found_stack.digest, found_stack.nbytes) == (
        b"x" * 10,
        "1.tif",
        "digest",
        10,
    )
    for owner in (None, "bob"):
        with pytest.raises(UnknownStack):
            store.find(stack.id, owner)
    store.delete(stack.id, "ann")
    with pytest.raises(UnknownStack):
        store.find(stack.id, "ann")


def test_use_extends_the_retention_of_a_stack(tmp_path: Path) -> None:
    fixture = StoreFixture(tmp_path)
    fixture.store._clock._start_time -= 60
    old_stack, used_stack = fixture.add_stack(10, idle_seconds=61), fixture.add_stack(10, idle_seconds=61)
    fixture.store.find(used_stack.id, None)
    fixture.store.clean_up()
    assert fixture.ids() == {used_stack.id}
    assert not old_stack.path.exists()


def test_least_recently_used_stack_of_the_largest_owner_is_evicted(tmp_path: Path) -> None:
    fixture = StoreFixture(tmp_path)
    small_stack, older_stack = (
        fixture.add_stack(20, "bob", idle_seconds=9),
        fixture.add_stack(30, "ann", idle_seconds=5),
    )
    newer_stack = fixture.add_stack(40, "ann", idle_seconds=3)
    new_stack = fixture.add_stack(20, "bob")
    assert fixture.ids() == {small_stack.id, newer_stack.id, new_stack.id}
    assert not older_stack.path.exists()


def test_tiny_stacks_count_with_the_disk_space_that_they_use(tmp_path: Path) -> None:
    fixture = StoreFixture(tmp_path, quota_bytes=10 * ENTRY_BYTES, entry_bytes=ENTRY_BYTES)
    for number in range(20):
        fixture.add_stack(1, "ann", idle_seconds=20 - number)
    assert len(fixture.ids()) == 9
    disk_bytes = sum(path.lstat().st_blocks * 512 for path in (tmp_path / "stacks").rglob("*"))
    assert disk_bytes <= fixture.store.nbytes <= 10 * ENTRY_BYTES


def test_owner_with_too_many_stacks_evicts_only_its_own(tmp_path: Path) -> None:
    fixture = StoreFixture(tmp_path, max_stacks=3)
    other_stack = fixture.add_stack(1, "bob", idle_seconds=100)
    stacks = [fixture.add_stack(1, "ann", idle_seconds=10 - number) for number in range(5)]
    assert fixture.ids() == {other_stack.id, *(stack.id for stack in stacks[2:])}


@pytest.mark.parametrize("nbytes", [101, 60])
def test_stack_that_does_not_fit_evicts_no_other_stacks(tmp_path: Path, nbytes: int) -> None:
    fixture = StoreFixture(tmp_path)
    stored_ids = {fixture.add_stack(50, "bob").id, fixture.add_stack(10, "ann").id}
    with pytest.raises(OutOfStorage, match="disk space for stored stacks"):
        fixture.add_stack(nbytes, "ann")
    assert fixture.ids() == stored_ids


def test_concurrent_stacks_stay_within_the_quota(tmp_path: Path) -> None:
    fixture, uploads = StoreFixture(tmp_path), list[Path]()
    for number in range(16):
        upload = tmp_path / f"{number + 100:032x}" / "incoming"
        upload.parent.mkdir()
        upload.write_bytes(b"x" * 30)
        uploads.append(upload)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda upload: fixture.store.add(upload, "a.tif", None, "digest"), uploads))
    assert len(fixture.ids()) == 3


def test_clean_up_deletes_stacks_without_a_record_and_ignores_damaged_records(
    tmp_path: Path,
) -> None:
    fixture = StoreFixture(tmp_path)
    incomplete_stack, damaged_stack, intact_stack = (fixture.add_stack(10) for _ in range(3))
    (incomplete_stack.path.parent / RECORD_FILE).unlink()
    (damaged_stack.path.parent / RECORD_FILE).write_text("[1]")
    with pytest.raises(UnknownStack):
        fixture.store.find(damaged_stack.id, None)
    fixture.store.clean_up()
    assert fixture.ids() == {damaged_stack.id, intact_stack.id}
