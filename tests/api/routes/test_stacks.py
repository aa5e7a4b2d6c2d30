from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import until
from job_service import TIFF, Service, start
from live import as_tiff

from service.api.routes.planes import answer_planes
from service.core.errors import BadParameter, RateLimited
from service.core.types import Volume
from service.serving.results.media_types import choose_media_type
from service.serving.results.metadata import AnswerMetadata
from service.serving.results.planes import PlaneRange
from service.serving.storage.memory_budget import MemoryBudget

PIXELS = np.arange(6 * 8 * 10, dtype=np.uint16).reshape(6, 8, 10)
STACK = as_tiff(PIXELS)
FORMS = ("application/x-npy", "application/x-nifti", "application/gzip", "application/x-ozx")


@pytest.fixture(scope="module")
def service(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with start(bands_repository, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def stack(service: Service) -> str:
    service.caller = None
    answer = service.client.post("/stacks", content=STACK, headers=TIFF | {"X-Filename": "cells.tif"})
    assert (answer.status_code, answer.json()["name"], answer.json()["bytes"]) == (201, "cells.tif", len(STACK))
    return str(answer.json()["id"])


def planes(answer: Any) -> np.ndarray[Any, Any]:
    assert answer.status_code == 200, answer.text
    shape = [int(size) for size in answer.headers["x-stackseg-shape"].split(",")]
    return np.frombuffer(answer.content, np.dtype(answer.headers["x-stackseg-dtype"]).newbyteorder("<")).reshape(shape)


def problem(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


def test_a_kept_stack_stands_for_a_body(service: Service, stack: str) -> None:
    labels = [
        tifffile.imread(io.BytesIO(service.client.post("/segment", **sent).content))
        for sent in ({"params": {"stack": stack}}, {"content": STACK, "headers": TIFF})
    ]
    assert np.array_equal(*labels)
    assert service.client.post("/inspect", params={"stack": stack}).json()["file"]["shape"] == [1, 6, 8, 10]
    job = service.client.post("/jobs", params={"stack": stack}).json()
    assert (job["name"], job["parameters"]) == ("cells.tif", {"stack": stack})
    service.wait(job, "done")
    assert service.client.get(f"/stacks/{stack}").status_code == 200
    assert np.array_equal(tifffile.imread(io.BytesIO(service.result(job).content)), labels[0])


def test_a_job_outlives_its_stack(service: Service, stack: str) -> None:
    service.fake.gate.clear()
    job = service.client.post("/jobs", params={"stack": stack}).json()
    assert service.client.delete(f"/stacks/{stack}").status_code == 204
    service.fake.gate.set()
    assert service.wait(job, "done", "failed")["state"] == "done"
    assert problem(service.client.post("/jobs", params={"stack": stack})) == (404, "unknown-stack")


def test_a_request_that_waits_to_read_keeps_its_stack(service: Service, stack: str) -> None:
    free, threads = threading.Event(), service.runtime.read_threads
    for client in "abc":
        threads.submit(client, free.wait)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(service.client.post, "/inspect", params={"stack": stack})
        try:
            until(lambda: any(service.runtime.scratch.requests.glob("*/*")))
            service.client.delete(f"/stacks/{stack}")
        finally:
            free.set()
        answer = waiting.result()
    assert (answer.status_code, answer.json().get("detail")) == (200, None)


def test_planes_are_the_pixels_in_steps(service: Service, stack: str) -> None:
    def get(**query: Any) -> Any:
        return service.client.get(f"/stacks/{stack}/planes", params=query)

    assert np.array_equal(planes(get()), PIXELS)
    assert np.array_equal(planes(get(**{"from": 1, "to": 6, "step": "2,3,4"})), PIXELS[1:6:2, ::3, ::4])
    assert get(step="2,3,4").headers["x-stackseg-volume"] == "6,8,10"
    for query in ({"from": 6}, {"to": 7}, {"from": 3, "to": 3}, {"channel": 1}, {"step": "0,1,1"}, {"axes": "YX"}):
        assert problem(get(**query)) == (422, "bad-parameter"), query


def test_planes_across_rows_and_columns_are_the_pixels_too(service: Service, stack: str) -> None:
    def get(**query: Any) -> Any:
        return service.client.get(f"/stacks/{stack}/planes", params=query)

    assert np.array_equal(planes(get(axis="y", **{"from": 3, "to": 4})), PIXELS[:, 3:4])
    assert np.array_equal(planes(get(axis="x", step="2,3,4", **{"from": 1, "to": 10})), PIXELS[::2, ::3, 1:10:4])
    for query in ({"axis": "t"}, {"axis": "y", "to": 9}, {"axis": "x", "from": 10}):
        assert problem(get(**query)) == (422, "bad-parameter"), query


def test_planes_on_their_way_have_one_budget_of_memory() -> None:
    volume = Volume.from_array(PIXELS[np.newaxis])
    memory = MemoryBudget(PIXELS.nbytes + 1)

    async def send_two() -> Any:
        first = await answer_planes(volume, PlaneRange(0, None, (1, 1, 1)), memory)
        with pytest.raises(RateLimited):
            await answer_planes(volume, PlaneRange(0, 1, (1, 1, 1)), memory)
        for refused in (PlaneRange(0, 99, (1, 1, 1)), PlaneRange(9, None, (1, 1, 1))):
            with pytest.raises(BadParameter):
                await answer_planes(volume, refused, memory)

        async def hang_up(message: Any) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            await first({}, no_messages, hang_up)
        return await answer_planes(volume, PlaneRange(0, None, (1, 1, 1)), memory)

    assert asyncio.run(send_two()).headers["content-length"] == str(PIXELS.nbytes)
    assert not memory.reserve(2)
    assert memory.reserve(1)


async def no_messages() -> Any:
    raise AssertionError


def test_planes_of_a_large_volume_do_not_travel_whole(service: Service) -> None:
    large = as_tiff(np.zeros((5, 2048, 2048), np.uint16), compression="zlib")
    stack = service.client.post("/stacks", content=large, headers=TIFF).json()["id"]
    refused = service.client.get(f"/stacks/{stack}/planes")
    assert problem(refused) == (422, "bad-parameter")
    assert planes(service.client.get(f"/stacks/{stack}/planes", params={"step": "1,4,4"})).shape == (5, 512, 512)


@pytest.mark.parametrize(("dtype", "sent"), [("float64", "float32"), ("int16", "int16"), (">u2", "uint16")])
def test_planes_have_numbers_that_browsers_know(service: Service, dtype: str, sent: str) -> None:
    file = io.BytesIO()
    tifffile.imwrite(file, (PIXELS - 100.0).clip(0).astype(dtype), photometric="minisblack", metadata={"axes": "ZYX"})
    stack = service.client.post("/stacks", content=file.getvalue(), headers=TIFF).json()["id"]
    answer = service.client.get(f"/stacks/{stack}/planes")
    assert answer.headers["x-stackseg-dtype"] == sent
    assert np.array_equal(planes(answer), (PIXELS - 100.0).clip(0))


def test_stacks_of_others_are_hidden(service: Service, stack: str) -> None:
    service.client.get(f"/stacks/{stack}/planes")
    service.caller = "bob"
    for method, path in (("GET", ""), ("GET", "/planes"), ("DELETE", "")):
        assert problem(service.client.request(method, f"/stacks/{stack}{path}")) == (404, "unknown-stack")
    assert problem(service.client.post("/inspect", params={"stack": stack})) == (404, "unknown-stack")


def test_a_stack_and_a_body_exclude_each_other(service: Service, stack: str) -> None:
    answer = service.client.post("/segment", params={"stack": stack}, content=STACK, headers=TIFF)
    assert problem(answer) == (422, "bad-parameter")
    assert problem(service.client.post("/stacks", headers=TIFF)) == (422, "bad-parameter")
    assert problem(service.client.post("/segment", params={"stack": "../jobs"})) == (422, "bad-parameter")


def test_labels_of_a_job_in_other_forms(service: Service) -> None:
    job = service.wait(service.submit(), "done")
    labels = tifffile.imread(io.BytesIO(service.result(job).content))
    address = f"/jobs/{job['id']}"
    assert np.array_equal(planes(service.client.get(f"{address}/planes")), labels)
    for form in FORMS:
        answer = service.client.get(f"{address}/result", headers={"Accept": f"{form}, */*;q=0.1"})
        assert answer.headers["content-type"] == form
        assert answer.headers["x-stackseg-model"] == "bands/1"
        if form == FORMS[0]:
            assert np.array_equal(np.load(io.BytesIO(answer.content)), labels)
    plain = service.client.get(f"{address}/result", headers={"Accept": "text/html, */*"})
    assert plain.headers["content-type"] == "image/tiff"
    assert list(service.runtime.scratch.requests.iterdir()) == []


def test_planes_that_no_file_has_are_refused(service: Service, stack: str) -> None:
    for query in ({"time": "9" * 40}, {"channel": "9" * 300}, {"from": "9" * 40}, {"axes": "QQQ"}):
        assert problem(service.client.get(f"/stacks/{stack}/planes", params=query)) == (422, "bad-parameter"), query


def test_labels_are_answered_in_other_forms_at_once(service: Service) -> None:
    def segment(accept: str) -> Any:
        return service.client.post("/segment", content=STACK, headers=TIFF | {"Accept": accept})

    plain = segment("*/*")
    assert plain.headers["content-type"] == "image/tiff"
    labels = tifffile.imread(io.BytesIO(plain.content))
    for form in FORMS:
        answer = segment(form)
        assert (answer.status_code, answer.headers["content-type"]) == (200, form)
        assert answer.headers["x-stackseg-model"] == "bands/1"
    assert np.array_equal(np.load(io.BytesIO(segment(FORMS[0]).content)), labels)
    assert segment(f"image/tiff;q=0.5, {FORMS[0]};q=0.4").headers["content-type"] == "image/tiff"
    assert list(service.runtime.scratch.requests.iterdir()) == []


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", "application/zip"),
        ("*/*", "application/zip"),
        ("text/html", "application/zip"),
        ("text/csv, image/tiff", "text/csv"),
        ("text/csv;q=0.3, image/tiff;q=0.8", "image/tiff"),
        ("text/csv;q=0, */*", "application/zip"),
        ("application/zip;q=0.1, */*;q=0.2", "image/tiff"),
        ("text/*;q=0.9, application/x-npy;q=0.8", "text/csv"),
        ("application/x-npy;q=oddly", "application/x-npy"),
        ("application/x-npy;q=nan, text/csv;q=0.1", "text/csv"),
    ],
)
def test_the_form_that_is_preferred_most_is_chosen(accepted: str, chosen: str) -> None:
    assert choose_media_type(accepted, AnswerMetadata("bands/1", "application/zip", "a.zip", "labels", {})) == chosen


def test_probabilities_have_no_form_that_would_drop_some() -> None:
    metadata = AnswerMetadata("bands/1", "image/tiff", "a.ome.tif", "labels", {})
    for form in FORMS:
        assert choose_media_type(form, metadata) == form
        assert choose_media_type(form, replace(metadata, kind="probabilities")) == "image/tiff"
        assert choose_media_type(form, replace(metadata, time_points=(2, 2))) == "image/tiff"


def test_a_stack_too_long_for_nifti_says_so(service: Service) -> None:
    long = as_tiff(np.zeros((1, 2, 2**15), np.uint8), compression="zlib")
    job = service.wait(service.submit(long), "done", "failed")
    answer = service.client.get(f"/jobs/{job['id']}/result", headers={"Accept": "application/x-nifti"})
    assert problem(answer) == (422, "bad-parameter")


def test_another_form_waits_for_a_scratch_folder_that_is_gone(service: Service) -> None:
    job = service.wait(service.submit(), "done")
    requests = service.runtime.scratch.requests
    requests.rename(requests.with_name("moved"))
    try:
        answer = service.client.get(f"/jobs/{job['id']}/result", headers={"Accept": "application/x-npy"})
    finally:
        if not requests.exists():
            requests.with_name("moved").rename(requests)
    assert problem(answer) == (503, "storage-unavailable")


def test_an_upload_with_parameters_is_refused(service: Service) -> None:
    answer = service.client.post("/stacks", params={"channel": 1}, content=STACK, headers=TIFF)
    assert problem(answer) == (422, "bad-parameter")
