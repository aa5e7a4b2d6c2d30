from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from full_disk import full_disk

from service.core.errors import BadFile, BadParameter, ConfigError, OutOfStorage, OutputExists
from service.core.sections.serving import References
from service.serving.parameters import Query
from service.serving.results.answers import check_host_files
from service.serving.storage.host_files import HostFiles


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """`scans` and `results`, which may be named, beside `secret`, which may not."""
    for name in ("scans/2026", "results/2026", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "scans" / "2026" / "stack.tif").write_bytes(b"a stack")
    (tmp_path / "secret" / "key").write_bytes(b"nobody's business")
    return tmp_path


def references(host: Path, **keys: tuple[str, ...]) -> HostFiles:
    roots = {name: {"folder": host / name, "keys": keys.get(name, ())} for name in ("scans", "results")}
    inputs, outputs = {"scans": roots["scans"]}, {"results": roots["results"]}
    return HostFiles(References.model_validate({"inputs": inputs, "outputs": outputs}))


def read(made: HostFiles, place: str, caller: str | None = None) -> bytes:
    with made.open_input(place, caller) as source:
        assert source.name == place.rpartition("/")[2]
        assert isinstance(source.path, Path)
        return source.path.read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(made: HostFiles, place: str, caller: str | None = None) -> str:
    with pytest.raises(BadParameter) as refusal:
        read(made, place, caller)
    return str(refusal.value)


@pytest.mark.parametrize(
    "place",
    [
        "", "/", "scans", "scans/", "secret/key", "results/2026", "/etc/passwd", "scans/../secret/key",
        "scans/2026/../../secret/key", "scans//2026/stack.tif", "scans/./2026/stack.tif", "scans/2026/stack.tif/",
        "scans/2026", "scans/2026/stack.tif/x", "scans/no/such.tif", "scans/\0", "scans/" + "x" * 300, "scans/\ud800",
    ],
)  # fmt: skip
def test_what_is_no_file_below_a_listed_folder_is_refused(host: Path, place: str) -> None:
    message = refused(references(host), place)
    assert message.startswith("input: ")
    assert str(host) not in message


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("scans/link.tif", "link"),
        ("scans/folder/key", "link"),
        ("scans/2026/up/secret/key", "link"),
        ("scans/pipe.tif", "not a file"),
    ],
)
def test_links_are_not_followed_and_pipes_not_opened(host: Path, where: str, reason: str) -> None:
    scans = host / "scans"
    (scans / "link.tif").symlink_to(host / "secret" / "key")
    (scans / "folder").symlink_to(host / "secret")
    (scans / "2026" / "up").symlink_to("../..")
    os.mkfifo(scans / "pipe.tif")
    assert reason in refused(references(host), where)


def test_listed_folder_may_itself_be_a_link(host: Path) -> None:
    (host / "scans").rename(host / "disk")
    (host / "scans").symlink_to("disk")
    assert read(references(host), "scans/2026/stack.tif") == b"a stack"


def test_file_stays_the_one_that_was_opened(host: Path) -> None:
    """Whoever swaps it for a link afterwards does not get the other file read."""
    path = host / "scans" / "2026" / "stack.tif"
    with references(host).open_input("scans/2026/stack.tif", None) as source:
        path.unlink()
        path.symlink_to(host / "secret" / "key")
        assert source.path.read_bytes() == b"a stack"


