"""Delivery of Zarr stores. Stores appear atomically and are recognized after a crash, and links are not followed."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.core.errors import BadFile, BadParameter, Cancelled, OutputExists
from service.core.types import CancellationCheck, never_cancelled
from service.serving.storage import delivery
from service.serving.storage.delivery import DeliveryTarget

PARTIAL_NAME = ".stackseg-7.part"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A finished store in a group that lists the store."""
    labels = tmp_path / "labels"
    (labels / "new" / "0" / "c").mkdir(parents=True)
    (labels / "zarr.json").write_text(
        '{"node_type": "group", "attributes": {"ome": {"version": "0.5", "labels": ["new"]}}}'
    )
    (labels / "new" / "zarr.json").write_text("new")
    (labels / "new" / "0" / "c" / "0").write_bytes(b"chunk")
    return labels / "new"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def folder_fd(results: Path) -> Iterator[int]:
    file_descriptor = os.open(results, os.O_RDONLY)
    yield file_descriptor
    os.close(file_descriptor)


def put(
    store: Path, folder_fd: int, *, overwrite: bool = False, cancelled: CancellationCheck = never_cancelled
) -> None:
    delivery.put_store(store, DeliveryTarget(folder_fd, "a.zarr", "results/a.zarr", "7", overwrite), cancelled)


def confirm_delivery(folder_fd: int, ticket: str = "7") -> None:
    delivery.confirm_delivery(DeliveryTarget(folder_fd, "a.zarr", "results/a.zarr", ticket))


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_old_store(path: Path) -> Path:
    path.mkdir()
    (path / "zarr.json").write_text("old")
    return path


def test_delivered_store_is_complete_and_recognized_until_it_is_confirmed(
    store: Path, results: Path, folder_fd: int
) -> None:
    put(store, folder_fd)
    assert read_files(results / "a.zarr") == read_files(store) | {PARTIAL_NAME: b""}
    put(store, folder_fd)
    confirm_delivery(folder_fd)
    assert read_files(results) == {f"a.zarr/{name}": data for name, data in read_files(store).items()}
    with pytest.raises(OutputExists, match=r"results/a\.zarr already exists"):
        put(store, folder_fd)
    confirm_delivery(folder_fd)


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.doc").write_text("precious")


@pytest.mark.parametrize(
    "make_other",
    [lambda path: path.write_text("precious"), make_folder, lambda path: path.symlink_to("thesis")],
    ids=["file", "folder", "link"],
)
@pytest.mark.parametrize("during_delivery", [False, True])
def test_only_a_store_can_be_replaced(
    store: Path, results: Path, folder_fd: int, make_other: Callable[[Path], object], *, during_delivery: bool
) -> None:
    target = results / "a.zarr"

    def replace_target() -> bool:
        # Called between the check of the name and the rename.
        if (target / "zarr.json").exists():
            target.rename(results.parent / "elsewhere")
            make_other(target)
        return False

    if during_delivery:
        make_old_store(target)
    else:
        make_other(target)
    with pytest.raises(BadParameter, match="not a Zarr store"):
        put(store, folder_fd, overwrite=True, cancelled=replace_target)
    assert [path.name for path in results.iterdir()] == ["a.zarr"]
    make_other(expected := results.parent / "expected")
    assert stat.S_IFMT(target.lstat().st_mode) == stat.S_IFMT(expected.lstat().st_mode)
    assert read_files(target) == read_files(expected)
    if target.is_symlink():
        assert target.readlink() == expected.readlink()
    elif target.is_file():
        assert target.read_text() == "precious"


def test_concurrent_replacements_leave_one_complete_store(store: Path, results: Path, folder_fd: int) -> None:
    def replace(ticket: str) -> None:
        for _ in range(15):
            delivery.put_store(store, DeliveryTarget(folder_fd, "a.zarr", "a", ticket, overwrite=True))
            confirm_delivery(folder_fd, ticket)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace, ("one", "two", "three", "four")))
    assert read_files(results) == {f"a.zarr/{name}": data for name, data in read_files(store).items()}


