"""Kill a process at any line of `JobStore`, and check that the next process finds consistent jobs.

python tests/serving/killed_store.py FOLDER [STEP]

The executed lines of `store.py` and `database.py` are counted. In each run, the process is killed `STEP` lines later
than in the previous run. When the store is opened again, it must be consistent with all events that the process has
reported.
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
from service.serving.jobs.store import INPUT_NAME, RESULT_NAME, JobStore
from service.serving.results.metadata import ResultMetadata

TRACED_FILES = {job_store.__file__, job_database.__file__}
REQUEST = JobRequest("nuclei", {}, "embryo.tif", window_count=8)
ANSWER = ResultMetadata("nuclei/1", "image/tiff", "embryo_labels.ome.tif", "labels", {})
# Allowed states of a job after its last reported event.
ALLOWED_STATES = {
    "accepted": {"waiting", "failed", "done", "cancelled"},
    "begun": {"waiting", "done"},
    "done": {"done", "deleted", "expired"},
    "failed": {"failed"},
    "cancelled": {"cancelled", "deleted"},
    "deleted": {"deleted"},
}


def open_store(folder: Path) -> JobStore:
    return JobStore(folder, quota_bytes=1000, keep_seconds=3600, max_attempts=2)


def run_operations(folder: Path, pipe_fd: int) -> None:
    """Perform all operations on jobs, and report each completed operation through a pipe."""

    def accept() -> str:
        upload = store.make_incoming_folder() / INPUT_NAME
        upload.write_bytes(bytes(300))
        store.accept(upload, "ada", REQUEST)
        report(upload.parent.name, "accepted")
        return upload.parent.name

    def report(job_id: str, event: str) -> None:
        os.write(pipe_fd, f"{job_id} {event}\n".encode())

    def finish(job_id: str) -> None:
        store.begin(job_id)
        report(job_id, "begun")
        result_file = store.get_input_path(job_id).with_name("labels.ome.tif")
        result_file.write_bytes(bytes(400))
        store.finish(job_id, result_file, ANSWER)
        report(job_id, "done")

    with closing(open_store(folder)) as store:
        finish(accept())
        failed, cancelled = accept(), accept()
        store.fail(failed, BadFile("truncated"))
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
    """Return a trace function that kills the process at the executed line of the store with this number."""
    remaining_lines = number

    def trace(frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal remaining_lines
        if frame.f_code.co_filename not in TRACED_FILES:
            return None
        remaining_lines -= event == "line"
        if remaining_lines == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def check_store(folder: Path, last_events: dict[str, str]) -> None:
    """Check the jobs and files in the store against the last reported event of each job."""
    with closing(open_store(folder)) as store:
        pending_ids = {record.id for record in store.recover()}
        expected_files = set[str]()
        records = {record.id: record for record in store.list_newest("ada", 1000)}
        for job_id, event in last_events.items():
            state = records[job_id].state if job_id in records else "deleted"
            assert state in ALLOWED_STATES[event], f"{job_id} was {event}, but its state is {state}"
        for job_id, record in records.items():
            assert (job_id in pending_ids) == (record.state == "waiting"), record
            if record.state in {"waiting", "done"}:
                name, size = (
                    (INPUT_NAME, record.input_bytes) if job_id in pending_ids else (RESULT_NAME, record.result_bytes)
                )
                assert (store._jobs_folder / job_id / name).stat().st_size == size
                expected_files |= {job_id, f"{job_id}/{name}"}
        actual_files = {str(path.relative_to(store._jobs_folder)) for path in store._jobs_folder.rglob("*")}
        assert actual_files == expected_files, f"unexpected or missing files: {actual_files ^ expected_files}"
        assert not list(store._incoming_folder.iterdir())


def main() -> None:
    root, step = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    number, status, kill_count = 1, -1, 0
    while status != 0:
        folder = root / "jobs"
        read_fd, write_fd = os.pipe()
        child_pid = os.fork()
        if child_pid == 0:
            os.close(read_fd)
            sys.settrace(kill_at(number))
            run_operations(folder, write_fd)
            os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd) as lines:
            last_events = dict(line.split() for line in lines)
        _, status = os.waitpid(child_pid, 0)
        assert status in {0, signal.SIGKILL}, f"the process failed at line {number}"
        check_store(folder, last_events)
        shutil.rmtree(folder)
        number += step
        kill_count += status != 0
    print(f"killed {kill_count} times within {number - step} lines")


if __name__ == "__main__":
    main()
