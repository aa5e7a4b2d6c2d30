from __future__ import annotations

import gzip
import io
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_service import Service, start_service
from live import TIFF, LabelTiff, as_tiff, parse_problem

from service.core.config import Settings
from service.serving.learning.annotations import AnnotationStore

PIXELS = np.arange(6 * 8 * 10, dtype=np.uint16).reshape(6, 8, 10)
TRUTH = np.zeros(PIXELS.shape, np.uint32)
TRUTH[1:3, 1:4, 1:4], TRUTH[3:5, 4:7, 5:9], TRUTH[5, 7, 9] = 1, 7, 70_000
NPY = {"Content-Type": "application/x-npy"}
THICKER = as_tiff(TRUTH.astype(np.uint8), metadata={"axes": "ZYX", "spacing": 0.6, "unit": "um"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def service(bands_repository: Path, folder: Path) -> Iterator[Service]:
    with start_service(bands_repository, folder, annotations={"quota_bytes": 100_000}) as running:
        yield running


@pytest.fixture
def stack(service: Service) -> Iterator[str]:
    service.caller = "ann"
    response = service.post("/stacks", as_tiff(PIXELS), TIFF | {"X-Filename": "cells.tif"})
    yield str(response.json()["id"])
    for owner in ("ann", "bob"):
        service.caller = owner
        for stored in service.client.get("/annotations").json()["annotations"]:
            assert service.client.delete(f"/annotations/{stored['id']}").status_code == 204
    service.caller = None


def encode_npy(labels: Any = TRUTH) -> bytes:
    file = io.BytesIO()
    np.save(file, labels)
    return file.getvalue()


def post_labels(service: Service, content: bytes, headers: dict[str, str] = NPY, **query: Any) -> Any:
    return service.post("/annotations", content, headers, **query)


def download(service: Service, stored: dict[str, Any], part: str) -> LabelTiff:
    """Download the image or the labels of an annotated stack."""
    return LabelTiff(service.client.get(f"/annotations/{stored['id']}/{part}").content)


def test_stored_image_and_labels_can_be_downloaded(service: Service, stack: str) -> None:
    response = post_labels(service, encode_npy(), stack=stack, name="corrected", changes=12, region="1:6,0:8,0:10")
    assert response.status_code == 201, response.text
    stored = response.json()
    assert response.headers["location"] == f"/annotations/{stored['id']}"
    expected_members = {
        "name": "corrected",
        "owner": "ann",
        "shape": [6, 8, 10],
        "objects": 3,
        "region": "1:6,0:8,0:10",
    }
    assert stored == stored | expected_members | {"changes": 12, "base_model": None, "voxel_size": [0.5, 0.2, 0.2]}
    assert service.client.get("/annotations").json() == {"annotations": [stored]}
    assert service.client.get(response.headers["location"]).json() == stored
    labels = service.client.get(f"{response.headers['location']}/labels")
    assert labels.headers["content-disposition"] == 'attachment; filename="corrected_labels.ome.tif"'
    for part, pixels in (("image", PIXELS), ("labels", TRUTH)):
        downloaded = download(service, stored, part)
        assert np.array_equal(downloaded.pixels, pixels)
        assert (downloaded.pixels.dtype, downloaded.axes, downloaded.voxel_size) == (
            pixels.dtype,
            "ZYX",
            (0.5, 0.2, 0.2),
        )
    assert service.client.delete(response.headers["location"]).status_code == 204
    assert parse_problem(service.client.get(response.headers["location"])) == (404, "unknown-annotation")
    assert service.leftovers() == []


def test_downloads_are_complete_or_missing_while_annotated_stacks_are_deleted(service: Service, stack: str) -> None:
    for _ in range(10):
        stored = post_labels(service, encode_npy(), stack=stack).json()
        path = f"/annotations/{stored['id']}"
        complete = service.client.get(f"{path}/image").content
        with ThreadPoolExecutor(8) as pool:
            downloads = [pool.submit(service.client.get, f"{path}/image") for _ in range(8)]
            deletion = pool.submit(service.client.delete, path)
        assert deletion.result().status_code == 204
        for response in (download.result() for download in downloads):
            if response.status_code == 200:
                assert response.content == complete
            else:
                assert parse_problem(response) == (404, "unknown-annotation")


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (gzip.compress(encode_npy(TRUTH.astype(np.uint8)), mtime=0), NPY | {"Content-Encoding": "gzip"}),
        (gzip.compress(encode_npy(TRUTH.astype(np.int32)), mtime=0), {"Content-Type": "application/gzip"}),
        (encode_npy(TRUTH.astype(">u4")), {"Content-Type": "application/octet-stream"}),
        (as_tiff(TRUTH.astype(np.uint8)), TIFF),
        (as_tiff(TRUTH.astype(np.uint8), compression="zlib"), TIFF),
    ],
)
def test_labels_are_accepted_in_all_supported_formats(
    service: Service, stack: str, content: bytes, headers: dict[str, str]
) -> None:
    response = post_labels(service, content, headers, stack=stack, region="0:5,0:8,0:10")
    assert (response.status_code, response.json().get("objects")) == (201, 2), response.text


