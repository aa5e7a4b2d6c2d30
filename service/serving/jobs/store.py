"""Jobs on disk: a row each in an embedded database, and a folder each for the input and the result.

The process may be killed at any moment. A folder gets its final name once its input is whole on disk, the row comes
after the folder, and the row says `done` once the result is whole on disk. The next start deletes folders without a
row, and files that a row does not need. Numbers and ids are never given twice.

All methods raise OutOfStorage where the disk is full, and StorageUnavailable where the folder or the database cannot be
used otherwise: locked by another program, damaged, deleted. Nothing has changed then but files that no row names, which
`clean_up` deletes.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
import uuid
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from pydantic import TypeAdapter

from service.core.errors import (
    InternalError,
    Interrupted,
    OutOfStorage,
    StackSegError,
    StorageUnavailable,
    UnknownJob,
)
from service.core.files.whole_file import sync_to_disk
from service.serving.jobs.database import JobDatabase
from service.serving.jobs.failure import decode_failure, encode_failure
from service.serving.jobs.record import JobRecord, JobRequest
from service.serving.results.metadata import AnswerMetadata
from service.serving.storage.disk import translate_disk_faults

INPUT = "upload.tif"
RESULT = "result"
# In SQL, of jobs that wait or run.
UNFINISHED = "state IN ('waiting', 'running')"
# With what changes, and a condition.
UPDATE = "UPDATE jobs SET {} WHERE id = ? AND {}"
# Jobs that failed, were cancelled or lost their result are kept for as long as others, yet no more than this of each
# owner: they are in nobody's way but the list's, and cost their owner nothing.
MAX_WITHOUT_RESULT = 1000
_ANSWER = TypeAdapter(AnswerMetadata)


class JobStore:
    """The jobs folder. Safe to use from several threads; only one process at a time may hold a folder.

    Args:
        folder: made if it does not exist
        quota_bytes: of inputs and results together; the oldest results of the owner who has most make room for new ones
        shared: whether several owners share the quota; the inputs of none may then take more of it than they leave free
        keep_seconds: how long a job is kept once it is over
        attempts: how often a job may begin when the process dies of it

    Raises ConfigError for a folder that cannot be used, or that another process holds.
    """

    def __init__(
        self, folder: Path, *, quota_bytes: int, keep_seconds: float, attempts: int, shared: bool = False
    ) -> None:
        self._folder, self._quota, self._shared = folder, quota_bytes, shared
        self._keep, self._attempts = keep_seconds, attempts
        self._jobs, self._incoming = folder / "jobs", folder / "incoming"
        self._database = JobDatabase(folder, (self._jobs, self._incoming))
        self._lock = self._database.lock

    def mend(self) -> str | None:
        """Make again what somebody has deleted of the folders; return what is wrong with the store, in one sentence.

        The rows survive, since the deleted database is still open. Inputs and results do not: their jobs say so.
        """
        return self._database.mend()

    def close(self) -> None:
        """Let another process use the folder. May be called twice."""
        self._database.close()

    def make_incoming(self) -> Path:
        """Make a folder for a file that arrives. Its size does not count until `accept`."""
        folder = self._incoming / uuid.uuid4().hex
        with translate_disk_faults():
            folder.mkdir()
        return folder

    def accept(self, upload: Path, owner: str | None, request: JobRequest) -> None:
        """Keep the file INPUT in a folder of `make_incoming`, whose name becomes the job's id.

        From the moment this returns the job outlives the process. Raises OutOfStorage if the quota has no room.
        """
        job = upload.parent.name
        folder = self._jobs / job
        with translate_disk_faults():
            size = upload.stat().st_size
            self._make_room(size, owner)
            sync_to_disk(upload, upload.parent)
        values = (job, owner, request.model, json.dumps(request.parameters), request.name, request.windows)
        # Others may have taken the room while the file went to the disk.
        with self._lock:
            self._make_room(size, owner)
            try:
                with translate_disk_faults():
                    upload.parent.rename(folder)
                    sync_to_disk(self._jobs)
                self._database.change(
                    "INSERT INTO jobs (state, id, owner, model, parameters, name, windows, receive_seconds,"
                    " created, input_bytes) VALUES ('waiting', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    *values,
                    request.receive_seconds,
                    time.time(),
                    size,
                )
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def find(self, job: str, owner: str | None) -> JobRecord:
        """Return a job of this owner. Raises UnknownJob, for jobs of others as well."""
        records = self._select("SELECT * FROM jobs WHERE id = ? AND owner IS ?", job, owner)
        if not records:
            raise UnknownJob("There is no such job: its id is wrong, it was deleted, or it was kept long enough.")
        return records[0]

    def newest(self, owner: str | None, limit: int) -> list[JobRecord]:
        """Return the newest jobs of an owner, newest first."""
        statement = "SELECT * FROM jobs WHERE owner IS ? ORDER BY number DESC LIMIT ?"
        return self._select(statement, owner, limit)

    def pending(self) -> list[JobRecord]:
        """Return the jobs that wait or run, oldest first."""
        return self._select("SELECT * FROM jobs WHERE state IN ('waiting', 'running') ORDER BY number")

    def input_path(self, job: str) -> Path:
        """Return the path of the posted file. Results may be written beside it before `finish`."""
        return self._jobs / job / INPUT

    def result_path(self, job: str) -> Path:
        """Return the path of the result, which is whole if the job is done."""
        return self._jobs / job / RESULT

    def begin(self, job: str) -> bool:
        """Change waiting to running; return False if the job is not waiting."""
        changes = "state = 'running', started = ?, attempts = attempts + 1"
        return self._update(job, "state = 'waiting'", changes, time.time())

    def credit(self, job: str) -> bool:
        """Count the attempts of a running job anew: it has got further than before."""
        return self._update(job, "state = 'running'", "attempts = 1")

    def requeue(self, job: str) -> bool:
        """Change running to waiting without counting the attempt: the service stops, which is not the job's fault."""
        changes = "state = 'waiting', started = NULL, attempts = attempts - 1"
        return self._update(job, "state = 'running'", changes)

    def finish(self, job: str, written: Path, answer: AnswerMetadata, fault: StackSegError | None = None) -> bool:
        """Change waiting or running to done with a result in the job's folder; return False if the job is over.

        `fault` tells why the result is only a part of what was asked for.
        """
        result = self.result_path(job)
        with translate_disk_faults():
            sync_to_disk(written)
            written.rename(result)
            sync_to_disk(result.parent)
            size = result.stat().st_size
        changes = "state = 'done', ended = ?, result_bytes = ?, outcome = ?, failure = ?"
        outcome, failure = json.dumps(asdict(answer)), None if fault is None else encode_failure(fault)
        done = self._update(job, UNFINISHED, changes, time.time(), size, outcome, failure)
        # Whatever fails from here, the job is done: the next one makes room, and `clean_up` deletes files.
        with suppress(OutOfStorage, StorageUnavailable):
            # Its owner may have deleted it meanwhile.
            for record in self._select("SELECT * FROM jobs WHERE id = ? AND state = 'done'", job) if done else ():
                self.delete_unneeded_files(job)
                self._evict(0, record.owner, spare=job)
        return done

    def fail(self, job: str, error: BaseException) -> bool:
        """Change waiting or running to failed; return False if the job is over."""
        return self._update(
            job, UNFINISHED, "state = 'failed', ended = ?, failure = ?", time.time(), encode_failure(error)
        )

    def cancel(self, job: str) -> bool:
        """Change waiting or running to cancelled; return False if the job is over."""
        return self._update(job, UNFINISHED, "state = 'cancelled', ended = ?", time.time())

    def delete(self, job: str) -> None:
        """Delete a job that is over."""
        self._database.change("DELETE FROM jobs WHERE id = ? AND state NOT IN ('waiting', 'running')", job)
        self.delete_unneeded_files(job)

    def delete_unneeded_files(self, job: str) -> None:
        """Delete the files that a job in its present state does not need."""
        folder = self._jobs / job
        records = self._select("SELECT * FROM jobs WHERE id = ?", job)
        with translate_disk_faults(), suppress(FileNotFoundError):
            if not records or records[0].state in {"failed", "cancelled", "expired"}:
                shutil.rmtree(folder)
                return
            kept = RESULT if records[0].state == "done" else INPUT
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != kept:
                    path.unlink(missing_ok=True)

    def recover(self) -> list[JobRecord]:
        """Clean up after a killed process; return the jobs that have to run, oldest first."""
        with translate_disk_faults():
            shutil.rmtree(self._incoming)
            self._incoming.mkdir(mode=0o700)
        for record in self._select("SELECT * FROM jobs WHERE state = 'done'"):
            if _size(self.result_path(record.id)) != record.result_bytes:
                self._expire(record.id)
        for record in self.pending():
            if _size(self.input_path(record.id)) != record.input_bytes:
                self.fail(record.id, InternalError("The input of the job is lost; post it again."))
            elif record.state == "running" and record.attempts >= self._attempts:
                times = "once" if record.attempts == 1 else f"{record.attempts} times"
                self.fail(record.id, Interrupted(f"The service died {times} while it ran; post a smaller part of it."))
            else:
                self._update(record.id, "state = 'running'", "state = 'waiting', started = NULL")
        for job in self._list_folders():
            self.delete_unneeded_files(job)
        return self.pending()

    def clean_up(self, most: int = MAX_WITHOUT_RESULT) -> None:
        """Delete jobs that have been over for longer than they are kept, and files that a fault has left behind.

        Of those without a result, only the newest are kept, `most` of each owner.
        """
        statement = (
            "SELECT id FROM ("
            "SELECT id, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY number DESC) AS place FROM jobs"
            " WHERE state IN ('failed', 'cancelled', 'expired')"
            ") WHERE place > ?"
        )
        for (job,) in self._database.query(statement, most):
            self.delete(job)
        for record in self._select("SELECT * FROM jobs WHERE ended < ?", time.time() - self._keep):
            if record.over:
                self.delete(record.id)
        for job in self._list_folders():
            # A job is accepted with the lock: its row is not there yet when its folder is.
            with self._lock:
                statement = "SELECT * FROM jobs WHERE id = ? AND state IN ('waiting', 'running')"
                if not self._select(statement, job):
                    self.delete_unneeded_files(job)

    def _list_folders(self) -> list[str]:
        with translate_disk_faults():
            return [folder.name for folder in self._jobs.iterdir() if folder.is_dir()]

    def _make_room(self, size: int, owner: str | None) -> None:
        """Make room for an input of `size` bytes. Raises OutOfStorage, deleting nothing, where that is not possible."""
        with self._lock:
            if not self._inputs_fit(size, owner) or not self._evict(size, owner):
                raise OutOfStorage(
                    "The jobs that wait and run take up the room that the operator allows; try again when some are "
                    "done, or post a smaller file."
                )

    def _inputs_fit(self, size: int, owner: str | None) -> bool:
        inputs = self._sum_inputs()
        left = self._quota - inputs.total() - size
        return left >= (inputs[owner] + size if self._shared else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs that are needed, and of the results."""
        return (self._sum_inputs() + self._sum_results()).total()

    def _sum_inputs(self) -> Counter[str | None]:
        """Return by owner the bytes of the inputs that are needed."""
        return self._sum(
            "SELECT owner, SUM(input_bytes) FROM jobs WHERE state IN ('waiting', 'running') GROUP BY owner"
        )

    def _sum_results(self) -> Counter[str | None]:
        """Return by owner the bytes of the results."""
        return self._sum("SELECT owner, SUM(result_bytes) FROM jobs WHERE state = 'done' GROUP BY owner")

    def _sum(self, statement: str) -> Counter[str | None]:
        return Counter({owner: int(used) for owner, used in self._database.query(statement)})

    def _evict(self, size: int, owner: str | None, spare: str = "") -> bool:
        """Delete results but that of `spare` until `size` bytes of this owner fit; False, and none, if they never do.

        The oldest results of the owner who has most go first, and none of an owner who has less than this one would.
        So nobody's results go for another's while they take less than an equal share.
        """
        used = self._sum_inputs() + self._sum_results()
        used[owner] += size
        results: dict[str | None, deque[JobRecord]] = {}
        if used.total() > self._quota:
            for record in self._select("SELECT * FROM jobs WHERE state = 'done' AND id != ? ORDER BY ended", spare):
                results.setdefault(record.owner, deque()).append(record)
        chosen: list[JobRecord] = []
        while used.total() > self._quota:
            most = max((owner, *(other for other, left in results.items() if left)), key=used.__getitem__)
            if not results.get(most):
                return False
            chosen.append(results[most].popleft())
            used[most] -= chosen[-1].result_bytes
        for record in chosen:
            self._expire(record.id)
            self.delete_unneeded_files(record.id)
        return True

    def _expire(self, job: str) -> None:
        """Change done to expired: the result is gone or has to go."""
        self._update(job, "state = 'done'", "state = 'expired'")

    def _update(self, job: str, condition: str, changes: str, *values: object) -> bool:
        """Change the row of a job; return False if it does not fulfil the condition."""
        return self._database.change(UPDATE.format(changes, condition), *values, job) == 1

    def _select(self, statement: str, *values: object) -> list[JobRecord]:
        return [_decode_row(row) for row in self._database.query(statement, *values)]


def _size(path: Path) -> int:
    """Return the bytes of a file, -1 for one that does not exist."""
    with translate_disk_faults():
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return -1


def _decode_row(row: sqlite3.Row) -> JobRecord:
    """Decode a row of the table."""
    request = JobRequest(
        row["model"], json.loads(row["parameters"]), row["name"], row["windows"], row["receive_seconds"]
    )
    columns = {field.name for field in fields(JobRecord)} - {"request", "answer", "failure"}
    plain = {name: row[name] for name in columns}
    answer = None if row["outcome"] is None else _ANSWER.validate_json(row["outcome"])
    return JobRecord(**plain, request=request, answer=answer, failure=decode_failure(row["failure"]))
