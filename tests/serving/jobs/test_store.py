from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from service.core.errors import (
    BadFile,
    ConfigError,
    DeviceLost,
    InternalError,
    JobInterrupted,
    NotReady,
    OutOfMemory,
    OutOfStorage,
    StorageUnavailable,
    UnknownJob,
)
from service.core.hardware.devices import translate_error
from service.core.quantities import VoxelSize
from service.serving.jobs.failure import UNEXPECTED_FAILURE_MESSAGE
from service.serving.jobs.record import JobRequest
from service.serving.jobs.store import INPUT_NAME, JobStore
from service.serving.results.metadata import ResultMetadata

REQUEST = JobRequest("nuclei", {"overlap": 0.5}, "embryo.tif", window_count=8, receive_seconds=0.25)
ANSWER = ResultMetadata(
    "nuclei/1",
    "image/tiff",
    "embryo_labels.ome.tif",
    "labels",
    {"windows": 1.5},
    ("a note",),
    3,
    VoxelSize(1, 0.5, 2),
    "15px; stated",
)


def open_store(folder: Path, **limits: Any) -> JobStore:
    return JobStore(folder, **{"quota_bytes": 1000, "keep_seconds": 3600.0, "max_attempts": 2} | limits)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    job_store = open_store(tmp_path / "jobs")
    yield job_store
    job_store.close()


def accept(store: JobStore, size: int = 10, owner: str | None = None) -> str:
    upload = store.make_incoming_folder() / INPUT_NAME
    upload.write_bytes(bytes(size))
    store.accept(upload, owner, REQUEST)
    return upload.parent.name


def finish(store: JobStore, job_id: str, size: int = 20) -> bool:
    store.begin(job_id)
    result_file = store.get_input_path(job_id).with_name("labels.ome.tif")
    result_file.write_bytes(bytes(size))
    return store.finish(job_id, result_file, ANSWER)


def list_files(store: JobStore) -> list[str]:
    return sorted(str(path.relative_to(store._jobs_folder)) for path in store._jobs_folder.rglob("*"))


def test_job_passes_through_its_states_until_it_is_deleted(store: JobStore) -> None:
    job_id = accept(store, owner="ada")
    record = store.find(job_id, "ada")
    assert (record.state, record.request, record.owner, record.input_bytes) == ("waiting", REQUEST, "ada", 10)
    assert store.begin(job_id)
    assert not store.begin(job_id)
    assert store.find(job_id, "ada").state == "running"
    assert finish(store, job_id)
    record = store.find(job_id, "ada")
    assert (record.state, record.has_ended, record.result_metadata, record.result_bytes) == ("done", True, ANSWER, 20)
    assert record.created <= record.started <= record.ended
    assert list_files(store) == [job_id, f"{job_id}/result"]
    store.delete(job_id)
    with pytest.raises(UnknownJob):
        store.find(job_id, "ada")
    assert list_files(store) == []
    # Numbers and IDs are not reused.
    second = accept(store)
    assert (store.find(second, None).number, second != job_id) == (record.number + 1, True)


def test_owners_see_only_their_own_jobs(store: JobStore) -> None:
    adas_job, anonymous = accept(store, owner="ada"), accept(store)
    newest = accept(store, owner="ada")
    assert [record.id for record in store.list_newest("ada", 10)] == [newest, adas_job]
    assert [record.id for record in store.list_newest("ada", 1)] == [newest]
    assert [record.id for record in store.list_newest(None, 10)] == [anonymous]
    assert store.find(adas_job, "ada").id == adas_job
    for stranger in ("bob", None):
        with pytest.raises(UnknownJob):
            store.find(adas_job, stranger)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (error := BadFile("single pixels", parameter="axes", suggested={"axes": "ZYX"}), error),
        (error := OutOfMemory("too much", 123), error),
        (error := NotReady("loading"), error),
        (error := DeviceLost("gone"), error),
        (OSError(errno.ENOMEM, "no"), OutOfMemory(str(translate_error(OSError(errno.ENOMEM, "no"))))),
        # The message may contain secrets.
        (KeyError("the password"), InternalError(UNEXPECTED_FAILURE_MESSAGE)),
    ],
)
def test_failure_keeps_its_class_message_and_suggestions(store: JobStore, error: Any, expected: Any) -> None:
    job_id = accept(store)
    assert store.fail(job_id, error)
    record = store.find(job_id, None)
    assert record.state == "failed"
    assert (type(record.failure), str(record.failure)) == (type(expected), str(expected))
    for name in ("needed_bytes", "parameter", "suggested"):
        assert getattr(record.failure, name, None) == getattr(expected, name, None)


