from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import OutOfStorage, RateLimited, TooLarge
from service.serving.storage.scratch import MARKER, ScratchSpace, make_locked_folder, sweep


def test_folders_of_killed_services_are_swept_and_those_of_living_ones_spared(tmp_path: Path) -> None:
    dead, living = (tmp_path / f"stackseg-{name}" for name in ("dead", "living"))
    os.close(make_locked_folder(dead))
    (dead / "requests" / "one").mkdir(parents=True)
    (dead / "requests" / "one" / "upload.tif").touch()
    lock = make_locked_folder(living)
    sweep(tmp_path)
    os.close(lock)
    assert list(tmp_path.iterdir()) == [living]
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_are_left_alone_whatever_their_name(tmp_path: Path) -> None:
    mine, linked, other = (tmp_path / name for name in ("stackseg-results", "stackseg-linked", "other"))
    os.close(make_locked_folder(other))
    for folder in (mine, linked):
        folder.mkdir()
    (mine / "labels.tif").touch()
    (linked / MARKER).symlink_to(other / MARKER)
    (tmp_path / "stackseg-link").symlink_to(other)
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, linked, other, tmp_path / "stackseg-link"}
    assert (mine / "labels.tif").exists()


def test_a_client_holds_no_more_than_it_leaves_free() -> None:
    space = ScratchSpace(100)
    greedy, other, third = (space.hold(name) for name in ("greedy", "other", "third"))
    with pytest.raises(TooLarge, match="51 bytes"):
        greedy.reserve(51)
    greedy.reserve(50)
    with pytest.raises(RateLimited, match="hold 50 bytes") as refused:
        greedy.reserve(1)
    assert refused.value.retry_after > 0
    other.reserve(25)
    with pytest.raises(RateLimited):
        other.reserve(1)
    with pytest.raises(OutOfStorage):
        third.reserve(20)
    greedy.close()
    third.reserve(20)
    assert space.used == 45


def test_a_result_counts_though_it_cannot_be_refused() -> None:
    space = ScratchSpace(100)
    with space.hold("client") as taken:
        taken.reserve(40)
        taken.add(70)
        with pytest.raises(RateLimited):
            space.hold("client").reserve(1)
        taken.add(-100)
        space.hold("client").reserve(1)
    assert space.used == 1
    taken.reserve(10)
    assert space.used == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=30))
def test_a_newcomer_always_finds_room_and_nothing_stays(asked: list[tuple[str, int]]) -> None:
    space, holds = ScratchSpace(100), []
    for client, nbytes in asked:
        holds.append(space.hold(client))
        with suppress(TooLarge, RateLimited, OutOfStorage):
            holds[-1].reserve(nbytes)
        # Three clients leave at least an eighth of all.
        assert space.used <= 87
    for held in holds:
        held.close()
    assert space.used == 0
