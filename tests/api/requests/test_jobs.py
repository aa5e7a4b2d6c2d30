"""Tests of service.api.requests.jobs: jobs that are submitted repeatedly with one idempotency key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeSegmenter
from job_service import Service, start_service
from live import STACK, TIFF, LiveServer, as_tiff, eager_settings, parse_problem, serve
from starlette.testclient import TestClient

from service.api.access.keys import hash_key

OTHER_STACK = as_tiff(np.full((3, 8, 8), 100, np.uint8))


def submit(client: Any, key: str, path: str = "/jobs", content: bytes = STACK, **headers: str) -> Any:
    return client.post(path, content=content, headers=TIFF | {"Idempotency-Key": key} | headers)


def list_jobs(service: Service) -> set[str]:
    return {job["id"] for job in service.client.get("/jobs?limit=1000").json()["jobs"]}


def test_repeated_request_gets_the_same_job_in_every_state(service: Service) -> None:
    service.fake.gate.clear()
    first = submit(service.client, "states", "/jobs?overlap=0.5")
    job = first.json()["id"]
    before = list_jobs(service)
    running = submit(service.client, '"states"', "/jobs?overlap=0.50")
    assert (running.status_code, running.json()["id"]) == (202, job)
    assert running.headers["location"] == first.headers["location"]
    service.fake.gate.set()
    service.wait({"id": job}, "done")
    asynchronous = submit(service.client, "states", "/segment?overlap=0.5", Prefer="respond-async")
    assert (asynchronous.json()["id"], asynchronous.json()["state"]) == (job, "done")
    form = {"files": {"file": ("", STACK)}, "data": {"overlap": "0.5"}, "headers": {"Idempotency-Key": "states"}}
    assert service.client.post("/jobs", **form).json()["id"] == job
    assert list_jobs(service) == before
    assert service.leftovers() == []
    assert list((service.folder / "jobs" / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "content", "headers"),
    [("/jobs", OTHER_STACK, {}), ("/jobs?overlap=0.5", STACK, {}), ("/jobs", STACK, {"X-Filename": "other.tif"})],
    ids=["file", "parameters", "name"],
)
def test_key_of_a_different_request_is_refused(
    service: Service, path: str, content: bytes, headers: dict[str, str]
) -> None:
    submit(service.client, "different")
    response = submit(service.client, "different", path, content, **headers)
    assert parse_problem(response) == (422, "bad-parameter")
    assert response.json()["parameter"] == "Idempotency-Key"


def test_new_job_is_created_with_another_key_or_after_deletion(service: Service) -> None:
    job = submit(service.client, "first").json()
    assert submit(service.client, "second").json()["id"] != job["id"]
    service.wait(job, "done")
    assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
    assert submit(service.client, "first", content=OTHER_STACK).json()["id"] != job["id"]


@pytest.mark.parametrize("key", ["", '""', "a b", "a" * 129, 'a"b', "a\\b", "ä".encode()])
def test_invalid_key_is_refused(service: Service, key: Any) -> None:
    before = list_jobs(service)
    assert parse_problem(submit(service.client, key)) == (422, "bad-parameter")
    assert list_jobs(service) == before


def test_repeated_request_is_answered_even_if_a_new_one_would_be_refused(
    bands_repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    references, limits = {"outputs": {"out": tmp_path / "out"}}, {"cache_bytes": 0, "waiting": 0}
    with start_service(bands_repository, tmp_path, references=references, limits=limits) as service:
        path = "/jobs?output_to=out/labels.tif"
        job = submit(service.client, "written", path).json()
        service.wait(job, "done")
        assert parse_problem(submit(service.client, "new", path)) == (409, "output-exists")
        fake = service.fake
        service.submit_blocked_job()
        assert parse_problem(submit(service.client, "other")) == (503, "queue-full")
        assert submit(service.client, "written", path).json()["id"] == job["id"]
        service.runtime.drain()
        assert submit(service.client, "written", path).json()["id"] == job["id"]
        fake.gate.set()


def test_clients_have_their_own_keys(bands_repository: Path, tmp_path: Path) -> None:
    keys = {name: hash_key(f"stackseg_{name}") for name in ("ada", "bob")}
    with start_service(bands_repository, tmp_path, access={"keys": keys}) as service:
        ada, bob = ({"Authorization": f"Bearer stackseg_{name}"} for name in ("ada", "bob"))
        job = submit(service.client, "shared", **ada).json()["id"]
        assert submit(service.client, "shared", **bob).json()["id"] != job
        assert submit(service.client, "shared", content=OTHER_STACK, **bob).status_code == 422
        assert submit(service.client, "shared", **ada).json()["id"] == job


def test_without_api_keys_addresses_have_their_own_keys(service: Service) -> None:
    jobs = set()
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1"):
        client = TestClient(service.app, "http://localhost", client=(address, 1))
        jobs.add(submit(client, "address").json()["id"])
    assert len(jobs) == 2


def test_concurrent_requests_get_the_same_job(bands_repository: Path) -> None:
    with serve(eager_settings(bands_repository), load=FakeSegmenter) as live:
        assert isinstance(live, LiveServer)
        with ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(lambda _: submit(live.client, "concurrent"), range(8)))
        assert {response.status_code for response in responses} == {202}
        assert len({response.json()["id"] for response in responses}) == 1
        assert len(live.client.get("/jobs").json()["jobs"]) == 1
        live.wait(responses[0].json(), "done")
