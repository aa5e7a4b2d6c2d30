from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from full_disk import full_disk
from hypothesis import given
from hypothesis import strategies as st

from service.serving.results.cache import ResultCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def put_content(cache: ResultCache[str], key: str, size: int) -> None:
    cache.put(key, None, key.encode() * size, f"told of {key}")


def put(cache: ResultCache[str], key: str, size: int) -> None:
    file = cache._folder.parent / "result"
    file.write_bytes(key.encode() * size)
    cache.put(key, None, file, f"told of {key}")
    file.unlink()


def read(cache: ResultCache[str], key: str) -> bytes | None:
    kept = cache.get(key, None)
    if kept is None:
        return None
    assert kept.metadata == f"told of {key}"
    with kept.file:
        return kept.file.read()


@pytest.mark.parametrize("keep", [put, put_content])
def test_what_was_put_is_got_though_its_own_name_is_gone(folder: Path, keep: Callable[..., None]) -> None:
    cache = ResultCache[str](folder, 100)
    assert read(cache, "a") is None
    for key, size in (("a", 10), ("a", 20), ("b", 101)):
        keep(cache, key, size)
    assert (read(cache, "a"), read(cache, "b")) == (b"a" * 10, None)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert cache.nbytes == 10


def test_least_recently_used_makes_room(folder: Path) -> None:
    cache = ResultCache[str](folder, 100)
    for key in "abc":
        put(cache, key, 40)
        read(cache, "a")
    assert [read(cache, key) is not None for key in "abc"] == [True, False, True]
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]
    assert cache.nbytes == 80


def test_result_that_has_to_go_while_it_is_sent_is_still_whole(folder: Path) -> None:
    cache = ResultCache[str](folder, 50)
    put(cache, "a", 40)
    kept = cache.get("a", None)
    assert kept is not None
    put(cache, "b", 40)
    with kept.file:
        assert kept.file.read() == b"a" * 40


def test_a_limit_of_zero_keeps_nothing(folder: Path) -> None:
    cache = ResultCache[str](folder, 0)
    put(cache, "a", 40)
    assert (read(cache, "a"), list(folder.iterdir()), cache.enabled) == (None, [], False)


def test_what_cannot_be_written_is_not_kept_and_leaves_nothing(folder: Path) -> None:
    cache = ResultCache[str](folder, 10_000)
    with full_disk(1000), pytest.raises(OSError, match="large"):
        cache.put("a", None, b"a" * 5000, "told of a")
    assert (read(cache, "a"), list(folder.iterdir()), cache.nbytes) == (None, [], 0)
    cache.put("a", None, b"a" * 5000, "told of a")
    assert read(cache, "a") == b"a" * 5000


def test_result_whose_file_somebody_deletes_is_forgotten(folder: Path) -> None:
    cache = ResultCache[str](folder, 100)
    for key in "ab":
        put(cache, key, 40)
        (folder / key).unlink()
    assert (read(cache, "a"), cache.nbytes) == (None, 40)
    put(cache, "c", 60)
    put(cache, "d", 40)
    assert (read(cache, "c"), cache.nbytes) == (b"c" * 60, 100)


@given(st.lists(st.tuples(st.sampled_from(["ada", "bob", "cleo"]), st.integers(1, 90)), max_size=30))
def test_owner_who_takes_no_more_than_an_equal_share_loses_nothing(puts: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as name:
        (folder := Path(name) / "cache").mkdir()
        cache, taken = ResultCache[str](folder, 90), Counter[str]()
        for number, (owner, size) in enumerate(puts):
            cache.put(f"{number}", owner, bytes(size), "")
            taken[owner] += size
        for number, (owner, size) in enumerate(puts):
            if taken[owner] <= 30:
                kept = cache.get(f"{number}", owner)
                assert kept is not None
                with kept.file:
                    assert len(kept.file.read()) == size
        assert cache.nbytes == sum(path.stat().st_size for path in folder.iterdir()) <= 90