def test_cancelled_job_does_not_change_its_state(store: JobStore) -> None:
    job_id = accept(store)
    store.begin(job_id)
    assert store.cancel(job_id)
    assert not finish(store, job_id)
    assert not store.fail(job_id, BadFile("late"))
    assert not store.cancel(job_id)
    assert not store.requeue(job_id)
    store.delete_unneeded_files(job_id)
    assert (store.find(job_id, None).state, list_files(store)) == ("cancelled", [])


def test_unfinished_jobs_of_a_killed_process_are_recovered(store: JobStore) -> None:
    done, running, waiting = accept(store), accept(store), accept(store)
    finish(store, done)
    store.begin(running)
    (store.get_input_path(running).parent / ".labels.ome.tif.part").write_bytes(b"half")
    store.get_result_path(running).write_bytes(b"written, but not recorded before the process died")
    store.make_incoming_folder().joinpath(INPUT_NAME).write_bytes(b"half")
    # Closing is equivalent to a kill, because it writes nothing that is not yet on disk.
    store.close()
    with closing(open_store(store._folder)) as reopened:
        assert [record.id for record in reopened.recover()] == [running, waiting]
        assert reopened.find(done, None).result_metadata == ANSWER
        assert reopened.get_result_path(done).stat().st_size == 20
        assert {record.state for record in reopened.list_unfinished()} == {"waiting"}
        assert not list(reopened._incoming_folder.iterdir())
        assert [path.name for path in reopened.get_input_path(running).parent.iterdir()] == [INPUT_NAME]


def test_recovery_deletes_orphaned_folders_and_fails_jobs_without_input(
    store: JobStore,
) -> None:
    (store._jobs_folder / "orphan").mkdir()
    (store._jobs_folder / ".DS_Store").write_bytes(b"written by a file manager")
    missing, truncated = accept(store), accept(store)
    store.get_input_path(missing).unlink()
    store.get_input_path(truncated).write_bytes(b"")
    assert store.recover() == []
    for record in (store.find(missing, None), store.find(truncated, None)):
        assert (record.state, "input of the job was lost" in str(record.failure)) == ("failed", True)
    assert list_files(store) == [".DS_Store"]
    store.clean_up()
    assert list_files(store) == [".DS_Store"]


def test_recovery_expires_jobs_with_lost_or_truncated_results(store: JobStore) -> None:
    missing, truncated, intact = (accept(store) for _ in range(3))
    for job_id in (missing, truncated, intact):
        finish(store, job_id)
    store.get_result_path(missing).unlink()
    store.get_result_path(truncated).write_bytes(b"")
    store.recover()
    assert [store.find(job_id, None).state for job_id in (missing, truncated, intact)] == ["expired", "expired", "done"]
    assert list_files(store) == [intact, f"{intact}/result"]


def test_clean_up_deletes_leftover_files_but_keeps_files_of_running_jobs(store: JobStore) -> None:
    running, done = accept(store), accept(store)
    store.begin(running)
    finish(store, done)
    (store.get_input_path(running).with_name("labels.ome.tif")).write_bytes(b"half")
    store.get_input_path(done).write_bytes(b"leftover")
    (store._jobs_folder / "orphan").mkdir()
    (store._jobs_folder / "orphan" / INPUT_NAME).write_bytes(b"leftover")
    store.clean_up()
    assert list_files(store) == sorted(
        [running, f"{running}/{INPUT_NAME}", f"{running}/labels.ome.tif", done, f"{done}/result"]
    )


def test_job_that_kills_the_process_fails_after_the_last_attempt(store: JobStore) -> None:
    job_id = accept(store)
    for _ in range(5):
        store.begin(job_id)
        store.requeue(job_id)
    assert (store.find(job_id, None).state, store.find(job_id, None).attempts) == ("waiting", 0)
    for _ in range(2):
        assert store.begin(job_id)
        record = store.recover()
    assert record == []
    assert isinstance(store.find(job_id, None).failure, JobInterrupted)
    assert "2 times" in str(store.find(job_id, None).failure)


