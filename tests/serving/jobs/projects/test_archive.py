"""Tests of archives that are sent while they are being written."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.serving.jobs.projects.archive import ArchivedFile, UniquePaths, make_path_part, stream_archive

MEBIBYTE = 2**20


def test_archive_is_read_and_sent_in_chunks() -> None:
    chunk, chunk_count = os.urandom(MEBIBYTE), 64
    read_count = 0

    def read() -> Iterator[bytes]:
        nonlocal read_count
        for _ in range(chunk_count):
            read_count += 1
            yield chunk

    tracemalloc.start()
    sent_bytes = 0
    for part in stream_archive([ArchivedFile("weights.tif", read(), 2**40), ArchivedFile("empty", [], 0)]):
        sent_bytes += len(part)
        assert sent_bytes > (read_count - 2) * MEBIBYTE
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * MEBIBYTE
    assert sent_bytes > chunk_count * MEBIBYTE


def test_archive_contains_the_files() -> None:
    contents = {"a.txt": b"abc" * 1000, "étude/β.csv": b"", "c.tif": os.urandom(1000)}
    for max_bytes in (3000, 2**40):
        files = [ArchivedFile(path, [content[:10], content[10:]], max_bytes) for path, content in contents.items()]
        with zipfile.ZipFile(io.BytesIO(b"".join(stream_archive(files)))) as archive:
            assert {name: archive.read(name) for name in archive.namelist()} == contents


@given(st.text(max_size=300))
def test_names_are_safe_on_all_operating_systems(text: str) -> None:
    name = make_path_part(text)
    assert name.strip(" .") == name != ""
    assert len(name) <= 101
    assert not set(name) & set('<>:"/\\|?*\0\n\r\t')


@pytest.mark.parametrize(
    ("text", "name"), [("..", "_"), ("aux.txt", "_aux.txt"), ("a/b", "a_b"), ("day 2 ", "day 2"), ("β+δ", "β+δ")]
)
def test_names_remain_readable(text: str, name: str) -> None:
    assert make_path_part(text) == name


def test_equal_paths_are_numbered() -> None:
    paths = UniquePaths()
    made = [paths.make(["labels", "", group], stem, ".tif") for group, stem in (("a", "x"), ("A", "X"), ("", "x"))]
    assert made == ["labels/a/x.tif", "labels/A/X (2).tif", "labels/x.tif"]
