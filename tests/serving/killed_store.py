"""Kill a process that uses a `JobStore` between any two of its lines, and check what the next process finds.

python tests/serving/killed_store.py FOLDER [EVERY]

Lines of `store.py` and `database.py` are counted as they run, and the process is killed at the first, at the
next of `EVERY` lines, and so on to the last. What it had been told by then must hold for whoever opens the folder next.
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
# What a job may be found as after it was last heard of.
FOUND = {
    "accepted": {"waiting", "failed", "done", "cancelled"},
    "begun": {"waiting", "done"},
    "done": {"done", "deleted", "expired"},
    "failed": {"failed"},
    "cancelled": {"cancelled", "deleted"},
    "deleted": {"deleted"},
}


def open_store(folder: Path) -> JobStore:
    return JobStore(folder, quota_bytes=1000, keep_seconds=3600, attempts=2)


def work(folder: Path, tell: int) -> None:
    """Do all that happens to jobs, and tell what has happened so far."""

    def accept() -> str:
        upload = store.make_incoming() / INPUT
        upload.write_bytes(bytes(300))
        store.accept(upload, "ada", REQUEST)
        say(upload.parent.name, "accepted")
        return upload.parent.name

    def say(job: str, event: str) -> None:
        os.write(tell, f"{job} {event}\n".encode())

    def finish(job: str) -> None:
        store.begin(job)
        say(job, "begun")
        written = store.input_path(job).with_name("labels.ome.tif")
        written.write_bytes(bytes(400))
        store.finish(job, written, ANSWER)
        say(job, "done")

    with closing(open_store(folder)) as store:
        finish(accept())
        failed, cancelled = accept(), accept()
        store.fail(failed, BadFile("cut short"))
        say(failed, "failed")
        store.delete_unneeded_files(failed)
        store.cancel(cancelled)
        say(cancelled, "cancelled")
        store.delete(cancelled)
        say(cancelled, "deleted")
        # Makes the first result make room.
        accept()
        finish(accept())


def kill_at(number: int) -> Any:
    """Return a trace function that kills the process at so many lines of the store."""
    left = number

    def trace(frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def check(folder: Path, heard: dict[str, str]) -> None:
    with closing(open_store(folder)) as store:
        pending = {record.id for record in store.recover()}
        files = set[str]()
        known = {record.id: record for record in store.newest("ada", 1000)}
        for job, event in heard.items():
            state = known[job].state if job in known else "deleted"
            assert state in FOUND[event], f"{job} was {event} and is {state}"
        for job, record in known.items():
            assert (job in pending) == (record.state == "waiting"), record
            if record.state in {"waiting", "done"}:
                kept, size = (INPUT, record.input_bytes) if job in pending else (RESULT, record.result_bytes)
                assert (store._jobs / job / kept).stat().st_size == size
                files |= {job, f"{job}/{kept}"}
        found = {str(path.relative_to(store._jobs)) for path in store._jobs.rglob("*")}
        assert found == files, f"files are left or lost: {found ^ files}"
        assert not list(store._incoming.iterdir())


def main() -> None:
    root, every = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    number, status, killed = 1, -1, 0
    while status != 0:
        folder = root / "jobs"
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            sys.settrace(kill_at(number))
            work(folder, tell)
            os._exit(0)
        os.close(tell)
        with os.fdopen(told) as lines:
            heard = dict(line.split() for line in lines)
        _, status = os.waitpid(child, 0)
        assert status in {0, signal.SIGKILL}, f"the process failed at line {number}"
        check(folder, heard)
        shutil.rmtree(folder)
        number += every
        killed += status != 0
    print(f"killed {killed} times within {number - every} lines")


if __name__ == "__main__":
    main()
