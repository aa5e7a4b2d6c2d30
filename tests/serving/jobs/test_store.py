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
    Interrupted,
    NotReady,
    OutOfMemory,
    OutOfStorage,
    StorageUnavailable,
    UnknownJob,
)
from service.core.hardware.devices import translate_error
from service.core.quantities import VoxelSize
from service.serving.jobs.failure import UNEXPECTED_FAILURE
from service.serving.jobs.record import JobRequest
from service.serving.jobs.store import INPUT, JobStore
from service.serving.results.metadata import AnswerMetadata

ORDER = JobRequest("nuclei", {"overlap": 0.5}, "embryo.tif", windows=8, receive_seconds=0.25)
OUTCOME = AnswerMetadata(
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
    return JobStore(folder, **{"quota_bytes": 1000, "keep_seconds": 3600.0, "attempts": 2} | limits)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    opened = open_store(tmp_path / "jobs")
    yield opened
    opened.close()


def accept(store: JobStore, size: int = 10, owner: str | None = None) -> str:
    upload = store.make_incoming() / INPUT
    upload.write_bytes(bytes(size))
    store.accept(upload, owner, ORDER)
    return upload.parent.name


def finish(store: JobStore, job: str, size: int = 20) -> bool:
    store.begin(job)
    written = store.input_path(job).with_name("labels.ome.tif")
    written.write_bytes(bytes(size))
    return store.finish(job, written, OUTCOME)


def files(store: JobStore) -> list[str]:
    return sorted(str(path.relative_to(store._jobs)) for path in store._jobs.rglob("*"))


def test_job_goes_its_way(store: JobStore) -> None:
    job = accept(store, owner="ada")
    record = store.find(job, "ada")
    assert (record.state, record.request, record.owner, record.input_bytes) == ("waiting", ORDER, "ada", 10)
    assert store.begin(job)
    assert not store.begin(job)
    assert store.find(job, "ada").state == "running"
    assert finish(store, job)
    record = store.find(job, "ada")
    assert (record.state, record.over, record.answer, record.result_bytes) == ("done", True, OUTCOME, 20)
    assert record.created <= record.started <= record.ended
    assert files(store) == [job, f"{job}/result"]
    store.delete(job)
    with pytest.raises(UnknownJob):
        store.find(job, "ada")
    assert files(store) == []
    # Numbers and ids are not given twice.
    second = accept(store)
    assert (store.find(second, None).number, second != job) == (record.number + 1, True)


def test_owner_sees_only_his_own(store: JobStore) -> None:
    hers, nobodys = accept(store, owner="ada"), accept(store)
    newest = accept(store, owner="ada")
    assert [record.id for record in store.newest("ada", 10)] == [newest, hers]
    assert [record.id for record in store.newest("ada", 1)] == [newest]
    assert [record.id for record in store.newest(None, 10)] == [nobodys]
    assert store.find(hers, "ada").id == hers
    for stranger in ("bob", None):
        with pytest.raises(UnknownJob):
            store.find(hers, stranger)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (error := BadFile("single pixels", parameter="axes", suggested={"axes": "ZYX"}), error),
        (error := OutOfMemory("too much", 123), error),
        (error := NotReady("loading"), error),
        (error := DeviceLost("gone"), error),
        (OSError(errno.ENOMEM, "no"), OutOfMemory(str(translate_error(OSError(errno.ENOMEM, "no"))))),
        # It may tell secrets.
        (KeyError("the password"), InternalError(UNEXPECTED_FAILURE)),
    ],
)
def test_failure_keeps_its_kind_its_words_and_what_to_try(store: JobStore, error: Any, expected: Any) -> None:
    job = accept(store)
    assert store.fail(job, error)
    record = store.find(job, None)
    assert record.state == "failed"
    assert (type(record.failure), str(record.failure)) == (type(expected), str(expected))
    for name in ("needed_bytes", "parameter", "suggested"):
        assert getattr(record.failure, name, None) == getattr(expected, name, None)


