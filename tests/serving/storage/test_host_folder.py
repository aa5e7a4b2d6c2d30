from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import BadParameter, Cancelled
from service.serving.storage import host_folder
from service.serving.storage.host_folder import list_files

NAMES = st.sampled_from(["a", "b", "ab", "a.tif", "b.tif"])
PATHS = st.lists(NAMES, min_size=1, max_size=4)
COMPONENTS = st.sampled_from(["**", "*", "a", "a*", "?", "*.tif", "[ab].tif"])


@given(paths=st.lists(PATHS, max_size=12), components=st.lists(COMPONENTS, min_size=1, max_size=6))
def test_files_match_like_in_pathlib(tmp_path_factory: Any, paths: list[list[str]], components: list[str]) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for *parents, name in paths:
        parent = folder.joinpath(*(f"{part}.d" for part in parents))
        parent.mkdir(parents=True, exist_ok=True)
        (parent / name).touch()
    pattern = "/".join(
        f"{part}.d" if part in {"a", "?"} and index < len(components) - 1 else part
        for index, part in enumerate(components)
    )
    expected = {str(path.relative_to(folder)) for path in folder.glob(pattern) if path.is_file()}
    found = list_files(folder, pattern)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_pattern_with_many_recursive_components_is_fast(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*(30 * ["folder"]))
    deepest.mkdir(parents=True)
    for parent in (deepest, *deepest.parents):
        if parent.is_relative_to(tmp_path):
            for number in range(20):
                (parent / f"{number}.tif").touch()
    start = time.monotonic()
    assert len(list_files(tmp_path, "/".join([*(84 * ["**"]), "*.tif"]))) == 31 * 20
    assert len(list_files(tmp_path, "/".join([*(15 * ["**", "*"]), "*.tif"]))) == 16 * 20
    assert time.monotonic() - start < 5


def test_links_and_the_results_folder_are_not_searched(tmp_path: Path) -> None:
    for name in ("scans", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tif").touch()
    (tmp_path / "link").symlink_to("scans")
    (tmp_path / "scans" / "link.tif").symlink_to("a.tif")
    assert list_files(tmp_path, "**/*.tif", (tmp_path / "results").stat()) == ["scans/a.tif"]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [("*", ["a.zarr"]), ("**/*.zarr", ["a.zarr", "day/b.zarr"]), ("**/*", ["a.zarr", "day/b.zarr"]), ("*/*/zarr*", [])],
)
def test_zarr_folders_match_as_a_whole(tmp_path: Path, glob: str, expected: list[str]) -> None:
    for name, metadata in (("a.zarr", "zarr.json"), ("day/b.zarr", ".zgroup")):
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / metadata).touch()
        (tmp_path / name / "0" / metadata).touch()
    assert sorted(list_files(tmp_path, glob)) == expected


@pytest.mark.parametrize("glob", ["../*", "/etc/*", "a//b", ".", "", "/".join(33 * ["*"])])
def test_invalid_patterns_are_rejected(tmp_path: Path, glob: str) -> None:
    with pytest.raises(BadParameter, match="glob"):
        list_files(tmp_path, glob)


def test_entries_and_nesting_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_folder, "MAX_SEARCHED_ENTRIES", 10)
    monkeypatch.setattr(host_folder, "MAX_SEARCH_DEPTH", 3)
    (tmp_path / "1" / "2" / "3").mkdir(parents=True)
    assert list_files(tmp_path, "**/*.tif") == []
    (tmp_path / "1" / "2" / "3" / "4").mkdir()
    with pytest.raises(BadParameter, match="levels of subfolders"):
        list_files(tmp_path, "**/*.tif")
    assert list_files(tmp_path, "*/*.tif") == []
    for number in range(10):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(BadParameter, match="more than 10 files"):
        list_files(tmp_path, "*.tif")


def test_search_can_be_cancelled(tmp_path: Path) -> None:
    (tmp_path / "a.tif").touch()
    with pytest.raises(Cancelled):
        list_files(tmp_path, "*", cancelled=lambda: True)