@pytest.mark.parametrize(
    ("labels", "query", "expected"),
    [
        (encode_npy(TRUTH[:5]), {}, "5x8x10"),
        (encode_npy(TRUTH[0]), {}, "8x10"),
        (encode_npy(TRUTH.astype(np.float32)), {}, "uint32"),
        (encode_npy(TRUTH.astype(np.int32) - 1), {}, "negative numbers"),
        (encode_npy(np.asfortranarray(TRUTH)), {}, "ascontiguousarray"),
        (encode_npy()[:-1], {}, "damaged"),
        (gzip.compress(encode_npy(), mtime=0)[:-30], {}, "truncated"),
        (gzip.compress(b"no array", mtime=0), {}, "Only .npy"),
        (encode_npy()[:20], {}, ".npy"),
        (np.lib.format.MAGIC_PREFIX + b"\2\0" + struct.pack("<I", 2**32 - 1), {}, "memory"),
        (as_tiff(np.zeros((7, 16, 20), np.uint16), compression="zlib"), {}, "larger"),
        (as_tiff(TRUTH.astype(np.uint8), imagej=False, compression="jpeg"), {}, "JPEG, which can change label numbers"),
        (as_tiff(np.zeros((3, 2, 8, 10), np.uint8), metadata={"axes": "ZCYX"}), {}, "2 channels"),
        (as_tiff(TRUTH[:5].astype(np.uint8)), {}, "5x8x10"),
        (b"", {}, "no file"),
        (b"nothing known", {}, "TIFF"),
        (encode_npy(), {"region": "0:7,0:8,0:10"}, "region"),
        (encode_npy(), {"region": "0:6,3:3,0:10"}, "region"),
        (encode_npy(), {"region": "all"}, "region"),
        (encode_npy(), {"channel": "1"}, "channel"),
        (encode_npy(), {"time": "all"}, "time"),
        (encode_npy(), {"stack": "0" * 32}, "no such stack"),
        (encode_npy(), {"job": "0" * 32}, "no such job"),
    ],
)
def test_invalid_labels_are_rejected_with_a_reason(
    service: Service, stack: str, labels: bytes, query: dict[str, str], expected: str
) -> None:
    response = post_labels(service, labels, **{"stack": stack} | query)
    assert 400 <= response.status_code < 500, response.text
    assert expected in response.json()["detail"]
    assert service.client.get("/annotations").json() == {"annotations": []}


def test_decompression_bomb_is_rejected(service: Service, stack: str) -> None:
    bomb = gzip.compress(encode_npy(np.zeros((64, 512, 512), np.uint16)))
    assert parse_problem(post_labels(service, bomb, stack=stack)) == (422, "bad-parameter")


def test_stack_is_read_with_the_parameters_of_the_job(service: Service, stack: str) -> None:
    two = as_tiff(np.stack([PIXELS, PIXELS + 1], 1), metadata={"axes": "ZCYX", "spacing": 0.5, "unit": "um"})
    other = service.post("/stacks", two).json()["id"]
    assert "2 channels" in post_labels(service, encode_npy(), stack=other).json()["detail"]
    job = service.run(b"", stack=other, channel="1")
    stored = post_labels(service, encode_npy(), job=job["id"]).json()
    assert (stored["base_model"], stored["job"], stored["stack"]) == ("bands/1", job["id"], other)
    assert np.array_equal(download(service, stored, "image").pixels, PIXELS + 1)


def post_form(service: Service, files: dict[str, tuple[str, bytes]], data: Any = None, **query: str) -> Any:
    return service.client.post("/annotations", files=files, data=data, params=query)