def test_what_is_over_stays_as_it_is(store: JobStore) -> None:
    job = accept(store)
    store.begin(job)
    assert store.cancel(job)
    assert not finish(store, job)
    assert not store.fail(job, BadFile("late"))
    assert not store.cancel(job)
    assert not store.requeue(job)
    store.delete_unneeded_files(job)
    assert (store.find(job, None).state, files(store)) == ("cancelled", [])


def test_work_of_a_process_that_died_is_done_again(store: JobStore) -> None:
    done, running, waiting = accept(store), accept(store), accept(store)
    finish(store, done)
    store.begin(running)
    (store.input_path(running).parent / ".labels.ome.tif.part").write_bytes(b"half")
    store.result_path(running).write_bytes(b"written, but the process died before it said so")
    store.make_incoming().joinpath(INPUT).write_bytes(b"half")
    # What the next process finds: closing writes nothing that is not on disk already.
    store.close()
    with closing(open_store(store._folder)) as later:
        assert [record.id for record in later.recover()] == [running, waiting]
        assert later.find(done, None).answer == OUTCOME
        assert later.result_path(done).stat().st_size == 20
        assert {record.state for record in later.pending()} == {"waiting"}
        assert not list(later._incoming.iterdir())
        assert [path.name for path in later.input_path(running).parent.iterdir()] == [INPUT]


def test_folder_without_a_row_goes_a_row_without_its_input_fails_and_files_of_others_stay(
    store: JobStore,
) -> None:
    (store._jobs / "orphan").mkdir()
    (store._jobs / ".DS_Store").write_bytes(b"seen by a file manager")
    lost, short = accept(store), accept(store)
    store.input_path(lost).unlink()
    store.input_path(short).write_bytes(b"")
    assert store.recover() == []
    for record in (store.find(lost, None), store.find(short, None)):
        assert (record.state, "input of the job is lost" in str(record.failure)) == ("failed", True)
    assert files(store) == [".DS_Store"]
    store.clean_up()
    assert files(store) == [".DS_Store"]


def test_result_that_is_lost_or_cut_short_is_not_promised_after_a_start(store: JobStore) -> None:
    lost, short, whole = (accept(store) for _ in range(3))
    for job in (lost, short, whole):
        finish(store, job)
    store.result_path(lost).unlink()
    store.result_path(short).write_bytes(b"")
    store.recover()
    assert [store.find(job, None).state for job in (lost, short, whole)] == ["expired", "expired", "done"]
    assert files(store) == [whole, f"{whole}/result"]


def test_files_that_a_fault_left_are_deleted_in_time_and_those_of_jobs_at_work_are_not(store: JobStore) -> None:
    running, done = accept(store), accept(store)
    store.begin(running)
    finish(store, done)
    (store.input_path(running).with_name("labels.ome.tif")).write_bytes(b"half")
    store.input_path(done).write_bytes(b"left")
    (store._jobs / "orphan").mkdir()
    (store._jobs / "orphan" / INPUT).write_bytes(b"left")
    store.clean_up()
    assert files(store) == sorted([running, f"{running}/{INPUT}", f"{running}/labels.ome.tif", done, f"{done}/result"])


def test_job_that_the_process_dies_of_is_not_begun_for_ever_and_stopping_does_not_count(store: JobStore) -> None:
    job = accept(store)
    for _ in range(5):
        store.begin(job)
        store.requeue(job)
    assert (store.find(job, None).state, store.find(job, None).attempts) == ("waiting", 0)
    for _ in range(2):
        assert store.begin(job)
        record = store.recover()
    assert record == []
    assert isinstance(store.find(job, None).failure, Interrupted)
    assert "2 times" in str(store.find(job, None).failure)


