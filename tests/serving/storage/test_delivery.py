"""A store that is placed appears whole, is recognised after a crash, and follows no link."""

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
from service.core.types import Cancelling, never
from service.serving.storage import delivery
from service.serving.storage.delivery import Target

MARK = ".stackseg-7.part"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A finished store, in a group that lists it."""
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
def folder(results: Path) -> Iterator[int]:
    descriptor = os.open(results, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def put(store: Path, folder: int, *, overwrite: bool = False, cancelled: Cancelling = never) -> None:
    delivery.put_store(store, Target(folder, "a.zarr", "results/a.zarr", "7", overwrite), cancelled)


def settle(folder: int, ticket: str = "7") -> None:
    delivery.settle(Target(folder, "a.zarr", "results/a.zarr", ticket))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def old_store(path: Path) -> Path:
    path.mkdir()
    (path / "zarr.json").write_text("old")
    return path


def test_a_store_is_copied_whole_and_recognised_until_it_is_settled(store: Path, results: Path, folder: int) -> None:
    put(store, folder)
    assert content(results / "a.zarr") == content(store) | {MARK: b""}
    put(store, folder)
    settle(folder)
    assert content(results) == {f"a.zarr/{name}": data for name, data in content(store).items()}
    with pytest.raises(OutputExists, match=r"results/a\.zarr is there already"):
        put(store, folder)
    settle(folder)


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.doc").write_text("precious")


@pytest.mark.parametrize(
    "make",
    [lambda path: path.write_text("precious"), make_folder, lambda path: path.symlink_to("thesis")],
    ids=["file", "folder", "link"],
)
@pytest.mark.parametrize("meanwhile", [False, True])
def test_only_another_store_is_replaced(
    store: Path, results: Path, folder: int, make: Callable[[Path], object], *, meanwhile: bool
) -> None:
    target = results / "a.zarr"

    def swap() -> bool:
        # It is asked between the check of the name and the renaming.
        if (target / "zarr.json").exists():
            target.rename(results.parent / "elsewhere")
            make(target)
        return False

    if meanwhile:
        old_store(target)
    else:
        make(target)
    with pytest.raises(BadParameter, match="no folder of Zarr"):
        put(store, folder, overwrite=True, cancelled=swap)
    assert [path.name for path in results.iterdir()] == ["a.zarr"]
    make(expected := results.parent / "expected")
    assert stat.S_IFMT(target.lstat().st_mode) == stat.S_IFMT(expected.lstat().st_mode)
    assert content(target) == content(expected)
    if target.is_symlink():
        assert target.readlink() == expected.readlink()
    elif target.is_file():
        assert target.read_text() == "precious"


def test_stores_that_replace_each_other_leave_one_of_them(store: Path, results: Path, folder: int) -> None:
    def replace(ticket: str) -> None:
        for _ in range(15):
            delivery.put_store(store, Target(folder, "a.zarr", "a", ticket, overwrite=True))
            settle(folder, ticket)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace, ("one", "two", "three", "four")))
    assert content(results) == {f"a.zarr/{name}": data for name, data in content(store).items()}


def test_a_store_is_kept_beside_a_file_that_took_its_name_while_it_was_replaced(
    store: Path, results: Path, folder: int
) -> None:
    # As a process leaves it that is killed between two names.
    old_store(results / f"{MARK}.old")
    (results / "a.zarr").write_text("precious")
    with pytest.raises(BadParameter, match="no folder of Zarr"):
        put(store, folder, overwrite=True)
    assert content(results) == {"a.zarr": b"precious", f"{MARK}.old/zarr.json": b"old"}
    (results / "a.zarr").unlink()
    put(store, folder, overwrite=True)
    settle(folder)
    assert content(results) == {f"a.zarr/{name}": data for name, data in content(store).items()}


def test_labels_of_a_job_that_is_cancelled_are_not_listed_once_others_let_go(
    store: Path, results: Path, folder: int
) -> None:
    holder = os.open(results, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        cancelled = threading.Event()
        listing = pool.submit(delivery.list_labels, store.parent, folder, cancelled.is_set)
        with pytest.raises(TimeoutError):
            listing.result(0.2)
        cancelled.set()
        with pytest.raises(Cancelled):
            listing.result(5)
    os.close(holder)
    delivery.list_labels(store.parent, folder, lambda: True)
    assert [path.name for path in results.iterdir()] == ["zarr.json"]


@pytest.mark.parametrize("killed", ["while it copied", "between two names", "before it was settled"])
def test_a_second_call_goes_on_where_the_process_was_killed(
    store: Path, results: Path, folder: int, killed: str
) -> None:
    if killed == "while it copied":
        old_store(results / "a.zarr")
        (results / MARK / "0").mkdir(parents=True)
    elif killed == "between two names":
        old_store(results / f"{MARK}.old")
        (results / MARK / "0").mkdir(parents=True)
    else:
        put(store, folder)
        old_store(results / f"{MARK}.old")
    put(store, folder, overwrite=True)
    settle(folder)
    assert content(results) == {f"a.zarr/{name}": data for name, data in content(store).items()}
    assert [path.name for path in results.iterdir()] == ["a.zarr"]


def test_what_is_given_up_or_fails_leaves_what_was_there(store: Path, results: Path, folder: int) -> None:
    old_store(results / "a.zarr")
    with pytest.raises(Cancelled):
        put(store, folder, overwrite=True, cancelled=lambda: True)
    (store / "0" / "c" / "1").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        put(store, folder, overwrite=True)
    assert content(results) == {"a.zarr/zarr.json": b"old"}


def test_labels_are_listed_beside_others(store: Path, results: Path, folder: int) -> None:
    delivery.list_labels(store.parent, folder, lambda: False)
    present = json.loads((results / "zarr.json").read_text())
    assert present == json.loads((store.parent / "zarr.json").read_text())
    present["attributes"] = {"mine": 1, "ome": {"version": "0.5", "labels": ["zoo", "a"], "more": 2}}
    (results / "zarr.json").write_text(json.dumps(present))
    delivery.list_labels(store.parent, folder, lambda: False)
    present["attributes"]["ome"]["labels"] = ["a", "new", "zoo"]
    assert json.loads((results / "zarr.json").read_text()) == present
    assert [path.name for path in results.iterdir()] == ["zarr.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"attributes": 7}', '{"attributes": {"ome": {"labels": 7}}}'])
def test_metadata_that_make_no_sense_are_left_as_they_are(store: Path, results: Path, folder: int, text: str) -> None:
    (results / "zarr.json").write_text(text)
    with pytest.raises(BadFile):
        delivery.list_labels(store.parent, folder, lambda: False)
    assert content(results) == {"zarr.json": text.encode()}


def test_metadata_are_neither_read_nor_written_through_links(store: Path, results: Path, folder: int) -> None:
    secret = results.parent / "secret.json"
    secret.write_text("{}")
    (results / "zarr.json").symlink_to(secret)
    with pytest.raises(BadFile, match="link"):
        delivery.list_labels(store.parent, folder, lambda: False)
    assert secret.read_text() == "{}"
