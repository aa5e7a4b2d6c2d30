"""Jobs under faults of the storage, in a server that is killed, in one with many clients, and with a large stack."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import chaos
import large
import load
import numpy as np
import pytest
from fakes import until
from full_disk import full_disk
from job_service import Service, start
from live import STACK, TIFF, as_tiff

from service.api.messages.headers import ANONYMOUS


@pytest.fixture
def service(bands_repository: Path, tmp_path: Path) -> Iterator[Service]:
    """A service that gives a fault of the storage a second to pass."""
    with start(bands_repository, tmp_path) as running:
        hurry(running)
        yield running


def hurry(service: Service) -> None:
    """Have a service wait for less long for a database that is locked, and for faults to pass."""
    service.async_jobs.runner.fault_seconds = 1
    service.async_jobs._store._database.query("PRAGMA busy_timeout = 50")


@contextmanager
def locked_database(folder: Path) -> Iterator[None]:
    """As another program does it that writes to the database."""
    with closing(sqlite3.connect(folder / "jobs" / "jobs.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


FAULTS = {
    "locked": locked_database,
    "full": lambda _folder: full_disk(),
    # Enough for the database.
    "full for results": lambda _folder: full_disk(2**18),
}
Fault = Callable[[Path], Any]


def submit_two(service: Service, stack: bytes = STACK) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job that runs until the gate is opened, and one that waits for it."""
    service.fake.gate.clear()
    running = service.submit(stack)
    service.wait(running, "running")
    waiting = service.submit(stack)
    until(lambda: service.show(waiting)["position"] == 1)
    return running, waiting


def state_on_disk(service: Service, job: dict[str, Any]) -> str:
    return str(service.async_jobs._store.find(job["id"], ANONYMOUS).state)


def files_on_disk(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder / "jobs")) for path in (folder / "jobs" / "jobs").rglob("*"))