def test_nothing_is_lost_or_left_when_the_process_is_killed_between_two_lines(tmp_path: Path) -> None:
    """`python tests/serving/killed_store.py FOLDER` kills between any two."""
    command = [sys.executable, str(ROOT / "tests" / "serving" / "killed_store.py"), str(tmp_path), "61"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_inputs_of_jobs_that_are_not_over_stay_and_so_do_results_for_what_does_not_fit_anyway(store: JobStore) -> None:
    done, waiting, running = accept(store), accept(store, size=200), accept(store, size=300)
    finish(store, done, size=300)
    store.begin(running)
    with pytest.raises(OutOfStorage):
        accept(store, size=501)
    assert [store.find(job, None).state for job in (done, waiting, running)] == ["done", "waiting", "running"]
    assert all(path.exists() for path in (store.result_path(done), *map(store.input_path, (waiting, running))))
    accept(store, size=500)
    assert store.find(done, None).state == "expired"
    store.cancel(waiting)
    accept(store, size=200)


def test_results_of_whoever_has_most_make_room_and_those_of_others_stay(store: JobStore) -> None:
    hers = accept(store, owner="ada")
    finish(store, hers, size=100)
    his = [accept(store, owner="bob") for _ in range(3)]
    for job in his:
        finish(store, job, size=300)
    assert [store.find(job, "bob").state for job in his] == ["done", "done", "done"]
    third = accept(store, size=250, owner="bob")
    assert [store.find(job, "bob").state for job in his] == ["expired", "done", "done"]
    newest = accept(store, size=60, owner="ada")
    assert store.find(his[1], "bob").state == "expired"
    assert store.find(hers, "ada").state == "done"
    with pytest.raises(OutOfStorage):
        accept(store, size=951, owner="bob")
    assert [store.find(job, "bob").state for job in (his[2], third)] == ["done", "waiting"]
    assert [store.find(job, "ada").state for job in (hers, newest)] == ["done", "waiting"]
    assert not store.result_path(his[0]).exists()
    # So they do for a new result.
    assert finish(store, third, size=800)
    assert [store.find(job, "bob").state for job in (his[2], third)] == ["expired", "done"]


def test_inputs_of_an_owner_leave_as_much_as_they_take(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "jobs", shared=True)) as store:
        accept(store, size=500, owner="ada")
        with pytest.raises(OutOfStorage):
            accept(store, size=1, owner="ada")
        accept(store, size=250, owner="bob")
        accept(store, size=125, owner="cleo")


def test_nobody_else_may_look_into_a_folder_that_was_open_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    for path in (folder, folder / "jobs"):
        path.mkdir(mode=0o755)
    store = open_store(folder)
    accept(store)
    assert {path.name for path in folder.iterdir() if path.stat().st_mode & 0o077} == set()
    store.close()


def test_what_is_over_is_forgotten_in_time(store: JobStore) -> None:
    done, waiting = accept(store), accept(store)
    finish(store, done)
    store.clean_up()
    assert store.find(done, None).state == "done"
    store._keep = -1.0  # as if that time had passed
    store.clean_up()
    with pytest.raises(UnknownJob):
        store.find(done, None)
    assert store.find(waiting, None).state == "waiting"
    assert files(store) == [waiting, f"{waiting}/{INPUT}"]


def test_deleted_folder_is_made_again_once_the_disk_allows_it(store: JobStore) -> None:
    job, folder = accept(store), store._folder
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "jobs.sqlite3").write_bytes(b"of somebody else")
    assert "another database" in (store.mend() or "")
    assert (folder / "jobs.sqlite3").read_bytes() == b"of somebody else"
    shutil.rmtree(folder)
    in_the_way = folder / "jobs.sqlite3-wal"
    in_the_way.mkdir(parents=True)
    for _ in range(2):
        assert "cannot be made again" in (store.mend() or "")
        with pytest.raises(StorageUnavailable):
            store.find(job, None)
    in_the_way.rmdir()
    assert "is made again" in (store.mend() or "")
    assert store.mend() is None
    assert store.find(job, None).state == "waiting"