def test_no_job_is_lost_and_no_file_is_left_if_the_process_is_killed_at_any_line(tmp_path: Path) -> None:
    """Kill the process at every 61st line. Run `python tests/serving/killed_store.py FOLDER` to use every line."""
    command = [sys.executable, str(ROOT / "tests" / "serving" / "killed_store.py"), str(tmp_path), "61"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_quota_evicts_results_but_no_inputs_and_nothing_for_an_input_that_cannot_fit(store: JobStore) -> None:
    done, waiting, running = accept(store), accept(store, size=200), accept(store, size=300)
    finish(store, done, size=300)
    store.begin(running)
    with pytest.raises(OutOfStorage):
        accept(store, size=501)
    assert [store.find(job_id, None).state for job_id in (done, waiting, running)] == ["done", "waiting", "running"]
    assert all(path.exists() for path in (store.get_result_path(done), *map(store.get_input_path, (waiting, running))))
    accept(store, size=500)
    assert store.find(done, None).state == "expired"
    store.cancel(waiting)
    accept(store, size=200)


def test_quota_evicts_results_of_the_owner_who_uses_the_most_space(store: JobStore) -> None:
    adas_job = accept(store, owner="ada")
    finish(store, adas_job, size=100)
    bobs_jobs = [accept(store, owner="bob") for _ in range(3)]
    for job_id in bobs_jobs:
        finish(store, job_id, size=300)
    assert [store.find(job_id, "bob").state for job_id in bobs_jobs] == ["done", "done", "done"]
    third = accept(store, size=250, owner="bob")
    assert [store.find(job_id, "bob").state for job_id in bobs_jobs] == ["expired", "done", "done"]
    newest = accept(store, size=60, owner="ada")
    assert store.find(bobs_jobs[1], "bob").state == "expired"
    assert store.find(adas_job, "ada").state == "done"
    with pytest.raises(OutOfStorage):
        accept(store, size=951, owner="bob")
    assert [store.find(job_id, "bob").state for job_id in (bobs_jobs[2], third)] == ["done", "waiting"]
    assert [store.find(job_id, "ada").state for job_id in (adas_job, newest)] == ["done", "waiting"]
    assert not store.get_result_path(bobs_jobs[0]).exists()
    # A new result also evicts older results.
    assert finish(store, third, size=800)
    assert [store.find(job_id, "bob").state for job_id in (bobs_jobs[2], third)] == ["expired", "done"]


def test_inputs_of_one_owner_leave_space_for_other_owners(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "jobs", is_shared=True)) as store:
        accept(store, size=500, owner="ada")
        with pytest.raises(OutOfStorage):
            accept(store, size=1, owner="ada")
        accept(store, size=250, owner="bob")
        accept(store, size=125, owner="cleo")


def test_permissions_of_existing_folders_are_restricted(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    for path in (folder, folder / "jobs"):
        path.mkdir(mode=0o755)
    store = open_store(folder)
    accept(store)
    assert {path.name for path in folder.iterdir() if path.stat().st_mode & 0o077} == set()
    store.close()


def test_finished_jobs_expire(store: JobStore) -> None:
    done, waiting = accept(store), accept(store)
    finish(store, done)
    store.clean_up()
    assert store.find(done, None).state == "done"
    store._keep_seconds = -1.0  # as if the retention time had passed
    store.clean_up()
    with pytest.raises(UnknownJob):
        store.find(done, None)
    assert store.find(waiting, None).state == "waiting"
    assert list_files(store) == [waiting, f"{waiting}/{INPUT_NAME}"]


def test_deleted_folder_is_recreated_as_soon_as_possible(store: JobStore) -> None:
    job_id, folder = accept(store), store._folder
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "jobs.sqlite3").write_bytes(b"another database")
    assert "Another database" in (store.repair() or "")
    assert (folder / "jobs.sqlite3").read_bytes() == b"another database"
    shutil.rmtree(folder)
    blocking_folder = folder / "jobs.sqlite3-wal"
    blocking_folder.mkdir(parents=True)
    for _ in range(2):
        assert "cannot be recreated" in (store.repair() or "")
        with pytest.raises(StorageUnavailable):
            store.find(job_id, None)
    blocking_folder.rmdir()
    assert "has been recreated" in (store.repair() or "")
    assert store.repair() is None
    assert store.find(job_id, None).state == "waiting"


def test_only_the_newest_jobs_without_a_result_are_kept(store: JobStore) -> None:
    jobs = {owner: [accept(store, owner=owner) for _ in range(4)] for owner in ("ada", "bob")}
    for job_id in jobs["ada"]:
        store.fail(job_id, BadFile("truncated"))
    store.cancel(jobs["bob"][0])
    store.fail(jobs["bob"][1], BadFile("truncated"))
    finish(store, jobs["bob"][2])
    store.clean_up(max_jobs_without_result=2)
    assert [record.id for record in store.list_newest("ada", 9)] == [jobs["ada"][3], jobs["ada"][2]]
    assert [record.id for record in store.list_newest("bob", 9)] == jobs["bob"][::-1]


