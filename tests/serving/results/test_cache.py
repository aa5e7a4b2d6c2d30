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
    cache.put(key, None, key.encode() * size, f"metadata of {key}")


def put_file(cache: ResultCache[str], key: str, size: int) -> None:
    file = cache._folder.parent / "result"
    file.write_bytes(key.encode() * size)
    cache.put(key, None, file, f"metadata of {key}")
    file.unlink()


def read(cache: ResultCache[str], key: str) -> bytes | None:
    result = cache.get(key, None)
    if result is None:
        return None
    assert result.metadata == f"metadata of {key}"
    with result.file:
        return result.file.read()


@pytest.mark.parametrize("put_result", [put_file, put_content])
def test_cached_result_survives_deletion_of_its_source_file(folder: Path, put_result: Callable[..., None]) -> None:
    cache = ResultCache[str](folder, 100)
    assert read(cache, "a") is None
    for key, size in (("a", 10), ("a", 20), ("b", 101)):
        put_result(cache, key, size)
    assert (read(cache, "a"), read(cache, "b")) == (b"a" * 10, None)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert cache.nbytes == 10


def test_least_recently_used_result_is_evicted(folder: Path) -> None:
    cache = ResultCache[str](folder, 100)
    for key in "abc":
        put_file(cache, key, 40)
        read(cache, "a")
    assert [read(cache, key) is not None for key in "abc"] == [True, False, True]
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]
    assert cache.nbytes == 80


def test_open_result_stays_readable_after_eviction(folder: Path) -> None:
    cache = ResultCache[str](folder, 50)
    put_file(cache, "a", 40)
    result = cache.get("a", None)
    assert result is not None
    put_file(cache, "b", 40)
    with result.file:
        assert result.file.read() == b"a" * 40


def test_limit_of_zero_disables_the_cache(folder: Path) -> None:
    cache = ResultCache[str](folder, 0)
    put_file(cache, "a", 40)
    assert (read(cache, "a"), list(folder.iterdir()), cache.is_enabled) == (None, [], False)


def test_failed_write_leaves_no_entry_and_no_file(folder: Path) -> None:
    cache = ResultCache[str](folder, 10_000)
    with full_disk(1000), pytest.raises(OSError, match="large"):
        cache.put("a", None, b"a" * 5000, "metadata of a")
    assert (read(cache, "a"), list(folder.iterdir()), cache.nbytes) == (None, [], 0)
    cache.put("a", None, b"a" * 5000, "metadata of a")
    assert read(cache, "a") == b"a" * 5000


def test_result_with_a_deleted_file_is_removed_from_the_cache(folder: Path) -> None:
    cache = ResultCache[str](folder, 100)
    for key in "ab":
        put_file(cache, key, 40)
        (folder / key).unlink()
    assert (read(cache, "a"), cache.nbytes) == (None, 40)
    put_file(cache, "c", 60)
    put_file(cache, "d", 40)
    assert (read(cache, "c"), cache.nbytes) == (b"c" * 60, 100)


@given(st.lists(st.tuples(st.sampled_from(["ada", "bob", "cleo"]), st.integers(1, 90)), max_size=30))
def test_owner_within_an_equal_share_loses_no_results(results: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as name:
        (folder := Path(name) / "cache").mkdir()
        cache, used_bytes = ResultCache[str](folder, 90), Counter[str]()
        for number, (owner, size) in enumerate(results):
            cache.put(f"{number}", owner, bytes(size), "")
            used_bytes[owner] += size
        for number, (owner, size) in enumerate(results):
            if used_bytes[owner] <= 30:
                result = cache.get(f"{number}", owner)
                assert result is not None
                with result.file:
                    assert len(result.file.read()) == size
        assert cache.nbytes == sum(path.stat().st_size for path in folder.iterdir()) <= 90
