from __future__ import annotations

import resource
from pathlib import Path

import pytest

from service.serving.result_cache import ResultCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def put(cache: ResultCache[str], key: str, size: int) -> None:
    file = cache._folder.parent / "result"
    file.write_bytes(key.encode() * size)
    cache.put(key, file, f"told of {key}")
    file.unlink()


def read(cache: ResultCache[str], key: str) -> bytes | None:
    kept = cache.get(key)
    if kept is None:
        return None
    assert kept.metadata == f"told of {key}"
    with kept.file:
        return kept.file.read()


def test_what_was_put_is_got_though_its_own_name_is_gone(folder: Path) -> None:
    cache = ResultCache[str](folder, 100)
    assert read(cache, "a") is None
    put(cache, "a", 10)
    put(cache, "a", 20)
    assert read(cache, "a") == b"a" * 10
    assert cache.nbytes == 10


def test_what_was_never_in_a_file_is_kept_too(folder: Path) -> None:
    cache = ResultCache[str](folder, 100)
    for size in (10, 20):
        cache.put("a", b"a" * size, "told of a")
    assert read(cache, "a") == b"a" * 10
    cache.put("b", bytes(101), "told of b")
    assert read(cache, "b") is None
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
    kept = cache.get("a")
    assert kept is not None
    put(cache, "b", 40)
    with kept.file:
        assert kept.file.read() == b"a" * 40


@pytest.mark.parametrize("limit", [0, 39])
def test_what_is_too_large_is_not_kept(folder: Path, limit: int) -> None:
    cache = ResultCache[str](folder, limit)
    put(cache, "a", 40)
    assert (read(cache, "a"), list(folder.iterdir()), cache.enabled) == (None, [], limit > 0)


def test_what_cannot_be_written_is_not_kept_and_leaves_nothing(folder: Path) -> None:
    cache = ResultCache[str](folder, 10_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="large"):
            cache.put("a", b"a" * 5000, "told of a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (read(cache, "a"), list(folder.iterdir()), cache.nbytes) == (None, [], 0)
    cache.put("a", b"a" * 5000, "told of a")
    assert read(cache, "a") == b"a" * 5000