@pytest.mark.parametrize("fault", [FAULTS["locked"], FAULTS["full"]], ids=["locked", "full"])
def test_jobs_begin_and_end_as_they_should_once_a_fault_has_passed(
    service: Service, tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    service.async_jobs.runner.fault_seconds = 60
    jobs = submit_two(service)
    with fault(tmp_path):
        service.fake.gate.set()
        until(lambda: caplog.text.count("Tried again for 60 s") == 2)
        assert {service.show(job)["state"] for job in jobs} <= {"waiting", "running"}
        refused = service.client.post("/jobs", content=STACK, headers=TIFF)
        assert refused.status_code in {503, 507}
        assert refused.json()["type"].endswith(("storage-unavailable", "out-of-storage"))
        assert service.client.delete(f"/jobs/{jobs[0]['id']}").status_code in {503, 507}
    for job in jobs:
        service.wait(job, "done")
        assert service.result(job).status_code == 200
    ids = sorted(job["id"] for job in jobs)
    assert files_on_disk(tmp_path) == [f"jobs/{part}" for job in ids for part in (job, f"{job}/result")]
    assert list((tmp_path / "jobs" / "incoming").iterdir()) == []


@pytest.mark.parametrize("fault", [FAULTS["locked"], FAULTS["full"]], ids=["locked", "full"])
def test_jobs_fail_with_the_reason_when_a_fault_lasts(
    service: Service, tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = submit_two(service)
    with fault(tmp_path):
        service.fake.gate.set()
        for job in jobs:
            failed = service.wait(job, "failed")
            assert failed["problem"]["type"].endswith(("storage-unavailable", "out-of-storage"))
            assert failed["ended"] is not None
            assert service.result(job).status_code in {503, 507}
            assert state_on_disk(service, job) in {"waiting", "running"}
            assert f"job {job['id']} has failed: " in caplog.text
        until(lambda: not service.async_jobs.runner.jobs)
    until(lambda: service.client.get("/health/ready").status_code == 200)
    for job in jobs:
        until(lambda job=job: state_on_disk(service, job) == "failed")
    until(lambda: files_on_disk(tmp_path) == [])
    for job in jobs:
        assert service.client.delete(f"/jobs/{job['id']}").status_code == 204


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_service_that_ends_during_a_fault_does_the_jobs_after_it(
    bands_repository: Path, tmp_path: Path, fault: Fault
) -> None:
    noise = as_tiff(np.random.default_rng(1).integers(0, 200, (4, 1200, 1200), np.uint8))
    with ExitStack() as faulty, start(bands_repository, tmp_path) as service:
        hurry(service)
        service.async_jobs.runner.fault_seconds = 60
        jobs = submit_two(service, noise)
        faulty.enter_context(fault(tmp_path))
        service.fake.gate.set()
        until(lambda: not service.runtime.devices.running)
    with start(bands_repository, tmp_path) as service:
        for job in jobs:
            service.wait(job, "done")
            assert service.result(job).status_code == 200


def test_job_that_another_version_has_kept_fails_and_keeps_none_from_running(
    bands_repository: Path, tmp_path: Path
) -> None:
    with start(bands_repository, tmp_path) as service:
        jobs = submit_two(service)
    with closing(sqlite3.connect(tmp_path / "jobs" / "jobs.sqlite3")) as database, database:
        database.execute("UPDATE jobs SET parameters = ? WHERE id = ?", ('{"sharpness": 1}', jobs[0]["id"]))
    with start(bands_repository, tmp_path) as service:
        assert service.wait(jobs[0], "failed")["problem"]["type"].endswith("internal-error")
        service.wait(jobs[1], "done")


def delete_folder(service: Service, folder: Path, reason: str) -> None:
    """Delete a folder, and have a file in its way for as long as it takes the service to notice."""
    shutil.rmtree(folder)
    folder.touch()
    until(lambda: reason in service.client.get("/health/ready").text)
    assert service.client.get("/health").status_code == 503
    folder.unlink()
    until(lambda: service.client.get("/health/ready").status_code == 200)


def test_deleted_folder_of_jobs_is_made_again_and_no_job_is_lost_silently(
    service: Service, bands_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = service.wait(service.submit(), "done")
    jobs = submit_two(service)
    delete_folder(service, tmp_path / "jobs", "folder of jobs was deleted, and cannot be made again")
    assert "The folder of jobs was deleted, and is made again" in caplog.text
    gone = service.result(done)
    assert (gone.status_code, gone.json()["type"]) == (410, "urn:stackseg:problem:result-gone")
    service.fake.gate.set()
    jobs = (*jobs, service.submit())
    for job in jobs:
        service.wait(job, "done")
        assert service.result(job).status_code == 200
    with closing(sqlite3.connect(tmp_path / "jobs" / "jobs.sqlite3")) as database:
        assert database.execute("SELECT COUNT(*) FROM jobs WHERE state = 'done'").fetchone() == (4,)


@pytest.mark.parametrize("part", ["", "requests", "cache"])
def test_deleted_scratch_folder_is_made_again(service: Service, part: str) -> None:
    folder = service.runtime.scratch.path / part
    delete_folder(service, folder, "scratch folder was deleted, and cannot be made again")
    service.wait(service.submit(), "done")
    assert service.client.post("/segment", content=STACK, headers=TIFF).status_code == 200


def test_damaged_database_is_not_ready_and_says_so(service: Service, tmp_path: Path) -> None:
    for _ in range(30):
        service.submit()
    database = tmp_path / "jobs" / "jobs.sqlite3"
    with closing(sqlite3.connect(database)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (database.stat().st_size - 4096))
    service.async_jobs._store._database._connection.execute("PRAGMA shrink_memory")
    answer = service.client.get("/jobs?limit=1000")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:stackseg:problem:storage-unavailable")
    assert str(tmp_path) not in answer.text
    until(lambda: "database of jobs" in service.client.get("/health/ready").text)


def test_nothing_is_lost_and_nothing_half_written_when_the_server_is_killed() -> None:
    """`benchmarks/chaos.py` does it for longer, with other faults as well; a broken promise is status 1."""
    command = [sys.executable, chaos.__file__, "--minutes", "0.2", "--seed", "3", "--faults", "restart"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert "jobs accepted" in ended.stdout


@pytest.mark.parametrize(("seconds", "clients"), [(1, 8), pytest.param(4, 16, marks=pytest.mark.thorough)])
def test_many_clients_some_of_them_rude_get_what_each_gets_alone(
    bands_repository: Path, tmp_path: Path, seconds: int, clients: int
) -> None:
    """`benchmarks/load.py` does it for longer; wrong labels, a 500 or a file that is left raise AssertionError."""
    figures = load.run(seconds, clients, bands_repository, tmp_path / "service")
    happened = figures["happened"]
    assert min(happened["labels waited for"], happened["labels fetched later"], happened["hung up"]) > 0
    # A loop that is blocked while a volume runs would take seconds; the benchmark measures on a quiet machine.
    assert figures["health_live_milliseconds"]["p99"] < 1000
    # What one request, one hang-up or one cancelled job left behind would be there for each client. Pools fill up.
    before, after = figures["idle"]["before"], figures["idle"]["after"]
    assert after["descriptors"] < before["descriptors"] + clients
    assert after["threads"] < before["threads"] + 64


def test_stack_on_the_host_becomes_labels_on_the_host(tmp_path: Path) -> None:
    """`benchmarks/large.py` does it with 20 GB; wrong labels or too much memory raise AssertionError."""
    (figures,) = large.run([0.05], tmp_path)
    assert figures["shape"] == [6, *large.PLANE]
    assert figures["peak_anonymous_bytes"] > 0
