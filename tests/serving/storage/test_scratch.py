from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import OutOfStorage, RateLimited, TooLarge
from service.serving.storage.scratch import MARKER_FILE, ScratchSpace, delete_abandoned_folders, make_locked_folder


def test_only_folders_of_killed_services_are_deleted(tmp_path: Path) -> None:
    killed, running = (tmp_path / f"stackseg-{name}" for name in ("killed", "running"))
    os.close(make_locked_folder(killed))
    (killed / "requests" / "one").mkdir(parents=True)
    (killed / "requests" / "one" / "upload.tif").touch()
    lock_fd = make_locked_folder(running)
    delete_abandoned_folders(tmp_path)
    os.close(lock_fd)
    assert list(tmp_path.iterdir()) == [running]
    delete_abandoned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_other_programs_are_not_deleted(tmp_path: Path) -> None:
    unmarked, linked, other = (tmp_path / name for name in ("stackseg-results", "stackseg-linked", "other"))
    os.close(make_locked_folder(other))
    for folder in (unmarked, linked):
        folder.mkdir()
    (unmarked / "labels.tif").touch()
    (linked / MARKER_FILE).symlink_to(other / MARKER_FILE)
    (tmp_path / "stackseg-link").symlink_to(other)
    delete_abandoned_folders(tmp_path)
    assert set(tmp_path.iterdir()) == {unmarked, linked, other, tmp_path / "stackseg-link"}
    assert (unmarked / "labels.tif").exists()


def test_client_cannot_reserve_more_than_it_leaves_free() -> None:
    space = ScratchSpace(100)
    greedy, other, third = (space.make_reservation(name) for name in ("greedy", "other", "third"))
    with pytest.raises(TooLarge, match="51 bytes"):
        greedy.reserve(51)
    greedy.reserve(50)
    with pytest.raises(RateLimited, match="use 50 bytes") as raised:
        greedy.reserve(1)
    assert raised.value.retry_after > 0
    other.reserve(25)
    with pytest.raises(RateLimited):
        other.reserve(1)
    with pytest.raises(OutOfStorage):
        third.reserve(20)
    greedy.close()
    third.reserve(20)
    assert space.used_bytes == 45


def test_added_result_counts_toward_the_limit() -> None:
    space = ScratchSpace(100)
    with space.make_reservation("client") as reservation:
        reservation.reserve(40)
        reservation.add(70)
        with pytest.raises(RateLimited):
            space.make_reservation("client").reserve(1)
        reservation.add(-100)
        space.make_reservation("client").reserve(1)
    assert space.used_bytes == 1
    reservation.reserve(10)
    assert space.used_bytes == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=30))
def test_new_client_always_finds_space_and_closing_releases_all(requests: list[tuple[str, int]]) -> None:
    space, reservations = ScratchSpace(100), []
    for client, nbytes in requests:
        reservations.append(space.make_reservation(client))
        with suppress(TooLarge, RateLimited, OutOfStorage):
            reservations[-1].reserve(nbytes)
        # Three clients leave at least an eighth of the space free.
        assert space.used_bytes <= 87
    for reservation in reservations:
        reservation.close()
    assert space.used_bytes == 0
