from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaozarrs
from fakes import NUM_WINDOWS, FakeSegmenter, wait_until
from job_service import Service, start_service
from live import STACK, TIFF, as_tiff, parse_problem
from zarr_files import write_zarr

from service.api.access.keys import hash_key
from service.api.messages.headers import ANONYMOUS
from service.api.routes import jobs as job_routes
from service.core.config import Settings
from service.core.errors import OutOfMemory, OutOfStorage
from service.core.quantities import VoxelSize
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.formats.zarr import writer as zarr_writer
from service.models.spec import ModelSpec
from service.serving.jobs import job_manager as async_jobs
from service.serving.jobs.store import JobStore

ONES = np.ones((3, 8, 8))


def read_pixels(response: Any) -> Any:
    return tifffile.imread(io.BytesIO(response.content))


def test_job_is_accepted_immediately_and_its_result_is_fetched_later(service: Service) -> None:
    service.fake.gate.clear()
    service.fake.notes = ("a note",)
    response = service.client.post("/jobs?overlap=0.5", content=STACK, headers=TIFF | {"X-Filename": "cells.tif"})
    job = response.json()
    assert (response.status_code, response.headers["location"]) == (202, f"/jobs/{job['id']}")
    assert job["state"] == "waiting"
    running = service.wait(job, "running")
    assert (running["progress"]["done"], running["position"], running["result"]) == (0, None, None)
    assert running["progress"]["total"] > NUM_WINDOWS, "decoding counts"
    assert running["stage"] == "windows"
    assert running["parameters"] == {"overlap": 0.5}
    assert parse_problem(service.result(job)) == (409, "not-finished")
    service.fake.gate.set()
    done = service.wait(job, "done")
    assert (done["model"], done["warnings"], done["seconds_left"]) == ("bands/1", ["a note"], None)
    assert done["progress"]["done"] == done["progress"]["total"]
    assert {"receive", "read", "queue", "windows", "write"} <= done["seconds"].keys()
    assert done["expires"] > done["ended"] >= done["started"] >= done["created"]
    result = service.client.get(done["result"])
    assert np.array_equal(read_pixels(result), ONES)
    assert "cells_classes.ome.tif" in result.headers["content-disposition"]
    assert result.headers["x-stackseg-voxel-size"] == "0.5,0.2,0.2"
    assert result.headers["x-stackseg-note"] == "a note"
    assert int(result.headers["content-length"]) == len(result.content)
    assert service.leftovers() == []


def test_time_is_estimated_from_earlier_requests(service: Service) -> None:
    service.run()
    assert 0 <= service.post("/inspect", STACK).json()["seconds"] < 60


def test_result_equals_the_response_of_segment(service: Service) -> None:
    direct, from_job = service.segment(), service.result(service.run())
    assert np.array_equal(read_pixels(direct), read_pixels(from_job))
    ignored = {"server-timing", "x-request-id", "content-length", "last-modified", "etag", "x-cache"}
    assert {k: v for k, v in from_job.headers.items() if k not in ignored} == {
        k: v for k, v in direct.headers.items() if k not in ignored
    }


