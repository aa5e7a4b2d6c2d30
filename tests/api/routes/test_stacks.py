from __future__ import annotations

import gc
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import wait_until
from job_service import Service
from live import TIFF, as_tiff, parse_problem

from service.api.routes.planes import build_planes_response
from service.core.errors import BadParameter, RateLimited
from service.core.types import Volume
from service.serving.results.media_types import choose_media_type
from service.serving.results.metadata import ResultMetadata
from service.serving.results.planes import PlaneRange
from service.serving.storage.memory_budget import FairMemoryBudget
from service.serving.storage.volume_cache import MAX_CLIENT_VOLUMES

PIXELS = np.arange(6 * 8 * 10, dtype=np.uint16).reshape(6, 8, 10)
STACK = as_tiff(PIXELS)
MEDIA_TYPES = ("application/x-npy", "application/x-nifti", "application/gzip", "application/x-ozx")


@pytest.fixture
def stack(service: Service) -> str:
    response = service.post("/stacks", STACK, TIFF | {"X-Filename": "cells.tif"})
    assert (response.status_code, response.json()["name"], response.json()["bytes"]) == (201, "cells.tif", len(STACK))
    return str(response.json()["id"])


def parse_planes(response: Any) -> np.ndarray[Any, Any]:
    assert response.status_code == 200, response.text
    shape = [int(size) for size in response.headers["x-stackseg-shape"].split(",")]
    return np.frombuffer(response.content, np.dtype(response.headers["x-stackseg-dtype"]).newbyteorder("<")).reshape(
        shape
    )


def get_planes(service: Service, stack: str, **query: Any) -> Any:
    return service.client.get(f"/stacks/{stack}/planes", params=query)


def upload(service: Service, content: bytes) -> str:
    """Upload a stack and return its id."""
    return str(service.post("/stacks", content).json()["id"])


def test_uploaded_stack_replaces_a_body(service: Service, stack: str) -> None:
    responses = service.segment(STACK), service.segment(b"", stack=stack)
    labels = [tifffile.imread(io.BytesIO(response.content)) for response in responses]
    assert np.array_equal(*labels)
    assert service.post("/inspect", b"", stack=stack).json()["file"]["shape"] == [1, 6, 8, 10]
    job = service.run(b"", stack=stack)
    assert (job["name"], job["parameters"]) == ("cells.tif", {"stack": stack})
    assert service.client.get(f"/stacks/{stack}").status_code == 200
    assert np.array_equal(tifffile.imread(io.BytesIO(service.result(job).content)), labels[0])


def test_job_continues_after_its_stack_is_deleted(service: Service, stack: str) -> None:
    service.fake.gate.clear()
    job = service.submit(b"", stack=stack)
    assert service.client.delete(f"/stacks/{stack}").status_code == 204
    service.fake.gate.set()
    assert service.wait(job, "done", "failed")["state"] == "done"
    assert parse_problem(service.post("/jobs", b"", stack=stack)) == (404, "unknown-stack")


def test_waiting_request_keeps_its_stack_after_deletion(service: Service, stack: str) -> None:
    free, threads = threading.Event(), service.runtime.read_threads
    for client in "abc":
        threads.submit(client, free.wait)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(service.post, "/inspect", b"", stack=stack)
        try:
            wait_until(lambda: any(service.runtime.scratch.requests_folder.glob("*/*")))
            service.client.delete(f"/stacks/{stack}")
        finally:
            free.set()
        response = waiting.result()
    assert (response.status_code, response.json().get("detail")) == (200, None)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, PIXELS),
        ({"from": 1, "to": 6, "step": "2,3,4"}, PIXELS[1:6:2, ::3, ::4]),
        ({"axis": "y", "from": 3, "to": 4}, PIXELS[:, 3:4]),
        ({"axis": "x", "from": 1, "to": 10, "step": "2,3,4"}, PIXELS[::2, ::3, 1:10:4]),
    ],
)
def test_planes_have_the_selected_pixels(service: Service, stack: str, query: dict[str, Any], expected: Any) -> None:
    response = get_planes(service, stack, **query)
    assert response.headers["x-stackseg-volume"] == "6,8,10"
    assert np.array_equal(parse_planes(response), expected)


