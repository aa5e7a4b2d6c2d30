from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import full_disk
from zarr_files import write_zarr

from service.core.errors import BadFile, BadParameter, ConfigError, OutOfStorage, OutputExists
from service.core.sections.serving import References
from service.serving.parameters import Query
from service.serving.results.answers import check_host_files
from service.serving.storage.host_files import HostFiles


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder that contains the configured folders `scans` and `results`, and the inaccessible folder `secret`."""
    for name in ("scans/2026", "results/2026", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "scans" / "2026" / "stack.tif").write_bytes(b"a stack")
    (tmp_path / "secret" / "key").write_bytes(b"confidential")
    return tmp_path


def make_host_files(host: Path, **keys: tuple[str, ...]) -> HostFiles:
    roots = {name: {"folder": host / name, "keys": keys.get(name, ())} for name in ("scans", "results")}
    inputs, outputs = {"scans": roots["scans"]}, {"results": roots["results"]}
    return HostFiles(References.model_validate({"inputs": inputs, "outputs": outputs}))


def read(host_files: HostFiles, location: str, caller: str | None = None) -> bytes:
    with host_files.open_input(location, caller) as source:
        assert source.name == location.rpartition("/")[2]
        assert isinstance(source.path, Path)
        return source.path.read_bytes()


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_error(host_files: HostFiles, location: str, caller: str | None = None) -> str:
    with pytest.raises(BadParameter) as raised:
        read(host_files, location, caller)
    return str(raised.value)


@pytest.mark.parametrize(
    "location",
    [
        "", "/", "scans", "scans/", "secret/key", "results/2026", "/etc/passwd", "scans/../secret/key",
        "scans/2026/../../secret/key", "scans//2026/stack.tif", "scans/./2026/stack.tif", "scans/2026/stack.tif/",
        "scans/2026", "scans/2026/stack.tif/x", "scans/no/such.tif", "scans/\0", "scans/" + "x" * 300, "scans/\ud800",
    ],
)  # fmt: skip
def test_locations_outside_the_configured_folders_are_rejected(host: Path, location: str) -> None:
    message = read_error(make_host_files(host), location)
    assert message.startswith("input: ")
    assert str(host) not in message


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("scans/link.tif", "link"),
        ("scans/folder/key", "link"),
        ("scans/2026/up/secret/key", "link"),
        ("scans/pipe.tif", "not a file"),
    ],
)
def test_links_are_not_followed_and_pipes_are_not_opened(host: Path, location: str, reason: str) -> None:
    scans = host / "scans"
    (scans / "link.tif").symlink_to(host / "secret" / "key")
    (scans / "folder").symlink_to(host / "secret")
    (scans / "2026" / "up").symlink_to("../..")
    os.mkfifo(scans / "pipe.tif")
    assert reason in read_error(make_host_files(host), location)


def test_configured_folder_may_be_a_link(host: Path) -> None:
    (host / "scans").rename(host / "disk")
    (host / "scans").symlink_to("disk")
    assert read(make_host_files(host), "scans/2026/stack.tif") == b"a stack"


def test_open_input_is_not_affected_by_replacing_the_file(host: Path) -> None:
    """Replacing the file with a link after it was opened does not redirect reads."""
    path = host / "scans" / "2026" / "stack.tif"
    with make_host_files(host).open_input("scans/2026/stack.tif", None) as source:
        path.unlink()
        path.symlink_to(host / "secret" / "key")
        assert source.path.read_bytes() == b"a stack"


def test_replacing_a_parent_folder_with_a_link_does_not_redirect_the_open(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_open, opened_paths = os.open, list[Any]()

    def open_and_swap(path: Any, *arguments: Any, **options: Any) -> int:
        opened_paths.append(path)
        if path == "stack.tif":
            (host / "scans" / "2026").rename(host / "scans" / "moved")
            (host / "scans" / "2026").symlink_to(host / "secret")
            (host / "secret" / "stack.tif").write_bytes(b"confidential")
        return original_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_and_swap)
    assert read(make_host_files(host), "scans/2026/stack.tif") == b"a stack"
    assert "2026" in opened_paths


def test_folders_are_restricted_to_their_keys(host: Path) -> None:
    host_files = make_host_files(host, scans=("ada",))
    assert read(host_files, "scans/2026/stack.tif", "ada") == b"a stack"
    for caller in ("bob", None):
        message = read_error(host_files, "scans/2026/stack.tif", caller)
        assert message == read_error(host_files, "elsewhere/stack.tif", caller)
        assert "scans" not in message


def test_inputs_are_rejected_if_no_folders_are_configured(host: Path) -> None:
    assert "Upload the stack" in read_error(HostFiles(References()), "scans/2026/stack.tif")


@pytest.mark.parametrize("is_link", [False, True])
def test_existing_output_is_replaced_only_with_overwrite_and_links_are_not_followed(
    host: Path, *, is_link: bool
) -> None:
    host_files, result, location = make_host_files(host), host / "result", "results/labels.tif"
    output, secret = host / "results" / "labels.tif", host / "secret" / "key"
    output.symlink_to(secret) if is_link else output.write_bytes(b"older")
    old_content = output.read_bytes()
    result.write_bytes(b"newer")
    with pytest.raises(OutputExists, match="overwrite=true"):
        host_files.check_locations(None, location, None)
    with pytest.raises(OutputExists):
        host_files.put(result, location, None, "one")
    assert output.read_bytes() == old_content
    host_files.check_locations(None, location, None, overwrite=True)
    host_files.put(result, location, None, "one", overwrite=True)
    assert (output.read_bytes(), output.is_symlink(), list_names(host / "results")) == (
        b"newer",
        False,
        ["2026", "labels.tif"],
    )
    assert secret.read_bytes() == b"confidential"


def test_output_written_before_a_crash_is_recognized_until_it_is_confirmed(host: Path) -> None:
    host_files, result, location = make_host_files(host), host / "result", "results/labels.tif"
    result.write_bytes(b"labels")
    # An incomplete file from an earlier crash is rewritten.
    (host / "results" / ".stackseg-one.part").write_bytes(b"lab")
    for _ in range(2):
        host_files.put(result, location, None, "one")
    with pytest.raises(OutputExists):
        host_files.put(result, location, None, "two")
    host_files.confirm_delivery(location, None, "one")
    assert list_names(host / "results") == ["2026", "labels.tif"]
    labels = host / "results" / "labels.tif"
    assert (labels.read_bytes(), labels.stat().st_nlink) == (b"labels", 1)


@pytest.mark.parametrize("location", ["scans/x.tif", "results/no/x.tif", "results/link/x.tif", "results/../x.tif"])
def test_outputs_outside_the_configured_folders_are_rejected(host: Path, location: str) -> None:
    (host / "results" / "link").symlink_to(host / "secret")
    initial_paths = sorted(host.rglob("*"))
    with pytest.raises(BadParameter, match="output_to"):
        make_host_files(host).put(host / "secret" / "key", location, None, "one")
    assert sorted(host.rglob("*")) == initial_paths


@pytest.mark.parametrize("overwrite", [False, True])
def test_output_that_is_a_folder_is_rejected(host: Path, *, overwrite: bool) -> None:
    host_files, result = make_host_files(host), host / "result.tif"
    result.write_bytes(b"labels")
    with pytest.raises(BadParameter, match="is a folder"):
        host_files.check_locations(None, "results/2026", None, overwrite=overwrite)
    with pytest.raises(BadParameter, match=r"folder|directory"):
        host_files.put(result, "results/2026", None, "ticket", overwrite=overwrite)
    assert list_names(host / "results") == ["2026"]


def test_result_does_not_replace_the_input(host: Path) -> None:
    scans = host / "scans"
    write_zarr(scans / "a.zarr", np.zeros((2, 3, 4), np.uint8))
    write_zarr(scans / "b.zarr" / "0.zarr", np.zeros((2, 3, 4), np.uint8))
    # The same folder with another path, as in containers.
    folders = {"scans": {"folder": scans}, "results": {"folder": host / "link"}}
    (host / "link").symlink_to(scans)
    host_files = HostFiles(References.model_validate({"inputs": folders, "outputs": folders}))
    for root in folders:
        for location, output in (
            ("scans/2026/stack.tif", "2026/stack.tif"),
            ("scans/a.zarr", "a.zarr"),
            ("scans/b.zarr/0.zarr", "b.zarr"),
        ):
            is_zarr = output.endswith(".zarr")
            with pytest.raises(BadParameter, match="would replace the input"):
                host_files.check_locations(location, f"{root}/{output}", None, overwrite=True, is_zarr=is_zarr)
        host_files.check_locations("scans/a.zarr", f"{root}/a.zarr/labels/nuclei", None, is_zarr=True)
        host_files.check_locations("scans/2026/stack.tif", f"{root}/2026/labels.tif", None)


def test_full_disk_during_output_raises_out_of_storage(host: Path) -> None:
    host_files, result = make_host_files(host), host / "result.tif"
    result.write_bytes(bytes(10_000))
    with full_disk(5000), pytest.raises(OutOfStorage, match="results/labels"):
        host_files.put(result, "results/labels.tif", None, "ticket")
    assert list_names(host / "results") == ["2026"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="requires permission to mount")
def test_full_disk_is_reported_by_the_check_of_the_request(host: Path) -> None:
    host_files, full_folder = make_host_files(host), host / "results" / "2026"
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full_folder], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip("the system does not permit mounting")
    try:
        host_files.check_locations(None, "results/2026/labels.tif", None)
        with pytest.raises(OSError, match="No space"), (full_folder / "filler").open("wb") as file:
            file.write(bytes(2**20))
        with pytest.raises(OutOfStorage, match="results/2026/labels"):
            host_files.check_locations(None, "results/2026/labels.tif", None)
        subprocess.run(["mount", "-o", "remount,ro", full_folder], check=True)
        with pytest.raises(BadParameter, match="permission"):
            host_files.check_locations(None, "results/2026/labels.tif", None)
    finally:
        subprocess.run(["umount", full_folder], check=True)


def test_invalid_store_names_are_rejected(host: Path) -> None:
    image = host / "results" / "image.zarr"
    image.mkdir()
    (image / "zarr.json").write_text("{}")
    for name in ("zarr.json", ".zgroup", ".hidden", "a\\b", "a\nb", "é" * 125):
        with pytest.raises(BadParameter, match="is not a valid name for a Zarr store"):
            make_host_files(host).check_locations(None, f"results/image.zarr/labels/{name}", None, is_zarr=True)
    make_host_files(host).check_locations(None, f"results/image.zarr/labels/{'a' * 249}", None, is_zarr=True)
    with pytest.raises(BadParameter, match="is not a valid name for a Zarr store"):
        make_host_files(host).check_locations(None, "results/.zarr", None, is_zarr=True)


def test_table_in_the_labels_group_is_written_as_a_plain_file(host: Path) -> None:
    image, location, host_files = (
        host / "results" / "image.zarr",
        "results/image.zarr/labels/a.csv",
        make_host_files(host),
    )
    image.mkdir()
    (image / "zarr.json").write_text("{}")
    (host / "table").write_text("label")
    query = Query(measurements="csv", output_to=location)
    check_host_files(host_files, query, None, "labels")
    host_files.put(host / "table", location, None, "one")
    host_files.confirm_delivery(location, None, "one")
    with pytest.raises(OutputExists):
        check_host_files(host_files, query, None, "labels")
    check_host_files(host_files, Query(measurements="csv", output_to=location, overwrite=True), None, "labels")
    with pytest.raises(BadParameter, match="not a Zarr store"):
        check_host_files(host_files, Query(output_to=location, overwrite=True), None, "labels")


def test_labels_are_deleted_if_they_cannot_be_registered(host: Path) -> None:
    image, store = host / "results" / "image.zarr", host / "made" / "labels" / "cells"
    store.mkdir(parents=True)
    for path in (store, store.parent):
        (path / "zarr.json").write_text('{"attributes": {"ome": {"labels": ["cells"]}}}')
    (image / "labels").mkdir(parents=True)
    (image / "zarr.json").write_text("{}")
    (image / "labels" / "zarr.json").write_text("[")
    with pytest.raises(BadFile):
        make_host_files(host).put_zarr(store, "results/image.zarr/labels/cells", None, "one")
    assert [path.name for path in (image / "labels").iterdir()] == ["zarr.json"]


def test_missing_configured_folder_is_a_configuration_error(host: Path) -> None:
    for kind in ("inputs", "outputs"):
        with pytest.raises(ConfigError, match=f"references.{kind}: scans"):
            HostFiles(References.model_validate({kind: {"scans": str(host / "nowhere")}}))


def make_remote_stores(**stores: Any) -> HostFiles:
    return HostFiles(References.model_validate({"stores": stores}))


def test_remote_stores_are_restricted_to_configured_urls(host: Path) -> None:
    host_files = make_remote_stores(lab={"url": "https://host.org/data/", "keys": ("ada",)})
    for location in (
        "lab/a.zarr",
        "lab/2026/b/a.zarr/",
        "https://host.org/data/a.zarr",
        "https://host.org/data/x/a.zarr/",
    ):
        with host_files.open_input(location, "ada") as source:
            assert source.name == "a.zarr"
        assert not host_files.is_folder(location, "ada")
        for caller in ("grace", None):
            with pytest.raises(BadParameter), host_files.open_input(location, caller):
                pass
    for location in (
        "lab", "lab/", "lab/../a.zarr", "lab//a.zarr", "lab/./a", "https://host.org/data", "https://host.org/data/",
        "https://host.org/data/../secret", "https://host.org/database/a", "https://host.org.evil/data/a",
        "https://ada@host.org/data/a", "http://host.org/data/a", "http://169.254.169.254/latest", "file:///etc/passwd",
        "https://host.org/data/a?b", "https://host.org/data/a#b", "https://host.org/data/%2e%2e/a",
        "https://host.org/data/b%2f..%2f../a", "https://host.org/data/%00/a",
    ):  # fmt: skip
        with pytest.raises(BadParameter), host_files.open_input(location, "ada"):
            pass
    for location, name in (("lab/%2e%2e/a%2fb", "a%2fb"), ("https://host.org/data/my%20image.zarr", "my image.zarr")):
        with host_files.open_input(location, "ada") as source:
            assert source.name == name
    for location in ("lab/a.zarr", "s3://bucket/a.zarr"):
        with (
            pytest.raises(
                BadParameter, match=r"not begin with the URL of a configured store|must begin with one of scans"
            ),
            make_host_files(host).open_input(location, None),
        ):
            pass


@pytest.mark.parametrize(
    "stores",
    [{"lab": "ftp://host/a"}, {"lab": "https://a:b@host/a"}, {"lab": "https://host/a?b"}, {"lab": "az://box/a"}],
)
def test_unusable_store_is_a_configuration_error(stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises((ConfigError, ValueError)):
        make_remote_stores(**stores)


def test_folder_and_store_with_the_same_name_are_rejected(host: Path) -> None:
    with pytest.raises(ValueError, match="rename one of them"):
        References.model_validate({"inputs": {"lab": str(host)}, "stores": {"lab": "s3://a/b"}})


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_metadata_of_the_labeled_image_is_copied_without_pixels(host: Path, version: str) -> None:
    image = write_zarr(host / "results" / "image.zarr", np.ones((2, 3, 4), np.uint8), version=version)
    copy = host / "copy"

    make_host_files(host).copy_image_metadata("results/image.zarr/labels/cells", None, copy)

    names = {".zgroup", ".zattrs", "0/.zarray", "0/.zattrs"} if version == "0.4" else {"zarr.json", "0/zarr.json"}
    assert {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()} == names
    assert all(json.loads((copy / name).read_text()) == json.loads((image / name).read_text()) for name in names)
