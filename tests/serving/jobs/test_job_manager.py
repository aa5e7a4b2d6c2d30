"""Jobs during storage errors, in a killed server, with many clients, and with a large stack."""

from __future__ import annotations

import math
import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import chaos
import large
import load
import numpy as np
import pytest
from fakes import wait_until
from full_disk import full_disk
from job_service import Service, start_service
from live import STACK, TIFF, as_tiff

from service.api.messages.headers import ANONYMOUS
from service.core.errors import OutOfStorage


@pytest.fixture
def service(bands_repository: Path, tmp_path: Path) -> Iterator[Service]:
    """A service that retries once after storage errors."""
    with start_service(bands_repository, tmp_path) as running_service:
        shorten_timeouts(running_service)
        yield running_service


def shorten_timeouts(service: Service) -> None:
    """Shorten the time that a service waits for a locked database and retries after storage errors."""
    service.async_jobs.runner.retry_seconds = 0.1
    service.async_jobs._store.database.query("PRAGMA busy_timeout = 50")


@contextmanager
def lock_database(folder: Path) -> Iterator[None]:
    """Lock the database, as another program does while it writes to the database."""
    with closing(sqlite3.connect(folder / "jobs" / "jobs.sqlite3", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


STORAGE_ERRORS = {
    "locked": lock_database,
    "full": lambda _folder: full_disk(),
    # There is only enough space for the database.
    "full for results": lambda _folder: full_disk(2**18),
}
StorageError = Callable[[Path], Any]


def submit_two(service: Service, stack: bytes = STACK) -> tuple[dict[str, Any], dict[str, Any]]:
    """Submit a job that runs until the gate is opened, and a job that waits in the queue. Return both."""
    service.fake.gate.clear()
    running = service.submit(stack)
    service.wait(running, "running")
    waiting = service.submit(stack)
    wait_until(lambda: service.show(waiting)["position"] == 1)
    return running, waiting


def read_state(service: Service, job: dict[str, Any]) -> str:
    return str(service.async_jobs._store.find(job["id"], ANONYMOUS).state)


def list_job_files(folder: Path) -> list[str]:
    """List the files and folders of all jobs. Folders that are deleted meanwhile are skipped."""
    return sorted(
        str(Path(parent, name).relative_to(folder / "jobs"))
        for parent, folders, files in os.walk(folder / "jobs" / "jobs")
        for name in folders + files
    )


@pytest.mark.parametrize("storage_error", [STORAGE_ERRORS["locked"], STORAGE_ERRORS["full"]], ids=["locked", "full"])
def test_jobs_finish_after_a_temporary_storage_error(
    service: Service, tmp_path: Path, storage_error: StorageError, caplog: pytest.LogCaptureFixture
) -> None:
    service.async_jobs.runner.retry_seconds = 60
    jobs = submit_two(service)
    with storage_error(tmp_path):
        service.fake.gate.set()
        wait_until(lambda: caplog.text.count("Retrying for 60 s") == 2)
        assert {service.show(job)["state"] for job in jobs} <= {"waiting", "running"}
        response = service.client.post("/jobs", content=STACK, headers=TIFF)
        assert response.status_code in {503, 507}
        assert response.json()["type"].endswith(("storage-unavailable", "out-of-storage"))
    for job in jobs:
        service.wait(job, "done")
        assert service.result(job).status_code == 200
    ids = sorted(job["id"] for job in jobs)
    assert list_job_files(tmp_path) == [f"jobs/{part}" for job in ids for part in (job, f"{job}/result")]
    assert list((tmp_path / "jobs" / "incoming").iterdir()) == []


@pytest.mark.parametrize("storage_error", [STORAGE_ERRORS["locked"], STORAGE_ERRORS["full"]], ids=["locked", "full"])
def test_jobs_fail_with_the_reason_if_a_storage_error_persists(
    service: Service, tmp_path: Path, storage_error: StorageError, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = submit_two(service)
    with storage_error(tmp_path):
        service.fake.gate.set()
        for job in jobs:
            report = service.wait(job, "failed")
            assert report["problem"]["type"].endswith(("storage-unavailable", "out-of-storage"))
            assert report["ended"] is not None
            assert service.result(job).status_code in {503, 507}
            assert read_state(service, job) in {"waiting", "running"}
            assert f"job {job['id']} has failed: " in caplog.text
        wait_until(lambda: not service.async_jobs.runner.active_jobs)
    wait_until(lambda: service.client.get("/health/ready").status_code == 200)
    for job in jobs:
        wait_until(lambda job=job: read_state(service, job) == "failed")
    wait_until(lambda: list_job_files(tmp_path) == [])
    for job in jobs:
        assert service.client.delete(f"/jobs/{job['id']}").status_code == 204


def test_storage_error_during_maintenance_is_logged_as_one_line(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lock_database(tmp_path):
        service.async_jobs._last_cleanup = -math.inf
        wait_until(lambda: "will be retried. The job database cannot be used" in caplog.text)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("has_restarted", [False, True])
@pytest.mark.parametrize("storage_error", [STORAGE_ERRORS["locked"], STORAGE_ERRORS["full"]], ids=["locked", "full"])
def test_canceled_jobs_stop_although_the_cancellation_cannot_be_recorded(
    bands_repository: Path, tmp_path: Path, storage_error: StorageError, has_restarted: bool
) -> None:
    with ExitStack() as storage_errors, start_service(bands_repository, tmp_path) as service:
        shorten_timeouts(service)
        jobs = submit_two(service)
        # Another job must not be affected.
        other = service.submit()
        storage_errors.enter_context(storage_error(tmp_path))
        for job in jobs:
            assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
            assert service.show(job)["state"] == "cancelled"
            assert read_state(service, job) in {"waiting", "running"}
        assert {job["state"] for job in service.client.get("/jobs").json()["jobs"]} == {"cancelled", "waiting"}
        if not has_restarted:
            service.fake.gate.set()
            wait_until(lambda: [job.id for job in service.async_jobs.runner.active_jobs] == [other["id"]])
            storage_errors.close()
            for job in jobs:
                wait_until(lambda job=job: read_state(service, job) == "cancelled")
            service.wait(other, "done")
        else:
            # A killed process records nothing.
            service.async_jobs._store.database.execute = raise_full_disk
    if has_restarted:
        with start_service(bands_repository, tmp_path) as service:
            assert {service.show(job)["state"] for job in jobs} == {"failed"}
            service.wait(other, "done")
    assert list_job_files(tmp_path) == [f"jobs/{other['id']}", f"jobs/{other['id']}/result"]


def raise_full_disk(*_arguments: object) -> NoReturn:
    raise OutOfStorage("The disk is full.")


@pytest.mark.parametrize("storage_error", STORAGE_ERRORS.values(), ids=STORAGE_ERRORS)
def test_jobs_are_resumed_after_a_service_stops_during_a_storage_error(
    bands_repository: Path, tmp_path: Path, storage_error: StorageError
) -> None:
    noise = as_tiff(np.random.default_rng(1).integers(0, 200, (4, 1200, 1200), np.uint8))
    with ExitStack() as storage_errors, start_service(bands_repository, tmp_path) as service:
        shorten_timeouts(service)
        service.async_jobs.runner.retry_seconds = 60
        jobs = submit_two(service, noise)
        storage_errors.enter_context(storage_error(tmp_path))
        service.fake.gate.set()
        wait_until(lambda: not service.runtime.devices.running_jobs)
    with start_service(bands_repository, tmp_path) as service:
        for job in jobs:
            service.wait(job, "done")
            assert service.result(job).status_code == 200


def test_job_stored_by_a_different_version_fails_without_blocking_other_jobs(
    bands_repository: Path, tmp_path: Path
) -> None:
    with start_service(bands_repository, tmp_path) as service:
        jobs = submit_two(service)
    with closing(sqlite3.connect(tmp_path / "jobs" / "jobs.sqlite3")) as database, database:
        database.execute("UPDATE jobs SET parameters = ? WHERE id = ?", ('{"sharpness": 1}', jobs[0]["id"]))
    with start_service(bands_repository, tmp_path) as service:
        assert service.wait(jobs[0], "failed")["problem"]["type"].endswith("internal-error")
        service.wait(jobs[1], "done")


def delete_folder(service: Service, folder: Path, reason: str) -> None:
    """Delete a folder, and block its path with a file until the service reports the problem."""
    shutil.rmtree(folder)
    folder.touch()
    wait_until(lambda: reason in service.client.get("/health/ready").text)
    assert service.client.get("/health").status_code == 503
    folder.unlink()
    wait_until(lambda: service.client.get("/health/ready").status_code == 200)


def test_deleted_jobs_folder_is_recreated_and_lost_results_are_reported(
    service: Service, bands_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished_job = service.wait(service.submit(), "done")
    jobs = submit_two(service)
    delete_folder(service, tmp_path / "jobs", "jobs folder was deleted and cannot be recreated")
    assert "The jobs folder was deleted and has been recreated" in caplog.text
    response = service.result(finished_job)
    assert (response.status_code, response.json()["type"]) == (410, "urn:stackseg:problem:result-gone")
    service.fake.gate.set()
    jobs = (*jobs, service.submit())
    for job in jobs:
        service.wait(job, "done")
        assert service.result(job).status_code == 200
    with closing(sqlite3.connect(tmp_path / "jobs" / "jobs.sqlite3")) as database:
        assert database.execute("SELECT COUNT(*) FROM jobs WHERE state = 'done'").fetchone() == (4,)


@pytest.mark.parametrize("part", ["", "requests", "cache"])
def test_deleted_scratch_folder_is_recreated(service: Service, part: str) -> None:
    folder = service.runtime.scratch.path / part
    delete_folder(service, folder, "scratch folder was deleted and cannot be recreated")
    service.wait(service.submit(), "done")
    assert service.client.post("/segment", content=STACK, headers=TIFF).status_code == 200


def test_service_with_a_damaged_database_is_not_ready(service: Service, tmp_path: Path) -> None:
    for _ in range(30):
        service.submit()
    database = tmp_path / "jobs" / "jobs.sqlite3"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (database.stat().st_size - 4096))
    service.async_jobs._store.database._connection.execute("PRAGMA shrink_memory")
    answer = service.client.get("/jobs?limit=1000")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:stackseg:problem:storage-unavailable")
    assert str(tmp_path) not in answer.text
    wait_until(lambda: "job database" in service.client.get("/health/ready").text)


@pytest.mark.thorough
def test_no_job_is_lost_or_corrupted_when_the_server_is_killed() -> None:
    """Run `benchmarks/chaos.py` briefly with restarts only. It exits with status 1 if a guarantee is violated."""
    command = [sys.executable, chaos.__file__, "--minutes", "0.2", "--seed", "3", "--faults", "restart"]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
    assert "jobs accepted" in process.stdout


@pytest.mark.parametrize(("seconds", "clients"), [(1, 8), pytest.param(4, 16, marks=pytest.mark.thorough)])
def test_concurrent_clients_get_correct_results_despite_disconnects(
    bands_repository: Path, tmp_path: Path, seconds: int, clients: int
) -> None:
    """Run `benchmarks/load.py` briefly, which checks labels, status codes, and leftover and open files."""
    figures = load.run(seconds, clients, bands_repository, tmp_path / "service")
    event_counts = figures["happened"]
    assert min(event_counts["labels waited for"], event_counts["labels fetched later"], event_counts["hung up"]) > 0
    # An event loop that is blocked by a running volume would take seconds. The limit allows for a busy machine.
    assert figures["health_live_milliseconds"]["p99"] < 1000
    # Thread pools grow to their maximum number.
    initial_usage, final_usage = figures["idle"]["before"], figures["idle"]["after"]
    assert final_usage["threads"] < initial_usage["threads"] + 64


def test_host_stack_is_segmented_to_a_host_file(tmp_path: Path) -> None:
    """Run `benchmarks/large.py` with a small stack. It raises AssertionError for wrong labels or too much memory."""
    (figures,) = large.run([0.05], tmp_path)
    assert figures["shape"] == [6, *large.PLANE]
    assert figures["peak_anonymous_bytes"] > 0


def test_jobs_are_kept_in_the_state_folder_by_default_and_a_second_service_says_that_its_jobs_are_temporary(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "second").mkdir()
    with (
        start_service(bands_repository, tmp_path, jobs={}) as first,
        start_service(bands_repository, tmp_path / "second", jobs={}) as second,
    ):
        job = first.run()
        assert "state/stackseg/jobs is in use by another service" in caplog.text
        assert [service.client.get("/limits").json()["temporary_jobs"] for service in (first, second)] == [False, True]
        assert second.client.get(f"/jobs/{job['id']}").status_code == 404
        assert second.result(second.run()).status_code == 200
    assert (tmp_path / "state" / "stackseg" / "jobs").stat().st_mode & 0o077 == 0
    with start_service(bands_repository, tmp_path, jobs={}) as restarted:
        assert restarted.result(job).status_code == 200


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_user_without_a_home_directory_has_temporary_jobs(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    else:
        monkeypatch.setenv("HOME", home)
    with start_service(bands_repository, tmp_path, jobs={}) as service:
        assert service.client.get("/limits").json()["temporary_jobs"]
        assert service.result(service.run()).status_code == 200