def list_deleted_files() -> list[str]:
    """Return the deleted files that this process still has open or mapped."""
    descriptors = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            descriptors.append(str(descriptor.readlink()))
    mappings = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [name for name in (*descriptors, *mappings) if "upload.tif (deleted)" in name]


def test_deleted_stack_releases_its_disk_space_after_it_was_viewed(service: Service, stack: str) -> None:
    assert get_planes(service, stack).status_code == 200
    assert service.client.delete(f"/stacks/{stack}").status_code == 204
    gc.collect()
    assert list_deleted_files() == []


def test_many_viewed_stacks_do_not_use_up_the_descriptors(service: Service) -> None:
    stack = upload(service, as_tiff(np.zeros((200, 1, 4, 4), np.uint8), metadata={"axes": "TZYX"}))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for time in range(200):
        assert get_planes(service, stack, time=time).status_code == 200
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + MAX_CLIENT_VOLUMES


def test_nonexistent_planes_are_rejected(service: Service, stack: str) -> None:
    queries: list[dict[str, Any]] = [
        *({"from": 6}, {"to": 7}, {"from": 3, "to": 3}, {"channel": 1}, {"step": "0,1,1"}, {"axes": "YX"}),
        *({"axis": "t"}, {"axis": "y", "to": 9}, {"axis": "x", "from": 10}),
        *({"time": "9" * 40}, {"channel": "9" * 300}, {"from": "9" * 40}, {"axes": "QQQ"}),
    ]
    for query in queries:
        assert parse_problem(get_planes(service, stack, **query)) == (422, "bad-parameter"), query