def test_previous_store_is_kept_if_a_file_takes_its_name_during_replacement(
    store: Path, results: Path, folder_fd: int
) -> None:
    # The state that a process leaves if it is killed between the two renames.
    make_old_store(results / f"{PARTIAL_NAME}.old")
    (results / "a.zarr").write_text("precious")
    with pytest.raises(BadParameter, match="not a Zarr store"):
        put(store, folder_fd, overwrite=True)
    assert read_files(results) == {"a.zarr": b"precious", f"{PARTIAL_NAME}.old/zarr.json": b"old"}
    (results / "a.zarr").unlink()
    put(store, folder_fd, overwrite=True)
    confirm_delivery(folder_fd)
    assert read_files(results) == {f"a.zarr/{name}": data for name, data in read_files(store).items()}


def test_cancelled_job_stops_waiting_for_the_folder_lock(store: Path, results: Path, folder_fd: int) -> None:
    other_fd = os.open(results, os.O_RDONLY)
    fcntl.flock(other_fd, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        cancelled = threading.Event()
        listing = pool.submit(delivery.register_labels, store.parent, folder_fd, cancelled.is_set)
        with pytest.raises(TimeoutError):
            listing.result(0.2)
        cancelled.set()
        with pytest.raises(Cancelled):
            listing.result(5)
    os.close(other_fd)
    delivery.register_labels(store.parent, folder_fd, lambda: True)
    assert [path.name for path in results.iterdir()] == ["zarr.json"]


@pytest.mark.parametrize("killed_at", ["during the copy", "between the renames", "before the confirmation"])
def test_second_call_completes_an_interrupted_delivery(
    store: Path, results: Path, folder_fd: int, killed_at: str
) -> None:
    if killed_at == "during the copy":
        make_old_store(results / "a.zarr")
        (results / PARTIAL_NAME / "0").mkdir(parents=True)
    elif killed_at == "between the renames":
        make_old_store(results / f"{PARTIAL_NAME}.old")
        (results / PARTIAL_NAME / "0").mkdir(parents=True)
    else:
        put(store, folder_fd)
        make_old_store(results / f"{PARTIAL_NAME}.old")
    put(store, folder_fd, overwrite=True)
    confirm_delivery(folder_fd)
    assert read_files(results) == {f"a.zarr/{name}": data for name, data in read_files(store).items()}
    assert [path.name for path in results.iterdir()] == ["a.zarr"]


def test_cancelled_or_failed_delivery_keeps_the_previous_store(store: Path, results: Path, folder_fd: int) -> None:
    make_old_store(results / "a.zarr")
    with pytest.raises(Cancelled):
        put(store, folder_fd, overwrite=True, cancelled=lambda: True)
    (store / "0" / "c" / "1").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        put(store, folder_fd, overwrite=True)
    assert read_files(results) == {"a.zarr/zarr.json": b"old"}


def test_labels_are_added_to_existing_labels(store: Path, results: Path, folder_fd: int) -> None:
    delivery.register_labels(store.parent, folder_fd, lambda: False)
    metadata = json.loads((results / "zarr.json").read_text())
    assert metadata == json.loads((store.parent / "zarr.json").read_text())
    metadata["attributes"] = {"mine": 1, "ome": {"version": "0.5", "labels": ["zoo", "a"], "more": 2}}
    (results / "zarr.json").write_text(json.dumps(metadata))
    delivery.register_labels(store.parent, folder_fd, lambda: False)
    metadata["attributes"]["ome"]["labels"] = ["a", "new", "zoo"]
    assert json.loads((results / "zarr.json").read_text()) == metadata
    assert [path.name for path in results.iterdir()] == ["zarr.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"attributes": 7}', '{"attributes": {"ome": {"labels": 7}}}'])
def test_invalid_metadata_is_not_changed(store: Path, results: Path, folder_fd: int, content: str) -> None:
    (results / "zarr.json").write_text(content)
    with pytest.raises(BadFile):
        delivery.register_labels(store.parent, folder_fd, lambda: False)
    assert read_files(results) == {"zarr.json": content.encode()}


def test_metadata_is_neither_read_nor_written_through_links(store: Path, results: Path, folder_fd: int) -> None:
    secret = results.parent / "secret.json"
    secret.write_text("{}")
    (results / "zarr.json").symlink_to(secret)
    with pytest.raises(BadFile, match="link"):
        delivery.register_labels(store.parent, folder_fd, lambda: False)
    assert secret.read_text() == "{}"
