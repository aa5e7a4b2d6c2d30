"""Which files of a folder are stacks, and where their labels are saved. No server is needed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from live import as_tiff
from stackseg_client import AsyncClient, Client
from stackseg_client.folders import FolderItem, plan_folder

from service.core.types import Segmentation
from service.formats import writers

STACK = as_tiff(np.zeros((2, 4, 5), np.uint16))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "stacks"
    folder.mkdir()
    (folder / "a.tif").write_bytes(STACK)
    return folder


def plan(source: Path, target: Path, pattern: str = "*", *, table: bool = False) -> list[FolderItem]:
    return plan_folder(source, target, pattern, ".tif", table=table)


def write_result(path: Path) -> None:
    writers.write(Segmentation(np.zeros((2, 4, 5), np.uint16), "labels", None, 0), path, {"model": "nuclei/1"})


def test_hidden_files_and_results_are_not_stacks(source: Path, tmp_path: Path) -> None:
    (source / "._a.tif").write_bytes(b"\0\5\x16\7" + bytes(100))
    (source / ".Trash").mkdir()
    (source / ".Trash" / "b.tif").write_bytes(STACK)
    (source / "results").mkdir()
    write_result(source / "results" / "b_labels.tif")
    write_result(source / "results" / "c_labels.zarr")
    items = plan(source, tmp_path / "labels", "**/*")
    assert [(item.path, item.labels_path) for item in items] == [(source / "a.tif", tmp_path / "labels/a_labels.tif")]


def test_ome_zarr_folders_are_stacks_and_their_content_is_not(source: Path, tmp_path: Path) -> None:
    for name in ("b.ome.zarr", "c.zarr", "d"):
        zarr.open_group(source / name, mode="w").create_array("0", data=np.zeros((2, 4, 5), np.uint8))
    (source / "c.zarr" / "extra.tif").write_bytes(STACK)
    for pattern in ("*", "**/*"):
        items = plan(source, tmp_path / "labels", pattern)
        assert [(item.path.name, item.labels_path.name) for item in items] == [
            ("a.tif", "a_labels.tif"),
            ("b.ome.zarr", "b_labels.tif"),
            ("c.zarr", "c_labels.tif"),
            ("d", "d_labels.tif"),
        ]


def test_labels_may_be_saved_around_the_stacks(source: Path) -> None:
    (item,) = plan(source, source.parent)
    assert item.labels_path == source.parent / "a_labels.tif"
    (source / "labels").mkdir()
    (source / "labels" / "b.tif").write_bytes(STACK)
    assert [item.path.name for item in plan(source, source / "labels", "**/*")] == ["a.tif"]


def test_missing_stacks_are_reported(source: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", source / "a.tif"):
        with pytest.raises(NotADirectoryError, match="is not a folder"):
            plan(folder, tmp_path / "labels")
    (source / "notes").symlink_to("missing")
    assert len(plan(source, tmp_path / "labels")) == 1
    (source / "b.tif").symlink_to("missing")
    with pytest.raises(FileNotFoundError, match=r"b\.tif is a link to missing"):
        plan(source, tmp_path / "labels")


def test_labels_without_the_requested_table_are_not_complete(source: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels" / "a_labels.tif"
    labels.parent.mkdir()
    labels.touch()
    assert plan(source, labels.parent)
    with pytest.raises(ValueError, match="overwrite_labels=True"):
        plan(source, labels.parent, table=True)
    assert plan_folder(source, labels.parent, "*", ".tif", table=True, overwrite=True)
    labels.with_suffix(".csv").touch()
    assert plan(source, labels.parent, table=True)


def test_folders_need_a_stack_in_progress(source: Path, tmp_path: Path) -> None:
    async def run() -> None:
        _ = [item async for item in AsyncClient().segment_folder(source, tmp_path / "labels", concurrency=0)]

    with pytest.raises(ValueError, match="concurrency=0"):
        asyncio.run(asyncio.wait_for(run(), 10))
    with Client() as client, pytest.raises(ValueError, match="concurrency=0"):
        client.segment_folder(source, tmp_path / "labels", concurrency=0)


def test_names_that_are_not_in_utf_8_are_kept(source: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff.tif")
    (source / name).write_bytes(STACK)
    assert name in [item.path.name for item in plan(source, tmp_path / "labels")]