@pytest.mark.anyio
async def test_clients_share_the_memory_for_planes_being_sent() -> None:
    volume = Volume.from_array(PIXELS[np.newaxis])
    memory = FairMemoryBudget(2 * PIXELS.nbytes)
    first = await build_planes_response(volume, PlaneRange(0, None, (1, 1, 1)), "ann", memory=memory)
    with pytest.raises(RateLimited):
        await build_planes_response(volume, PlaneRange(0, 1, (1, 1, 1)), "ann", memory=memory)
    assert await build_planes_response(volume, PlaneRange(0, 3, (1, 1, 1)), "bob", memory=memory)
    for plane_range in (PlaneRange(0, 99, (1, 1, 1)), PlaneRange(9, None, (1, 1, 1))):
        with pytest.raises(BadParameter):
            await build_planes_response(volume, plane_range, "ann", memory=memory)

    async def disconnect(message: Any) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await first({}, no_messages, disconnect)
    second = await build_planes_response(volume, PlaneRange(0, 3, (1, 1, 1)), "ann", memory=memory)
    assert second.headers["content-length"] == str(PIXELS.nbytes // 2)


async def no_messages() -> Any:
    raise AssertionError


def test_planes_larger_than_the_limit_are_rejected(service: Service) -> None:
    large = as_tiff(np.zeros((5, 2048, 2048), np.uint16), compression="zlib")
    stack = upload(service, large)
    assert parse_problem(get_planes(service, stack)) == (422, "bad-parameter")
    assert parse_planes(get_planes(service, stack, step="1,4,4")).shape == (5, 512, 512)


@pytest.mark.parametrize(("dtype", "sent"), [("float64", "float32"), ("int16", "int16"), (">u2", "uint16")])
def test_planes_are_converted_to_data_types_that_browsers_support(service: Service, dtype: str, sent: str) -> None:
    file = io.BytesIO()
    tifffile.imwrite(file, (PIXELS - 100.0).clip(0).astype(dtype), photometric="minisblack", metadata={"axes": "ZYX"})
    response = get_planes(service, upload(service, file.getvalue()))
    assert response.headers["x-stackseg-dtype"] == sent
    assert np.array_equal(parse_planes(response), (PIXELS - 100.0).clip(0))


def test_stacks_of_other_callers_are_hidden(service: Service, stack: str) -> None:
    service.client.get(f"/stacks/{stack}/planes")
    service.caller = "bob"
    for method, path in (("GET", ""), ("GET", "/planes"), ("DELETE", "")):
        assert parse_problem(service.client.request(method, f"/stacks/{stack}{path}")) == (404, "unknown-stack")
    assert parse_problem(service.post("/inspect", b"", stack=stack)) == (404, "unknown-stack")


def test_stack_excludes_a_body_and_its_upload_accepts_no_parameters(service: Service, stack: str) -> None:
    for response in (
        service.segment(STACK, stack=stack),
        service.segment(b"", stack="../jobs"),
        service.post("/stacks", b""),
        service.post("/stacks", STACK, channel=1),
    ):
        assert parse_problem(response) == (422, "bad-parameter")


@pytest.mark.parametrize("direct", [True, False])
def test_accept_header_selects_the_file_format_of_labels(service: Service, direct: bool) -> None:
    job = service.run()

    def request(accept: str) -> Any:
        response = service.segment(headers=TIFF | {"Accept": accept}) if direct else service.result(job, Accept=accept)
        assert (response.status_code, response.headers["x-stackseg-model"]) == (200, "bands/1")
        return response

    for accepted in ("*/*", "text/html, */*", f"image/tiff;q=0.5, {MEDIA_TYPES[0]};q=0.4"):
        tiff = request(accepted)
        assert tiff.headers["content-type"] == "image/tiff"
    labels = tifffile.imread(io.BytesIO(tiff.content))
    assert np.array_equal(parse_planes(service.client.get(f"/jobs/{job['id']}/planes")), labels)
    for media_type in MEDIA_TYPES:
        assert request(f"{media_type}, */*;q=0.1").headers["content-type"] == media_type
    assert np.array_equal(np.load(io.BytesIO(request(MEDIA_TYPES[0]).content)), labels)
    assert service.leftovers() == []


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", "application/zip"),
        ("*/*", "application/zip"),
        ("text/html, */*;q=0.1", "application/zip"),
        ("application/json", "application/zip"),
        ("*;q=0.2", "application/zip"),
        ("text/csv, image/tiff", "text/csv"),
        ("text/csv;q=0.3, image/tiff;q=0.8", "image/tiff"),
        ("text/csv;q=0, */*", "application/zip"),
        ("application/zip;q=0.1, */*;q=0.2", "image/tiff"),
        ("text/*;q=0.9, application/x-npy;q=0.8", "text/csv"),
        ("application/x-npy;q=oddly", "application/x-npy"),
        ("application/x-npy;q=nan, text/csv;q=0.1", "application/x-npy"),
    ],
)
def test_preferred_media_type_is_chosen(accepted: str, chosen: str) -> None:
    assert choose_media_type(accepted, ResultMetadata("bands/1", "application/zip", "a.zip", "labels", {})) == chosen


def test_probabilities_and_time_series_are_always_tiff() -> None:
    metadata = ResultMetadata("bands/1", "image/tiff", "a.ome.tif", "labels", {})
    for media_type in MEDIA_TYPES:
        assert choose_media_type(media_type, metadata) == media_type
        for other in (replace(metadata, kind="probabilities"), replace(metadata, time_points=(2, 2))):
            assert choose_media_type(f"{media_type}, */*;q=0.1", other) == "image/tiff"
            with pytest.raises(BadParameter, match="Accept one of these"):
                choose_media_type(media_type, other)


def test_receipt_of_a_saved_result_is_sent_regardless_of_the_accept_header() -> None:
    metadata = ResultMetadata("bands/1", "application/json", "saved.json", "labels", {})
    assert choose_media_type("text/csv", metadata) == "application/json"


def test_stack_too_large_for_nifti_is_rejected(service: Service) -> None:
    long = as_tiff(np.zeros((1, 2, 2**15), np.uint8), compression="zlib")
    assert parse_problem(service.result(service.run(long), Accept="application/x-nifti")) == (422, "bad-parameter")


def test_conversion_without_a_scratch_folder_is_reported_as_unavailable(service: Service) -> None:
    job = service.run()
    requests = service.runtime.scratch.requests_folder
    requests.rename(requests.with_name("moved"))
    try:
        response = service.result(job, Accept="application/x-npy")
    finally:
        if not requests.exists():
            requests.with_name("moved").rename(requests)
    assert parse_problem(response) == (503, "storage-unavailable")