def test_ignored_voxels_are_stored_and_not_counted_as_an_object(service: Service, stack: str) -> None:
    labels = np.where(np.arange(6)[:, None, None] % 2, TRUTH, 9)
    stored = post_labels(service, encode_npy(labels), stack=stack, ignore_label=9, partial=True).json()
    assert (stored["objects"], stored["ignore_label"], stored["partial"]) == (3, 9, True)
    assert np.array_equal(download(service, stored, "labels").pixels, labels)
    complete = post_labels(service, encode_npy(), stack=stack).json()
    assert (complete["objects"], complete["ignore_label"], complete["partial"]) == (3, None, False)
    large = post_labels(service, encode_npy(np.where(TRUTH, TRUTH, 2**31)), stack=stack, ignore_label=2**31).json()
    assert large["objects"] == 3


def test_form_with_a_stack_and_its_labels_is_stored(service: Service, stack: str) -> None:
    # The image is larger than a written block. Both orders of the fields are valid.
    large = np.zeros((6, 256, 1024), np.uint16) + np.arange(6, dtype=np.uint16)[:, None, None]
    labels = np.zeros(large.shape, np.uint16)
    labels[:, 20:30, 40:60] = 3
    for parts in (("file", "labels"), ("labels", "file")):
        sent = {"file": ("embryo.tif", as_tiff(large)), "labels": ("my labels.tif", as_tiff(labels))}
        stored = post_form(service, {part: sent[part] for part in parts}, region="0:6,0:200,0:1000").json()
        expected_members = {"name": "embryo.tif", "shape": [6, 256, 1024], "objects": 1, "voxel_size": [0.5, 0.2, 0.2]}
        assert stored == stored | expected_members | {"stack": None, "job": None}, stored
        assert np.array_equal(download(service, stored, "image").pixels, large)
        assert np.array_equal(download(service, stored, "labels").pixels, labels)
        assert service.client.delete(f"/annotations/{stored['id']}").status_code == 204
    assert post_form(service, {"labels": ("a.npy", encode_npy())}, stack=stack).json()["name"] == "cells.tif"
    assert service.leftovers() == []
    assert service.runtime.scratch_space.used_bytes == 0


@pytest.mark.parametrize(
    ("change", "query", "expected"),
    [
        ({"labels": ("a.tif", as_tiff(TRUTH[1:].astype(np.uint8)))}, {}, "5x8x10"),
        ({"labels": ("a.npy", encode_npy(TRUTH.astype(np.int64)))}, {}, "labels.astype('uint32')"),
        ({"labels": ("a.tif", as_tiff(TRUTH.astype(np.float32), imagej=False))}, {}, "labels.astype('uint32')"),
        (
            {"labels": ("a.tif", THICKER)},
            {},
            "voxel_size: the labels specify 0.6,0.2,0.2 micrometers (Z,Y,X), but the stack specifies 0.5,0.2,0.2",
        ),
        ({"file": ("a.tif", as_tiff(np.zeros((3, 2, 8, 10), np.uint8), metadata={"axes": "ZCYX"}))}, {}, "2 channels"),
        ({"file": ("a.txt", b"nothing known")}, {}, "TIFF"),
        ({"labels": None}, {}, "form field 'labels'"),
        ({"file": None}, {}, "Send a form with the stack in the field 'file' and the labels in the field 'labels'"),
        ({}, {"stack": "STORED"}, "Use only one"),
        ({"region": ("", b"0:1,0:2,0:2")}, {}, "parameters in the URL"),
    ],
)
def test_invalid_form_is_rejected_with_a_reason(
    service: Service, stack: str, change: dict[str, Any], query: dict[str, str], expected: str
) -> None:
    files = {"file": ("a.tif", as_tiff(PIXELS)), "labels": ("b.npy", encode_npy())} | change
    parameters = dict.fromkeys(query, stack)
    response = post_form(service, {part: sent for part, sent in files.items() if sent is not None}, **parameters)
    assert 400 <= response.status_code < 500, response.text
    assert expected in response.json()["detail"]
    assert service.client.get("/annotations").json() == {"annotations": []}


def test_voxel_size_parameter_overrides_the_files(service: Service, stack: str) -> None:
    stored = post_form(
        service, {"file": ("a.tif", as_tiff(PIXELS)), "labels": ("b.tif", THICKER)}, voxel_size="0.6,0.2,0.2"
    )
    assert stored.json()["voxel_size"] == [0.6, 0.2, 0.2]