def test_only_the_newest_jobs_with_a_result_are_kept(store: JobStore) -> None:
    jobs = {owner: [accept(store, owner=owner) for _ in range(3)] for owner in ("ada", "bob", None)}
    for job_id in [*jobs["ada"], *jobs["bob"][:2], *jobs[None]]:
        finish(store, job_id)
    store.clean_up(max_jobs_with_result=2)
    assert [record.id for record in store.list_newest("ada", 9)] == jobs["ada"][:0:-1]
    assert [record.id for record in store.list_newest("bob", 9)] == jobs["bob"][::-1]
    assert [record.id for record in store.list_newest(None, 9)] == jobs[None][:0:-1]
    assert not store.get_input_path(jobs["ada"][0]).parent.exists()
    assert store.get_result_path(jobs["ada"][1]).exists()


# Runs a store without root privileges, and makes its parent folder inaccessible for a while.
INACCESSIBLE_FOLDER_SCRIPT = """
import os, sys
from pathlib import Path
from service.serving.jobs.store import JobStore

parent = Path(sys.argv[1])
if os.getuid() == 0:
    os.chown(parent, 65534, 65534)
    os.setuid(65534)
store = JobStore(parent / "jobs", quota_bytes=1, keep_seconds=1, max_attempts=1)
parent.chmod(0)
print(store.repair())
parent.chmod(0o700)
print(store.repair())
"""


def test_inaccessible_folder_is_reported_and_used_again_later() -> None:
    with tempfile.TemporaryDirectory() as parent:
        command = [sys.executable, "-c", INACCESSIBLE_FOLDER_SCRIPT, parent]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    problem, later_problem = process.stdout.splitlines()
    assert problem == "The jobs folder cannot be used: Permission denied."
    assert later_problem == "None"


def test_folder_that_cannot_be_used_is_a_configuration_error(store: JobStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another service"):
        open_store(store._folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"jobs\.folder"):
        open_store(tmp_path / "file" / "jobs")
    (tmp_path / "invalid").mkdir()
    (tmp_path / "invalid" / "jobs.sqlite3").write_bytes(b"not a database" * 1000)
    with pytest.raises(ConfigError, match=r"not a database\. Move the folder away"):
        open_store(tmp_path / "invalid")


def test_documented_recovery_of_a_damaged_database_keeps_readable_jobs(store: JobStore) -> None:
    jobs = [accept(store, owner="ada") for _ in range(100)]
    store.close()
    with (store._folder / "jobs.sqlite3").open("r+b") as file:
        file.seek(20480)
        file.write(bytes(4096))
    with pytest.raises(ConfigError, match=r'cannot be used: .+"Damaged database"'):
        open_store(store._folder)
    if shutil.which("sqlite3") is None:
        pytest.skip("requires the command sqlite3")
    manual = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8").partition("## Damaged database")[2]
    subprocess.run(["bash", "-ec", manual.partition("```sh\n")[2].partition("```")[0]], check=True, cwd=store._folder)
    with closing(open_store(store._folder)) as recovered:
        recovered_ids = {record.id for record in recovered.recover()}
        assert recovered_ids <= set(jobs)
        assert len(recovered_ids) > 50
        assert list_files(recovered) == sorted(
            part for job_id in recovered_ids for part in (job_id, f"{job_id}/{INPUT_NAME}")
        )


def test_job_files_without_a_database_are_not_deleted(store: JobStore) -> None:
    job_id = accept(store)
    store.close()
    for path in store._folder.glob("jobs.sqlite3*"):
        path.unlink()
    with pytest.raises(ConfigError, match="database of these jobs is missing"):
        open_store(store._folder)
    assert list_files(store) == [job_id, f"{job_id}/{INPUT_NAME}"]


def test_database_of_a_different_version_is_not_changed(store: JobStore) -> None:
    store.database.execute("PRAGMA user_version = 7")
    store.close()
    with pytest.raises(ConfigError, match="a different version"):
        open_store(store._folder)


def test_full_database_raises_out_of_storage(store: JobStore) -> None:
    store.database._connection.execute("PRAGMA max_page_count = 6")
    with pytest.raises(OutOfStorage):
        [accept(store, size=1) for _ in range(200)]
    assert len(list_files(store)) == 2 * len(store.list_unfinished()), "rejected jobs must not leave files"


def test_job_is_deleted_although_its_result_fills_the_disk(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    done, running = accept(store), accept(store)
    finish(store, done)
    store.begin(running)
    result_path, execute = store.get_result_path(done), store.database.execute

    def execute_on_full_disk(statement: str, *values: object) -> int:
        if result_path.exists():
            raise OutOfStorage("The disk is full.")
        return execute(statement, *values)

    monkeypatch.setattr(store.database, "execute", execute_on_full_disk)
    with pytest.raises(OutOfStorage):
        store.delete(running)
    assert result_path.exists()

    store.delete(done)

    with pytest.raises(UnknownJob):
        store.find(done, None)
    assert list_files(store) == [running, f"{running}/{INPUT_NAME}"]