def test_only_the_newest_jobs_without_a_result_are_kept(store: JobStore) -> None:
    jobs = {owner: [accept(store, owner=owner) for _ in range(4)] for owner in ("ada", "bob")}
    for job in jobs["ada"]:
        store.fail(job, BadFile("cut short"))
    store.cancel(jobs["bob"][0])
    store.fail(jobs["bob"][1], BadFile("cut short"))
    finish(store, jobs["bob"][2])
    store.clean_up(most=2)
    assert [record.id for record in store.newest("ada", 9)] == [jobs["ada"][3], jobs["ada"][2]]
    assert [record.id for record in store.newest("bob", 9)] == jobs["bob"][::-1]


# A store without the rights of root, whose parent folder its user may not enter for a while.
FORBIDDEN = """
import os, sys
from pathlib import Path
from service.serving.jobs.store import JobStore

parent = Path(sys.argv[1])
if os.getuid() == 0:
    os.chown(parent, 65534, 65534)
    os.setuid(65534)
store = JobStore(parent / "jobs", quota_bytes=1, keep_seconds=1, attempts=1)
parent.chmod(0)
print(store.mend())
parent.chmod(0o700)
print(store.mend())
"""


def test_folder_that_may_not_be_entered_is_told_and_used_again_later() -> None:
    with tempfile.TemporaryDirectory() as parent:
        command = [sys.executable, "-c", FORBIDDEN, parent]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    problem, later = ended.stdout.splitlines()
    assert problem == "The folder of jobs cannot be used: Permission denied."
    assert later == "None"


def test_folder_that_cannot_be_used_is_a_configuration_error(store: JobStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another service"):
        open_store(store._folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"jobs\.folder"):
        open_store(tmp_path / "file" / "jobs")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "jobs.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"not a database\. Move the folder away"):
        open_store(tmp_path / "odd")


def test_damaged_database_is_refused_and_its_documented_rescue_keeps_the_jobs_that_can_be_read(store: JobStore) -> None:
    jobs = [accept(store, owner="ada") for _ in range(100)]
    store.close()
    with (store._folder / "jobs.sqlite3").open("r+b") as file:
        file.seek(20480)
        file.write(bytes(4096))
    with pytest.raises(ConfigError, match=r'cannot be used: .+"Damaged database"'):
        open_store(store._folder)
    if shutil.which("sqlite3") is None:
        pytest.skip("needs the command sqlite3")
    manual = (ROOT / "docs" / "running.md").read_text(encoding="utf-8").partition("### Damaged database")[2]
    subprocess.run(["bash", "-ec", manual.partition("```sh\n")[2].partition("```")[0]], check=True, cwd=store._folder)
    with closing(open_store(store._folder)) as rescued:
        kept = {record.id for record in rescued.recover()}
        assert kept <= set(jobs)
        assert len(kept) > 50
        assert files(rescued) == sorted(part for job in kept for part in (job, f"{job}/{INPUT}"))


def test_files_of_jobs_without_their_database_are_not_deleted(store: JobStore) -> None:
    job = accept(store)
    store.close()
    for path in store._folder.glob("jobs.sqlite3*"):
        path.unlink()
    with pytest.raises(ConfigError, match="their database is gone"):
        open_store(store._folder)
    assert files(store) == [job, f"{job}/{INPUT}"]


def test_database_of_another_version_is_left_alone(store: JobStore) -> None:
    store._database.change("PRAGMA user_version = 7")
    store.close()
    with pytest.raises(ConfigError, match="another version"):
        open_store(store._folder)


def test_database_that_finds_the_disk_full_is_out_of_storage(store: JobStore) -> None:
    store._database._connection.execute("PRAGMA max_page_count = 6")
    with pytest.raises(OutOfStorage):
        [accept(store, size=1) for _ in range(200)]
    assert len(files(store)) == 2 * len(store.pending()), "what was not accepted leaves nothing"
