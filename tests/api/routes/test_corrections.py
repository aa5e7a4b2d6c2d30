from __future__ import annotations

import gzip
import io
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_service import Service, start
from live import TIFF, Answer, as_tiff, problem

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
    with start(bands_repository, folder, annotations={"quota_bytes": 100_000}) as running:
        yield running


@pytest.fixture
def stack(service: Service) -> Iterator[str]:
    service.caller = "ann"
    answer = service.post("/stacks", as_tiff(PIXELS), TIFF | {"X-Filename": "cells.tif"})
    yield str(answer.json()["id"])
    for owner in ("ann", "bob"):
        service.caller = owner
        for kept in service.client.get("/annotations").json()["annotations"]:
            assert service.client.delete(f"/annotations/{kept['id']}").status_code == 204
    service.caller = None


def npy(labels: Any = TRUTH) -> bytes:
    file = io.BytesIO()
    np.save(file, labels)
    return file.getvalue()


def keep(service: Service, content: bytes, headers: dict[str, str] = NPY, **query: Any) -> Any:
    return service.post("/annotations", content, headers, **query)


def load(service: Service, kept: dict[str, Any], part: str) -> Answer:
    """The image or the labels of an annotated stack."""
    return Answer(service.client.get(f"/annotations/{kept['id']}/{part}").content)


def test_image_and_labels_come_back_as_they_were_kept(service: Service, stack: str) -> None:
    answer = keep(service, npy(), stack=stack, name="corrected", changes=12, region="1:6,0:8,0:10")
    assert answer.status_code == 201, answer.text
    kept = answer.json()
    assert answer.headers["location"] == f"/annotations/{kept['id']}"
    stated = {"name": "corrected", "owner": "ann", "shape": [6, 8, 10], "objects": 3, "region": "1:6,0:8,0:10"}
    assert kept == kept | stated | {"changes": 12, "base_model": None, "voxel_size": [0.5, 0.2, 0.2]}
    assert service.client.get("/annotations").json() == {"annotations": [kept]}
    assert service.client.get(answer.headers["location"]).json() == kept
    labels = service.client.get(f"{answer.headers['location']}/labels")
    assert labels.headers["content-disposition"] == 'attachment; filename="corrected_labels.ome.tif"'
    for part, pixels in (("image", PIXELS), ("labels", TRUTH)):
        read = load(service, kept, part)
        assert np.array_equal(read.pixels, pixels)
        assert (read.pixels.dtype, read.axes, read.voxel_size) == (pixels.dtype, "ZYX", (0.5, 0.2, 0.2))
    assert service.client.delete(answer.headers["location"]).status_code == 204
    assert problem(service.client.get(answer.headers["location"])) == (404, "unknown-annotation")
    assert service.leftovers() == []


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (gzip.compress(npy(TRUTH.astype(np.uint8)), mtime=0), NPY | {"Content-Encoding": "gzip"}),
        (gzip.compress(npy(TRUTH.astype(np.int32)), mtime=0), {"Content-Type": "application/gzip"}),
        (npy(TRUTH.astype(">u4")), {"Content-Type": "application/octet-stream"}),
        (as_tiff(TRUTH.astype(np.uint8)), TIFF),
        (as_tiff(TRUTH.astype(np.uint8), compression="zlib"), TIFF),
    ],
)
def test_labels_are_read_in_all_their_forms(
    service: Service, stack: str, content: bytes, headers: dict[str, str]
) -> None:
    answer = keep(service, content, headers, stack=stack, region="0:5,0:8,0:10")
    assert (answer.status_code, answer.json().get("objects")) == (201, 2), answer.text


