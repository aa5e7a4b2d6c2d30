"""Kill a process at any line of `JobStore`, and check that the next process finds consistent jobs.

python tests/serving/killed_store.py FOLDER [EVERY]

The executed lines of `store.py` and `database.py` are counted. In each run, the process is killed `EVERY` lines later
than in the previous run. All events that the process has reported must hold when the store is opened again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

from service.core.errors import BadFile
from service.serving.jobs import database as job_database
from service.serving.jobs import store as job_store
from service.serving.jobs.record import JobRequest
from service.serving.jobs.store import INPUT, RESULT, JobStore
from service.serving.results.metadata import AnswerMetadata

FILES = {job_store.__file__, job_database.__file__}
REQUEST = JobRequest("nuclei", {}, "embryo.tif", windows=8)
ANSWER = AnswerMetadata("nuclei/1", "image/tiff", "embryo_labels.ome.tif", "labels", {})
# Allowed states of a job after the last event that was reported for it.
ALLOWED_STATES = {
    "accepted": {"waiting", "failed", "done", "cancelled"},
    "begun": {"waiting", "done"},
    "done": {"done", "deleted", "expired"},
    "failed": {"failed"},
    "cancelled": {"cancelled", "deleted"},
    "deleted": {"deleted"},
}


def open_store(folder: Path) -> JobStore:
    return JobStore(folder, quota_bytes=1000, keep_seconds=3600, attempts=2)


def work(folder: Path, pipe: int) -> None:
    """Perform all operations on jobs, and report each completed operation through a pipe."""

    def accept() -> str:
        upload = store.make_incoming() / INPUT
        upload.write_bytes(bytes(300))
        store.accept(upload, "ada", REQUEST)
        report(upload.parent.name, "accepted")
        return upload.parent.name

    def report(job: str, event: str) -> None:
        os.write(pipe, f"{job} {event}\n".encode())

    def finish(job: str) -> None:
        store.begin(job)
        report(job, "begun")
        written = store.input_path(job).with_name("labels.ome.tif")
        written.write_bytes(bytes(400))
        store.finish(job, written, ANSWER)
        report(job, "done")

    with closing(open_store(folder)) as store:
        finish(accept())
        failed, cancelled = accept(), accept()
        store.fail(failed, BadFile("cut short"))
        report(failed, "failed")
        store.delete_unneeded_files(failed)
        store.cancel(cancelled)
        report(cancelled, "cancelled")
        store.delete(cancelled)
        report(cancelled, "deleted")
        # Exceed the quota, so that the first result is deleted.
        accept()
        finish(accept())


def kill_at(number: int) -> Any:
    """Return a trace function that kills the process at line `number` of the executed lines of the store."""
    remaining = number

    def trace(frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal remaining
        if frame.f_code.co_filename not in FILES:
            return None
        remaining -= event == "line"
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def check(folder: Path, last_events: dict[str, str]) -> None:
    """Check the jobs and files in the store against the last reported event of each job."""
    with closing(open_store(folder)) as store:
        pending = {record.id for record in store.recover()}
        files = set[str]()
        known = {record.id: record for record in store.list_newest("ada", 1000)}
        for job, event in last_events.items():
            state = known[job].state if job in known else "deleted"
            assert state in ALLOWED_STATES[event], f"{job} was {event}, but its state is {state}"
        for job, record in known.items():
            assert (job in pending) == (record.state == "waiting"), record
            if record.state in {"waiting", "done"}:
                name, size = (INPUT, record.input_bytes) if job in pending else (RESULT, record.result_bytes)
                assert (store._jobs / job / name).stat().st_size == size
                files |= {job, f"{job}/{name}"}
        found = {str(path.relative_to(store._jobs)) for path in store._jobs.rglob("*")}
        assert found == files, f"unexpected or missing files: {found ^ files}"
        assert not list(store._incoming.iterdir())


def main() -> None:
    root, every = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    number, status, killed = 1, -1, 0
    while status != 0:
        folder = root / "jobs"
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            sys.settrace(kill_at(number))
            work(folder, write_end)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as lines:
            last_events = dict(line.split() for line in lines)
        _, status = os.waitpid(child, 0)
        assert status in {0, signal.SIGKILL}, f"the process failed at line {number}"
        check(folder, last_events)
        shutil.rmtree(folder)
        number += every
        killed += status != 0
    print(f"killed {killed} times within {number - every} lines")


if __name__ == "__main__":
    main()