def test_folder_that_is_swapped_for_a_link_on_the_way_leads_nowhere_else(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.open, list[Any]()

    def swapping(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(path)
        if path == "stack.tif":
            (host / "scans" / "2026").rename(host / "scans" / "moved")
            (host / "scans" / "2026").symlink_to(host / "secret")
            (host / "secret" / "stack.tif").write_bytes(b"nobody's business")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", swapping)
    assert read(references(host), "scans/2026/stack.tif") == b"a stack"
    assert "2026" in opened


def test_folders_are_for_the_keys_that_are_named(host: Path) -> None:
    made = references(host, scans=("ada",))
    assert read(made, "scans/2026/stack.tif", "ada") == b"a stack"
    for caller in ("bob", None):
        message = refused(made, "scans/2026/stack.tif", caller)
        assert message == refused(made, "elsewhere/stack.tif", caller)
        assert "scans" not in message


def test_without_folders_nothing_can_be_named(host: Path) -> None:
    assert "post the stack itself" in refused(HostFiles(References()), "scans/2026/stack.tif")


@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_there_is_replaced_only_if_asked_and_not_written_through(host: Path, *, is_link: bool) -> None:
    made, result, place = references(host), host / "result", "results/labels.tif"
    there, secret = host / "results" / "labels.tif", host / "secret" / "key"
    there.symlink_to(secret) if is_link else there.write_bytes(b"older")
    older = there.read_bytes()
    result.write_bytes(b"newer")
    with pytest.raises(OutputExists, match="overwrite=true"):
        made.check(None, place, None)
    with pytest.raises(OutputExists):
        made.put(result, place, None, "one")
    assert there.read_bytes() == older
    made.check(None, place, None, overwrite=True)
    made.put(result, place, None, "one", overwrite=True)
    assert (there.read_bytes(), there.is_symlink(), names(host / "results")) == (
        b"newer",
        False,
        ["2026", "labels.tif"],
    )
    assert secret.read_bytes() == b"nobody's business"


def test_what_was_put_before_a_crash_is_known_until_it_is_settled(host: Path) -> None:
    made, result, place = references(host), host / "result", "results/labels.tif"
    result.write_bytes(b"labels")
    # Half a file of an earlier crash is written anew.
    (host / "results" / ".stackseg-one.part").write_bytes(b"lab")
    for _ in range(2):
        made.put(result, place, None, "one")
    with pytest.raises(OutputExists):
        made.put(result, place, None, "two")
    made.settle(place, None, "one")
    assert names(host / "results") == ["2026", "labels.tif"]
    labels = host / "results" / "labels.tif"
    assert (labels.read_bytes(), labels.stat().st_nlink) == (b"labels", 1)


@pytest.mark.parametrize("place", ["scans/x.tif", "results/no/x.tif", "results/link/x.tif", "results/../x.tif"])
def test_nothing_is_put_elsewhere(host: Path, place: str) -> None:
    (host / "results" / "link").symlink_to(host / "secret")
    before = sorted(host.rglob("*"))
    with pytest.raises(BadParameter, match="output_to"):
        references(host).put(host / "secret" / "key", place, None, "one")
    assert sorted(host.rglob("*")) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_in_the_place_of_the_result_is_refused_before_and_after(host: Path, *, overwrite: bool) -> None:
    made, result = references(host), host / "result.tif"
    result.write_bytes(b"labels")
    with pytest.raises(BadParameter, match="is a folder"):
        made.check(None, "results/2026", None, overwrite=overwrite)
    with pytest.raises(BadParameter, match=r"folder|directory"):
        made.put(result, "results/2026", None, "ticket", overwrite=overwrite)
    assert names(host / "results") == ["2026"]


def test_result_that_the_disk_does_not_hold_is_no_fault_of_the_service(host: Path) -> None:
    made, result = references(host), host / "result.tif"
    result.write_bytes(bytes(10_000))
    with full_disk(5000), pytest.raises(OutOfStorage, match="results/labels"):
        made.put(result, "results/labels.tif", None, "ticket")
    assert names(host / "results") == ["2026"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs the right to mount")
def test_full_disk_is_told_before_anything_is_computed(host: Path) -> None:
    made, full = references(host), host / "results" / "2026"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("the system lets nobody mount")
    try:
        made.check(None, "results/2026/labels.tif", None)
        with pytest.raises(OSError, match="No space"), (full / "filler").open("wb") as file:
            file.write(bytes(2**20))
        with pytest.raises(OutOfStorage, match="results/2026/labels"):
            made.check(None, "results/2026/labels.tif", None)
        subprocess.run(["mount", "-o", "remount,ro", full], check=True)
        with pytest.raises(BadParameter, match="permission"):
            made.check(None, "results/2026/labels.tif", None)
    finally:
        subprocess.run(["umount", full], check=True)


def test_a_store_gets_no_name_that_harms_its_image_or_is_too_long(host: Path) -> None:
    image = host / "results" / "image.zarr"
    image.mkdir()
    (image / "zarr.json").write_text("{}")
    for name in ("zarr.json", ".zgroup", ".hidden", "a\\b", "a\nb", "é" * 125):
        with pytest.raises(BadParameter, match="is no name for a store"):
            references(host).check(None, f"results/image.zarr/labels/{name}", None, as_zarr=True)
    references(host).check(None, f"results/image.zarr/labels/{'a' * 249}", None, as_zarr=True)
    with pytest.raises(BadParameter, match="is no name for a store"):
        references(host).check(None, "results/.zarr", None, as_zarr=True)


def test_a_table_among_the_labels_of_an_image_is_a_plain_file(host: Path) -> None:
    image, place, made = host / "results" / "image.zarr", "results/image.zarr/labels/a.csv", references(host)
    image.mkdir()
    (image / "zarr.json").write_text("{}")
    (host / "table").write_text("label")
    query = Query(measurements="csv", output_to=place)
    check_host_files(made, query, None)
    made.put(host / "table", place, None, "one")
    made.settle(place, None, "one")
    with pytest.raises(OutputExists):
        check_host_files(made, query, None)
    check_host_files(made, Query(measurements="csv", output_to=place, overwrite=True), None)
    with pytest.raises(BadParameter, match="no folder of Zarr"):
        check_host_files(made, Query(output_to=place, overwrite=True), None)


def test_labels_that_cannot_be_listed_are_taken_back(host: Path) -> None:
    image, store = host / "results" / "image.zarr", host / "made" / "labels" / "cells"
    store.mkdir(parents=True)
    for path in (store, store.parent):
        (path / "zarr.json").write_text('{"attributes": {"ome": {"labels": ["cells"]}}}')
    (image / "labels").mkdir(parents=True)
    (image / "zarr.json").write_text("{}")
    (image / "labels" / "zarr.json").write_text("[")
    with pytest.raises(BadFile):
        references(host).put_zarr(store, "results/image.zarr/labels/cells", None, "one")
    assert [path.name for path in (image / "labels").iterdir()] == ["zarr.json"]


def test_folder_that_is_not_there_ends_the_start(host: Path) -> None:
    for kind in ("inputs", "outputs"):
        with pytest.raises(ConfigError, match=f"references.{kind}: scans"):
            HostFiles(References.model_validate({kind: {"scans": str(host / "nowhere")}}))


def far(**stores: Any) -> HostFiles:
    return HostFiles(References.model_validate({"stores": stores}))


def test_a_store_elsewhere_is_named_below_a_listed_url_alone(host: Path) -> None:
    made = far(lab={"url": "https://host.org/data/", "keys": ("ada",)})
    for place in (
        "lab/a.zarr",
        "lab/2026/b/a.zarr/",
        "https://host.org/data/a.zarr",
        "https://host.org/data/x/a.zarr/",
    ):
        with made.open_input(place, "ada") as source:
            assert source.name == "a.zarr"
        assert not made.is_folder(place, "ada")
        for caller in ("grace", None):
            with pytest.raises(BadParameter), made.open_input(place, caller):
                pass
    for place in (
        "lab", "lab/", "lab/../a.zarr", "lab//a.zarr", "lab/./a", "https://host.org/data", "https://host.org/data/",
        "https://host.org/data/../secret", "https://host.org/database/a", "https://host.org.evil/data/a",
        "https://ada@host.org/data/a", "http://host.org/data/a", "http://169.254.169.254/latest", "file:///etc/passwd",
        "https://host.org/data/a?b", "https://host.org/data/a#b", "https://host.org/data/%2e%2e/a",
        "https://host.org/data/b%2f..%2f../a", "https://host.org/data/%00/a",
    ):  # fmt: skip
        with pytest.raises(BadParameter), made.open_input(place, "ada"):
            pass
    for place, name in (("lab/%2e%2e/a%2fb", "a%2fb"), ("https://host.org/data/my%20image.zarr", "my image.zarr")):
        with made.open_input(place, "ada") as source:
            assert source.name == name
    for place in ("lab/a.zarr", "s3://bucket/a.zarr"):
        with (
            pytest.raises(BadParameter, match=r"operator has listed|begins with one of scans"),
            references(host).open_input(place, None),
        ):
            pass


@pytest.mark.parametrize(
    "stores",
    [{"lab": "ftp://host/a"}, {"lab": "https://a:b@host/a"}, {"lab": "https://host/a?b"}, {"lab": "az://box/a"}],
)
def test_a_store_that_cannot_be_used_is_found_at_the_start(stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises((ConfigError, ValueError)):
        far(**stores)


def test_a_name_is_that_of_one_folder_or_store(host: Path) -> None:
    with pytest.raises(ValueError, match="rename one of them"):
        References.model_validate({"inputs": {"lab": str(host)}, "stores": {"lab": "s3://a/b"}})