def test_labels_of_one_time_point_are_stored_with_its_image(service: Service, stack: str) -> None:
    series = np.stack([PIXELS, PIXELS + 1, PIXELS + 2])
    movie = as_tiff(series, metadata={"axes": "TZYX", "spacing": 0.5, "unit": "um"})
    job = service.run(b"", stack=service.post("/stacks", movie).json()["id"], time="1:3")
    assert "one time point. Specify which" in post_labels(service, encode_npy(), job=job["id"]).json()["detail"]
    assert "time" in post_labels(service, encode_npy(), job=job["id"], time="3").json()["detail"]
    stored = [post_labels(service, encode_npy(), job=job["id"], time=str(time)).json() for time in (1, 2, 2)]
    for k, annotation in enumerate(stored[:2]):
        assert np.array_equal(download(service, annotation, "image").pixels, PIXELS + 1 + k)
    assert [annotation["time"] for annotation in stored] == [1, 2, 2]
    assert [annotation["overlaps"] for annotation in stored] == [[], [], [stored[1]["id"]]]


def test_annotated_stacks_of_other_keys_are_hidden_and_each_key_has_its_own_quota(service: Service, stack: str) -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, (6, 64, 100), np.uint16)
    ids = {}
    for owner in ("ann", "bob"):
        service.caller = owner
        ids[owner] = service.post("/stacks", as_tiff(noise)).json()["id"]
    labels = encode_npy(np.ones(noise.shape, np.uint8))
    service.caller = "ann"
    stored = post_labels(service, labels, stack=ids["ann"]).json()
    full = post_labels(service, labels, stack=ids["ann"])
    assert (parse_problem(full), "Delete some" in full.json()["detail"]) == ((507, "out-of-storage"), True)
    service.caller = "bob"
    assert post_labels(service, labels, stack=ids["bob"]).status_code == 201
    assert len(service.client.get("/annotations").json()["annotations"]) == 1
    for method, path in (("GET", ""), ("GET", "/image"), ("GET", "/labels"), ("DELETE", "")):
        response = service.client.request(method, f"/annotations/{stored['id']}{path}")
        assert parse_problem(response) == (404, "unknown-annotation")


def test_annotated_stacks_survive_a_restart_and_damaged_folders_are_ignored(
    service: Service, stack: str, folder: Path
) -> None:
    stored = post_labels(service, encode_npy(), stack=stack).json()
    annotations_folder = folder / "jobs" / "annotations"
    damaged = annotations_folder / f"{3:032x}"
    damaged.mkdir()
    (damaged / "annotation.json").write_text("[1]")
    store = AnnotationStore(annotations_folder, quota_bytes=100_000)
    assert [found.id for found in store.list_newest_first("ann")] == [stored["id"]]
    again = post_labels(service, encode_npy(), stack=stack, region="0:2,0:8,0:10").json()
    assert again["overlaps"] == [stored["id"]]
    listed = service.client.get("/annotations").json()["annotations"]
    assert [report["overlaps"] for report in listed] == [[stored["id"]], [again["id"]]]
    assert service.client.get(f"/annotations/{stored['id']}").json()["overlaps"] == [again["id"]]


def test_annotations_folder_and_quota_are_configurable(bands_repository: Path, tmp_path: Path) -> None:
    for jobs, chosen, expected in (
        (None, tmp_path / "own", tmp_path / "own"),
        (tmp_path, None, tmp_path / "annotations"),
        (None, None, Path(os.environ["XDG_DATA_HOME"]) / "stackseg" / "annotations"),
    ):
        settings = Settings.model_validate({"jobs": {"folder": jobs}, "annotations": {"folder": chosen}})
        assert settings.annotations_folder == expected
    with start_service(bands_repository, tmp_path, annotations={"quota_bytes": 0}) as service:
        assert service.client.get("/limits").json()["corrections"] is False
        stack = service.post("/stacks", as_tiff(PIXELS)).json()["id"]
        assert parse_problem(post_labels(service, encode_npy(), stack=stack)) == (403, "switched-off")


def test_planes_that_would_fill_the_memory_are_rejected_before_decoding(service: Service) -> None:
    service.caller = "ann"
    edge = 8200
    stack = as_tiff(np.zeros((1, edge, edge), np.uint8), compression="zlib")
    stored = service.post("/stacks", stack).json()["id"]
    labels = gzip.compress(encode_npy(np.zeros((1, edge, edge), np.uint8)))
    response = post_labels(service, labels, {"Content-Type": "application/gzip"}, stack=stored)
    assert parse_problem(response) == (413, "too-large")
    assert "Crop the stack" in response.json()["detail"]
    service.caller = None