@pytest.mark.parametrize(
    ("labels", "query", "expected"),
    [
        (npy(TRUTH[:5]), {}, "5x8x10"),
        (npy(TRUTH[0]), {}, "8x10"),
        (npy(TRUTH.astype(np.float32)), {}, "uint32"),
        (npy(TRUTH.astype(np.int32) - 1), {}, "below 0"),
        (npy(np.asfortranarray(TRUTH)), {}, "ascontiguousarray"),
        (npy()[:-1], {}, "damaged"),
        (gzip.compress(npy(), mtime=0)[:-30], {}, "truncated"),
        (gzip.compress(b"no array", mtime=0), {}, "Only .npy"),
        (npy()[:20], {}, ".npy"),
        (np.lib.format.MAGIC_PREFIX + b"\2\0" + struct.pack("<I", 2**32 - 1), {}, "memory"),
        (as_tiff(np.zeros((7, 16, 20), np.uint16), compression="zlib"), {}, "larger"),
        (as_tiff(np.zeros((3, 2, 8, 10), np.uint8), metadata={"axes": "ZCYX"}), {}, "2 channels"),
        (as_tiff(TRUTH[:5].astype(np.uint8)), {}, "5x8x10"),
        (b"", {}, "no file"),
        (b"nothing known", {}, "TIFF"),
        (npy(), {"region": "0:7,0:8,0:10"}, "region"),
        (npy(), {"region": "0:6,3:3,0:10"}, "region"),
        (npy(), {"region": "all"}, "region"),
        (npy(), {"channel": "1"}, "channel"),
        (npy(), {"time": "all"}, "time"),
        (npy(), {"stack": "0" * 32}, "no such stack"),
        (npy(), {"job": "0" * 32}, "no such job"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_words(
    service: Service, stack: str, labels: bytes, query: dict[str, str], expected: str
) -> None:
    answer = keep(service, labels, **{"stack": stack} | query)
    assert 400 <= answer.status_code < 500, answer.text
    assert expected in answer.json()["detail"]
    assert service.client.get("/annotations").json() == {"annotations": []}


def test_a_bomb_of_zeros_is_not_decompressed(service: Service, stack: str) -> None:
    bomb = gzip.compress(npy(np.zeros((64, 512, 512), np.uint16)))
    assert problem(keep(service, bomb, stack=stack)) == (422, "bad-parameter")


def test_a_job_says_how_the_stack_was_read(service: Service, stack: str) -> None:
    two = as_tiff(np.stack([PIXELS, PIXELS + 1], 1), metadata={"axes": "ZCYX", "spacing": 0.5, "unit": "um"})
    other = service.post("/stacks", two).json()["id"]
    assert "2 channels" in keep(service, npy(), stack=other).json()["detail"]
    job = service.run(b"", stack=other, channel="1")
    kept = keep(service, npy(), job=job["id"]).json()
    assert (kept["base_model"], kept["job"], kept["stack"]) == ("bands/1", job["id"], other)
    assert np.array_equal(load(service, kept, "image").pixels, PIXELS + 1)


def send(service: Service, files: dict[str, tuple[str, bytes]], data: Any = None, **query: str) -> Any:
    return service.client.post("/annotations", files=files, data=data, params=query)


def test_a_script_sends_a_stack_and_its_labels_as_one_form(service: Service, stack: str) -> None:
    # Larger than what is written at once, and in either order.
    large = np.zeros((6, 256, 1024), np.uint16) + np.arange(6, dtype=np.uint16)[:, None, None]
    labels = np.zeros(large.shape, np.uint16)
    labels[:, 20:30, 40:60] = 3
    for parts in (("file", "labels"), ("labels", "file")):
        sent = {"file": ("embryo.tif", as_tiff(large)), "labels": ("my labels.tif", as_tiff(labels))}
        kept = send(service, {part: sent[part] for part in parts}, region="0:6,0:200,0:1000").json()
        stated = {"name": "embryo.tif", "shape": [6, 256, 1024], "objects": 1, "voxel_size": [0.5, 0.2, 0.2]}
        assert kept == kept | stated | {"stack": None, "job": None}, kept
        assert np.array_equal(load(service, kept, "image").pixels, large)
        assert np.array_equal(load(service, kept, "labels").pixels, labels)
        assert service.client.delete(f"/annotations/{kept['id']}").status_code == 204
    assert send(service, {"labels": ("a.npy", npy())}, stack=stack).json()["name"] == "cells.tif"
    assert service.leftovers() == []
    assert service.runtime.scratch_space.used == 0


@pytest.mark.parametrize(
    ("change", "query", "expected"),
    [
        ({"labels": ("a.tif", as_tiff(TRUTH[1:].astype(np.uint8)))}, {}, "5x8x10"),
        ({"labels": ("a.npy", npy(TRUTH.astype(np.int64)))}, {}, "labels.astype('uint32')"),
        ({"labels": ("a.tif", as_tiff(TRUTH.astype(np.float32), imagej=False))}, {}, "labels.astype('uint32')"),
        (
            {"labels": ("a.tif", THICKER)},
            {},
            "voxel_size: the labels say 0.6,0.2,0.2 micrometres (Z,Y,X) and the stack says 0.5,0.2,0.2",
        ),
        ({"file": ("a.tif", as_tiff(np.zeros((3, 2, 8, 10), np.uint8), metadata={"axes": "ZCYX"}))}, {}, "2 channels"),
        ({"file": ("a.txt", b"nothing known")}, {}, "TIFF"),
        ({"labels": None}, {}, "form field 'labels'"),
        ({"file": None}, {}, "send a form with the stack, 'file', and the labels, 'labels'"),
        ({}, {"stack": "KEPT"}, "leave one of them out"),
        ({"region": ("", b"0:1,0:2,0:2")}, {}, "parameters in the address"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(
    service: Service, stack: str, change: dict[str, Any], query: dict[str, str], expected: str
) -> None:
    files = {"file": ("a.tif", as_tiff(PIXELS)), "labels": ("b.npy", npy())} | change
    stated = dict.fromkeys(query, stack)
    answer = send(service, {part: sent for part, sent in files.items() if sent is not None}, **stated)
    assert 400 <= answer.status_code < 500, answer.text
    assert expected in answer.json()["detail"]
    assert service.client.get("/annotations").json() == {"annotations": []}


def test_a_stated_voxel_size_settles_what_the_files_say(service: Service, stack: str) -> None:
    kept = send(service, {"file": ("a.tif", as_tiff(PIXELS)), "labels": ("b.tif", THICKER)}, voxel_size="0.6,0.2,0.2")
    assert kept.json()["voxel_size"] == [0.6, 0.2, 0.2]


def test_corrections_of_one_time_point_of_a_series_are_kept_with_its_image(service: Service, stack: str) -> None:
    series = np.stack([PIXELS, PIXELS + 1, PIXELS + 2])
    movie = as_tiff(series, metadata={"axes": "TZYX", "spacing": 0.5, "unit": "um"})
    job = service.run(b"", stack=service.post("/stacks", movie).json()["id"], time="1:3")
    assert "one time point; say which" in keep(service, npy(), job=job["id"]).json()["detail"]
    assert "time" in keep(service, npy(), job=job["id"], time="3").json()["detail"]
    kept = [keep(service, npy(), job=job["id"], time=str(time)).json() for time in (1, 2, 2)]
    for k, each in enumerate(kept[:2]):
        assert np.array_equal(load(service, each, "image").pixels, PIXELS + 1 + k)
    assert [each["time"] for each in kept] == [1, 2, 2]
    assert [each["overlaps"] for each in kept] == [[], [], [kept[1]["id"]]]


def test_others_find_nothing_and_have_room_of_their_own(service: Service, stack: str) -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, (6, 64, 100), np.uint16)
    ids = {}
    for owner in ("ann", "bob"):
        service.caller = owner
        ids[owner] = service.post("/stacks", as_tiff(noise)).json()["id"]
    labels = npy(np.ones(noise.shape, np.uint8))
    service.caller = "ann"
    kept = keep(service, labels, stack=ids["ann"]).json()
    full = keep(service, labels, stack=ids["ann"])
    assert (problem(full), "delete some" in full.json()["detail"]) == ((507, "out-of-storage"), True)
    service.caller = "bob"
    assert keep(service, labels, stack=ids["bob"]).status_code == 201
    assert len(service.client.get("/annotations").json()["annotations"]) == 1
    for method, path in (("GET", ""), ("GET", "/image"), ("GET", "/labels"), ("DELETE", "")):
        answer = service.client.request(method, f"/annotations/{kept['id']}{path}")
        assert problem(answer) == (404, "unknown-annotation")


def test_what_is_kept_outlives_the_service_and_nothing_by_half(service: Service, stack: str, folder: Path) -> None:
    kept = keep(service, npy(), stack=stack).json()
    places = folder / "jobs" / "annotations"
    damaged = places / f"{3:032x}"
    damaged.mkdir()
    (damaged / "annotation.json").write_text("[1]")
    store = AnnotationStore(places, quota_bytes=100_000)
    assert [found.id for found in store.newest("ann")] == [kept["id"]]
    again = keep(service, npy(), stack=stack, region="0:2,0:8,0:10").json()
    assert again["overlaps"] == [kept["id"]]
    listed = service.client.get("/annotations").json()["annotations"]
    assert [report["overlaps"] for report in listed] == [[kept["id"]], [again["id"]]]
    assert service.client.get(f"/annotations/{kept['id']}").json()["overlaps"] == [again["id"]]


def test_operators_choose_where_and_whether(bands_repository: Path, tmp_path: Path) -> None:
    for jobs, chosen, expected in (
        (None, tmp_path / "own", tmp_path / "own"),
        (tmp_path, None, tmp_path / "annotations"),
        (None, None, Path(os.environ["XDG_DATA_HOME"]) / "stackseg" / "annotations"),
    ):
        settings = Settings.model_validate({"jobs": {"folder": jobs}, "annotations": {"folder": chosen}})
        assert settings.annotations_folder == expected
    with start(bands_repository, tmp_path, annotations={"quota_bytes": 0}) as service:
        assert service.client.get("/limits").json()["corrections"] is False
        stack = service.post("/stacks", as_tiff(PIXELS)).json()["id"]
        assert problem(keep(service, npy(), stack=stack)) == (403, "switched-off")