def test_conditions_are_compared_before_a_result_is_converted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, conversions = service.run()["result"], list[str]()
    convert = job_routes.convert_result

    def count_conversion(*arguments: Any) -> Any:
        conversions.append("converted")
        return convert(*arguments)

    monkeypatch.setattr(job_routes, "convert_result", count_conversion)

    def get(**headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return service.client.get(url, headers={"Accept": "application/x-npy", **named})

    etag = get().headers["etag"]
    unchanged, other = get(If_None_Match=etag), get(If_Match='"other"')

    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    assert unchanged.headers["cache-control"] == "no-store"
    assert (other.status_code, other.headers["etag"]) == (412, etag)
    assert len(conversions) == 1
    assert [get(If_Match=etag).status_code, get(If_None_Match='"other"').status_code] == [200, 200]
    assert len(conversions) == 3
    assert service.leftovers() == []


@pytest.mark.parametrize(
    ("prefer", "status"), [("respond-async", 202), ("wait=10, Respond-Async;x=1", 202), ("handling=strict", 200)]
)
def test_segment_returns_a_job_if_the_client_prefers_it(service: Service, prefer: str, status: int) -> None:
    response = service.segment(headers=TIFF | {"Prefer": prefer})
    assert response.status_code == status
    if status == 202:
        assert response.headers["preference-applied"] == "respond-async"
        job = service.client.get(response.headers["location"]).json()
        assert service.wait(job, "done")["id"] == response.json()["id"]


def test_form_fields_are_parameters_of_the_job(service: Service) -> None:
    files = {"file": ("a.tif", STACK, "image/tiff")}
    response = service.client.post("/jobs", files=files, data={"voxel_size": "3,2,1"})
    assert response.status_code == 202
    assert service.wait(response.json(), "done")["name"] == "a.tif"
    assert service.result(response.json()).headers["x-stackseg-voxel-size"] == "3,2,1"
    assert service.client.post("/jobs", files=files, data={"model": "livers"}).status_code == 404


@pytest.mark.parametrize("path", ["/jobs", "/segment"])
@pytest.mark.parametrize(
    ("query", "body", "status", "slug"),
    [
        ("overlop=1", STACK, 422, "bad-parameter"),
        ("model=livers", STACK, 404, "unknown-model"),
        ("", b"II*\0\0\0\0\0", 422, "bad-file"),
        ("", b"not a TIFF", 415, "unsupported-media"),
        ("", b"", 422, "bad-parameter"),
        ("channel=7", STACK, 422, "bad-parameter"),
    ],
)
def test_invalid_request_is_rejected_before_a_job_is_created(
    service: Service, path: str, query: str, body: bytes, status: int, slug: str
) -> None:
    before = service.client.get("/jobs?limit=1000").json()
    assert parse_problem(service.post(f"{path}?{query}", body)) == (status, slug)
    assert service.client.get("/jobs?limit=1000").json() == before
    assert service.leftovers() == list(service.async_jobs._store._incoming_folder.iterdir()) == []


def test_failed_job_reports_the_same_problem_as_segment(service: Service) -> None:
    service.fake.error = OutOfMemory("too much", 123)
    job = service.wait(service.submit(), "failed")
    assert job["problem"] == {"type": "urn:stackseg:problem:out-of-memory", "detail": "too much"}
    result = service.result(job)
    assert (result.status_code, result.json()["needed_bytes"]) == (507, 123)


def test_canceling_keeps_finished_jobs_if_requested(service: Service) -> None:
    job = service.run()
    path = f"/jobs/{job['id']}"
    assert service.client.delete(f"{path}?keep_finished=true").status_code == 204
    assert service.result(job).status_code == 200
    assert parse_problem(service.client.delete(f"{path}?keep_finished=perhaps")) == (422, "bad-parameter")
    assert service.client.delete(path).status_code == 204
    assert parse_problem(service.client.get(path)) == (404, "unknown-job")


def test_cancelling_jobs_frees_the_device_and_the_queue(service: Service) -> None:
    running = service.submit_blocked_job()
    waiting = service.submit()
    wait_until(lambda: service.show(waiting)["position"] == 1)
    for job in (waiting, running):
        assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
        assert service.show(job)["state"] == "cancelled"
    wait_until(lambda: not service.runtime.devices.running_jobs and service.runtime.devices.waiting_count == 0)
    assert parse_problem(service.result(running)) == (410, "result-gone")
    wait_until(lambda: service.leftovers() == [])
    wait_until(lambda: not service.async_jobs._store.get_input_path(running["id"]).parent.exists())
    service.fake.gate.set()
    assert service.run()


def test_finished_job_is_deleted(service: Service) -> None:
    job = service.run()
    assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
    for response in (
        service.client.get(f"/jobs/{job['id']}"),
        service.result(job),
        service.client.get(f"/jobs/{job['id']}/events"),
        service.client.delete(f"/jobs/{job['id']}"),
    ):
        assert parse_problem(response) == (404, "unknown-job")


def test_caller_sees_only_own_jobs(service: Service) -> None:
    service.caller = "ada"
    job = service.run()
    assert [listed["id"] for listed in service.client.get("/jobs").json()["jobs"]] == [job["id"]]
    for other_caller in ("bob", None):
        service.caller = other_caller
        assert job["id"] not in service.client.get("/jobs?limit=1000").text
        for path in ("", "/result", "/events"):
            assert service.client.get(f"/jobs/{job['id']}{path}").status_code == 404
        assert service.client.delete(f"/jobs/{job['id']}").status_code == 404
    service.caller = "ada"
    assert service.result(job).status_code == 200


def test_events_report_the_job_until_its_end(service: Service) -> None:
    service.fake.gate.clear()
    job = service.submit()
    threading.Timer(1.0, service.fake.gate.set).start()
    response = service.client.get(f"/jobs/{job['id']}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    states = [event["state"] for event in events]
    assert states[-1] == "done"
    assert "running" in states
    assert {event["id"] for event in events} == {job["id"]}
    assert events[-1] == service.show(job)


@pytest.fixture
def keyed_service(bands_repository: Path, tmp_path: Path) -> Iterator[Service]:
    """A service with the keys ada and bob and a queue for 7 waiting requests. `caller` selects the caller."""
    access = {"keys": {name: hash_key(name) for name in ("ada", "bob")}}
    jobs = {"folder": tmp_path / "jobs", "quota_bytes": 100 * len(STACK)}
    with start_service(bands_repository, tmp_path, limits={"waiting": 7}, access=access, jobs=jobs) as service:
        service.client.headers["X-API-Key"] = "ada"
        yield service


def test_queue_is_shared_fairly_between_keys(keyed_service: Service) -> None:
    keyed_service.caller = "ada"
    keyed_service.submit_blocked_job()
    jobs_of_ada = [keyed_service.submit() for _ in range(3)]
    for path in ("/jobs", "/segment"):
        response = keyed_service.post(path, STACK)
        assert parse_problem(response) == (503, "queue-full")
        assert int(response.headers["retry-after"]) >= 1
    keyed_service.caller = "bob"
    jobs_of_bob = [keyed_service.submit() for _ in range(2)]
    wait_until(lambda: [keyed_service.show(job)["position"] for job in jobs_of_bob] == [1, 3])
    keyed_service.caller = "ada"
    assert keyed_service.show(jobs_of_ada[0])["position"] == 2
    keyed_service.fake.gate.set()
    for job in jobs_of_ada:
        keyed_service.wait(job, "done")


def test_unfinished_jobs_continue_after_a_restart(bands_repository: Path, tmp_path: Path) -> None:
    with start_service(bands_repository, tmp_path) as service:
        done = service.run()
        running = service.submit_blocked_job(voxel_size="3,2,1")
        waiting, cancelled = service.submit(), service.submit()
        service.client.delete(f"/jobs/{cancelled['id']}")
    with start_service(bands_repository, tmp_path) as service:
        for job in (running, waiting):
            assert service.wait(job, "done")["created"] == job["created"]
        assert service.result(running).headers["x-stackseg-voxel-size"] == "3,2,1"
        assert service.show(done) == done
        assert service.result(done).status_code == 200
        assert service.show(cancelled)["state"] == "cancelled"


def test_running_job_finishes_during_shutdown(bands_repository: Path, tmp_path: Path) -> None:
    server = {"scratch_folder": tmp_path / "scratch", "drain_seconds": 30}
    with start_service(bands_repository, tmp_path, server=server) as service:
        running = service.submit_blocked_job()
        waiting = service.submit()
        fake = service.fake
        service.runtime.drain()
        assert service.client.get(f"/jobs/{running['id']}/events").text.count("data:") == 1
        threading.Timer(0.5, fake.gate.set).start()
    stopped = datetime.now(UTC).replace(microsecond=0)
    with start_service(bands_repository, tmp_path) as service:
        assert service.show(running)["state"] == "done"
        # The waiting job started only after the restart.
        assert datetime.fromisoformat(service.wait(waiting, "done")["started"]) >= stopped


def test_jobs_in_a_temporary_folder_are_deleted_at_shutdown(bands_repository: Path, tmp_path: Path) -> None:
    with start_service(bands_repository, tmp_path, jobs={"folder": "temporary"}) as service:
        job = service.run()
        assert service.result(job).status_code == 200
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / "jobs").exists()


def test_result_is_sent_completely_even_if_it_is_deleted_meanwhile(service: Service) -> None:
    job = service.run()
    file, _ = service.async_jobs.open_result(job["id"], ANONYMOUS)
    with file:
        service.client.delete(f"/jobs/{job['id']}")
        assert np.array_equal(tifffile.imread(io.BytesIO(file.read())), ONES)


def test_result_larger_than_the_scratch_quota_can_be_downloaded(bands_repository: Path, tmp_path: Path) -> None:
    limits = {"limits": {"scratch_bytes": 2 * len(STACK)}}
    with start_service(bands_repository, tmp_path, **limits) as service:
        job = service.run()
        response = service.result(job)
        assert len(response.content) > service.runtime.scratch_space.max_client_bytes
        assert response.status_code == 200
        assert service.runtime.scratch_space.used_bytes == 0


def test_job_response_has_the_documented_headers_and_members(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()
    response = paths["paths"]["/jobs"]["post"]["responses"]["202"]
    assert response["headers"].keys() == {"Location"}
    schema = paths["components"]["schemas"]["JobReport"]
    assert service.submit().keys() == schema["properties"].keys()
    assert schema["example"].keys() <= schema["properties"].keys()
    for path, methods in paths["paths"].items():
        if path.startswith("/jobs/"):
            for operation in methods.values():
                assert {"404", "409", "410"} <= operation["responses"].keys()


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Settings for host folders that jobs may read and write: `scans`, which has a stack, and `results`."""
    for name in ("scans", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "scans" / "stack.tif").write_bytes(STACK)
    results = {"results": str(tmp_path / "results")}
    return {"inputs": {"scans": str(tmp_path / "scans")} | results, "outputs": results}


def test_job_reads_and_writes_host_files_even_after_a_restart(
    bands_repository: Path, tmp_path: Path, roots: Any
) -> None:
    parameters = {"input": "scans/stack.tif", "output_to": "results/labels.tif"}
    with start_service(bands_repository, tmp_path, references=roots) as service:
        job = service.submit_blocked_job(b"", **parameters)
        assert (job["name"], job["parameters"]) == ("stack.tif", parameters)
    with start_service(bands_repository, tmp_path, references=roots) as service:
        assert service.wait(job, "done", "failed")["state"] == "done"
        result = service.result(job)
        assert result.headers["content-type"] == "application/json"
        assert result.json()["output"] == "results/labels.tif"
        assert np.array_equal(tifffile.imread(tmp_path / "results" / "labels.tif"), ONES)
        assert [path.name for path in (tmp_path / "results").iterdir()] == ["labels.tif"]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("model", "There is no model 'bands'; "), ("file", "input: scans/stack.tif does not exist.")],
)
def test_job_fails_with_a_reason_if_its_model_or_file_is_missing_after_a_restart(
    bands_repository: Path, random_nuclei: ModelSpec, tmp_path: Path, roots: Any, missing: str, expected: str
) -> None:
    with start_service(bands_repository, tmp_path, references=roots) as service:
        job = service.submit_blocked_job(b"", input="scans/stack.tif")
    if missing == "file":
        (tmp_path / "scans" / "stack.tif").unlink()
    models = random_nuclei.folder.parent if missing == "model" else bands_repository
    with start_service(models, tmp_path, references=roots) as service:
        assert service.wait(job, "failed")["problem"]["detail"].startswith(expected)


@pytest.mark.parametrize("version", [pytest.param("0.4", marks=pytest.mark.thorough), "0.5"])
def test_job_writes_ome_zarr_even_after_a_restart(
    bands_repository: Path, tmp_path: Path, roots: Any, version: str
) -> None:
    results = tmp_path / "results"
    image = write_zarr(results / "image.ome.zarr", tifffile.imread(io.BytesIO(STACK)), version=version)
    requests = [{"input": "results/image.ome.zarr", "output_to": f"results/image.ome.zarr/labels/{n}"} for n in "ba"]
    requests.append({"input": "results/image.ome.zarr", "output_to": "results/labels.zarr"})
    with start_service(bands_repository, tmp_path, references=roots) as service:
        service.fake.gate.clear()
        jobs = [service.submit(b"", **parameters) for parameters in requests]
        # The files are read in parallel, so any of the jobs may be the first one.
        wait_until(lambda: "running" in [service.show(job)["state"] for job in jobs])
        # The state after a process is killed while it copies the result.
        partial = results / f".stackseg-{jobs[2]['id']}.part"
        (partial / "0").mkdir(parents=True)
        (service.async_jobs._store.get_input_path(jobs[2]["id"]).parent / "image.zarr" / "labels.zarr").mkdir(
            parents=True
        )
    with start_service(bands_repository, tmp_path, references=roots) as service:
        for job, parameters in zip(jobs, requests, strict=True):
            assert service.wait(job, "done", "failed")["state"] == "done"
            result = service.result(job).json()
            path = tmp_path / result["output"]
            assert (result["output"], result["media_type"]) == (parameters["output_to"], "application/vnd+zarr")
            assert result["bytes"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            volume = stack_reader.read(path, Selection(), 10**6)
            assert np.array_equal(volume.read_all()[0], ONES)
            assert volume.voxel_size == VoxelSize(0.5, 0.2, 0.2)
        assert parse_problem(service.post("/jobs", b"", **requests[2])) == (409, "output-exists")
        again = service.submit(b"", **requests[2], overwrite="true")
        assert service.wait(again, "done", "failed")["state"] == "done"
        for name in ("no.tif/labels/x", "image.ome.zarr/no/x", "image.ome.zarr/labels/x/y"):
            assert (
                service.client.post("/jobs", params=requests[2] | {"output_to": f"results/{name}"}).status_code == 422
            )
    for path in (image, results / "labels.zarr"):
        yaozarrs.validate_zarr_store(str(path))
    attributes = json.loads((image / "labels" / ("zarr.json" if version == "0.5" else ".zattrs")).read_text())
    assert (attributes["attributes"]["ome"] if version == "0.5" else attributes)["labels"] == ["a", "b"]
    assert sorted(path.name for path in results.iterdir()) == ["image.ome.zarr", "labels.zarr"]
    assert not [path for path in results.rglob("*stackseg*") if "stackseg-" in path.name]


def test_probabilities_in_the_labels_of_an_image_are_refused_before_the_input_is_read(
    bands_repository: Path, tmp_path: Path, roots: Any
) -> None:
    write_zarr(tmp_path / "results/image.ome.zarr", tifffile.imread(io.BytesIO(STACK)))
    parameters = {"input": "results/image.ome.zarr", "output_to": "results/image.ome.zarr/labels/a"}
    with start_service(bands_repository, tmp_path, references=roots) as service:
        response = service.post("/jobs", b"", **parameters, output="probabilities")

    assert parse_problem(response) == (422, "bad-parameter")
    assert "must be integers, not probabilities" in response.text


@pytest.mark.parametrize(("name", "writer"), [("labels.tif", tiff_writer), ("labels.zarr", zarr_writer)])
def test_job_cancelled_while_writing_leaves_nothing_on_the_host(
    bands_repository: Path, tmp_path: Path, roots: Any, name: str, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, resume = writer.write, threading.Event(), threading.Event()

    def slow_call(*arguments: Any, **options: Any) -> None:
        writing.set()
        resume.wait(20)
        write(*arguments, **options)

    monkeypatch.setattr(writer, "write", slow_call)
    with start_service(bands_repository, tmp_path, references=roots) as service:
        job = service.submit(output_to=f"results/{name}")
        assert writing.wait(20)
        assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
        resume.set()
        wait_until(lambda: service.async_jobs.runner.find(job["id"]) is None)
        assert service.show(job)["state"] == "cancelled"
        assert list((tmp_path / "results").iterdir()) == []
        assert not service.async_jobs._store.get_input_path(job["id"]).parent.exists()


def test_job_cancelled_while_reading_leaves_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, resume, ended = threading.Event(), threading.Event(), threading.Event()
    read = service.runtime.reader.read_small

    def slow_call(*arguments: Any, **options: Any) -> Any:
        reading.set()
        resume.wait(20)
        # Create the folder like `Reader.read`, which decodes into it.
        options["scratch"].mkdir(exist_ok=True)
        try:
            return read(*arguments, **options)
        finally:
            ended.set()

    monkeypatch.setattr(service.runtime.reader, "read_small", slow_call)
    job = service.submit()
    assert reading.wait(20)
    assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
    wait_until(lambda: service.async_jobs.runner.find(job["id"]) is None)
    resume.set()
    assert ended.wait(20)
    wait_until(lambda: service.leftovers() == [])


def test_deletion_of_old_jobs_is_retried_after_an_error(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def expire(_store: JobStore) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OutOfStorage("The disk is full.")

    monkeypatch.setattr(async_jobs, "CLEANUP_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(JobStore, "clean_up", expire)
    with start_service(bands_repository, tmp_path):
        wait_until(lambda: len(calls) > 2)


def test_channels_to_measure_are_read_before_the_job_starts(
    random_nuclei: ModelSpec, tmp_path: Path, roots: Any
) -> None:
    file, stack = tmp_path / "scans" / "stack.tif", np.zeros((4, 2, 8, 8), np.uint16)
    stack[1:3, 0, 2:4, 3:6], stack[:, 1] = 300, 7
    file.write_bytes(as_tiff(stack, metadata={"axes": "ZCYX", "spacing": 0.5, "unit": "um"}))
    with start_service(random_nuclei.folder.parent, tmp_path, references=roots) as service:
        job = service.submit_blocked_job(b"", input="scans/stack.tif", channel=0, measurements="csv")
        file.unlink()
        service.fake.gate.set()
        assert service.wait(job, "done", "failed")["state"] == "done"
        table = service.result(job).text.splitlines()
    assert "intensity_mean-1" in table[0]
    assert len(table) == 2


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_volume_and_labels_leave_memory_with_their_job(service: Service, end: str) -> None:
    with service.check_memory_is_freed():
        service.fake.gate.clear()
        if end == "failed":
            service.fake.error = OutOfMemory("too much", 1)
        job = service.submit()
        service.wait(job, "running")
        if end == "cancelled":
            service.client.delete(f"/jobs/{job['id']}")
        service.fake.gate.set()
        service.wait(job, end)


def test_job_reports_that_its_model_is_being_loaded(
    bands_content: dict[str, Any], write_model: Any, tmp_path: Path
) -> None:
    for name in ("alpha", "beta"):
        write_model(bands_content | {"name": name})
    (tmp_path / "service").mkdir()
    gate = threading.Event()

    def load(spec: Any, settings: Settings, _driver: Any) -> FakeSegmenter:
        if spec.name == "beta":
            gate.wait(30)
        return FakeSegmenter(spec, settings)

    with start_service(tmp_path / "models", tmp_path / "service", load=load) as service:
        found = {model["name"]: model for model in service.client.get("/models").json()["models"]}
        assert (found["alpha"]["loaded"], found["beta"]["loaded"], found["beta"]["state"]) == (True, False, "unloaded")
        inspection = service.post("/inspect", STACK, model="beta").json()
        assert (inspection["model"], inspection["problem"], inspection["estimate"]["windows"]) == ("beta/1", None, 1)
        job = service.submit(model="beta")
        assert service.wait(job, "loading")["position"] == 1
        assert service.client.get("/health/ready").status_code == 200
        gate.set()
        assert service.wait(job, "done")["model"] == "beta/1"
        beta = service.client.get("/models/beta").json()
        assert (beta["state"], beta["loaded"]) == ("ready", True)
        assert [(device["device"], device["bytes"]) for device in beta["devices"]] == [("cpu", 1000)]
        assert beta["devices"][0]["used"].startswith("20")
