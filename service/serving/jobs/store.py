"""Jobs on disk: a row each in an embedded database, and a folder each for the input and the result.

The process may be killed at any moment. A folder gets its final name once its input is whole on disk, the row comes
after the folder, and the row says `done` once the result is whole on disk. The next start deletes folders without a
row, and files that a row does not need. Numbers and ids are never given twice.

All methods raise OutOfStorage where the disk is full, and StorageUnavailable where the folder or the database cannot be
used otherwise: locked by another program, damaged, deleted. Nothing has changed then but files that no row names, which
`clean_up` deletes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from service.core.errors import (
    ConfigError,
    InternalError,
    Interrupted,
    OutOfStorage,
    StackSegError,
    StorageUnavailable,
    UnknownJob,
)
from service.core.files.whole_file import sync_to_disk
from service.serving.jobs.database import JobDatabase
from service.serving.jobs.record import JobRecord, JobRequest, JobState, encode_answer, encode_failure
from service.serving.results.metadata import AnswerMetadata
from service.serving.storage.scratch import translate_disk_faults

INPUT = "upload.tif"
RESULT = "result"
# Jobs that failed, were cancelled or lost their result are kept for as long as others, yet no more than this of each
# owner: they are in nobody's way but the list's, and cost their owner nothing.
MAX_WITHOUT_RESULT = 1000


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
        try:
            self._folder_lock: int | None = self._make_folders()
        except BlockingIOError as error:
            raise ConfigError(f"jobs.folder: {folder}: is in use by another service; give each its own.") from error
        except OSError as error:
            raise ConfigError(f"jobs.folder: {folder} cannot be used: {error.strerror}.") from error
        try:
            self._database = JobDatabase(folder)
        except BaseException:
            os.close(self._folder_lock)
            raise
        self._lock, self._select = self._database.lock, self._database.select

    def _make_folders(self) -> int:
        """Make the folders that do not exist; return an open descriptor that locks the outer one. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The operator may have made the folder itself, and left it open to others.
            for inner in (self._jobs, self._incoming):
                inner.mkdir(mode=0o700, exist_ok=True)
                inner.chmod(0o700)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def mend(self) -> str | None:
        """Make again what somebody has deleted of the folders; return what is wrong with the store, in one sentence.

        The rows survive, since the deleted database is still open. Inputs and results do not: their jobs say so.
        """
        with self._lock:
            try:
                if self._jobs.is_dir() and self._incoming.is_dir() and self._database.in_place:
                    return self._database.check()
                # The descriptor of a deleted folder locks nothing any more.
                self._unlock_folder()
                self._folder_lock = self._make_folders()
                self._database.make_again()
            except PermissionError as error:
                return f"The folder of jobs cannot be used: {error.strerror}."
            except (StackSegError, OSError) as error:
                return f"The folder of jobs was deleted, and cannot be made again: {error}"
            return "The folder of jobs was deleted, and is made again; inputs and results in it are lost."

    def close(self) -> None:
        """Let another process use the folder. May be called twice."""
        with self._lock:
            self._database.close()
            self._unlock_folder()

    def _unlock_folder(self) -> None:
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

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
                with self._database.transaction() as database:
                    database.execute(
                        "INSERT INTO jobs (state, id, owner, model, parameters, name, windows, receive_seconds,"
                        " created, input_bytes) VALUES ('waiting', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (*values, request.receive_seconds, time.time(), size),
                    )
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def find(self, job: str, owner: str | None) -> JobRecord:
        """Return a job of this owner. Raises UnknownJob, for jobs of others as well."""
        records = self._select("id = ? AND owner IS ?", job, owner)
        if not records:
            raise UnknownJob("There is no such job: its id is wrong, it was deleted, or it was kept long enough.")
        return records[0]

    def newest(self, owner: str | None, limit: int) -> list[JobRecord]:
        """Return the newest jobs of an owner, newest first."""
        return self._select("owner IS ? ORDER BY number DESC LIMIT ?", owner, limit)

    def pending(self) -> list[JobRecord]:
        """Return the jobs that wait or run, oldest first."""
        return self._select("state IN ('waiting', 'running') ORDER BY number")

    def input_path(self, job: str) -> Path:
        """Return the path of the posted file. Results may be written beside it before `finish`."""
        return self._jobs / job / INPUT

    def result_path(self, job: str) -> Path:
        """Return the path of the result, which is whole if the job is done."""
        return self._jobs / job / RESULT

    def begin(self, job: str) -> bool:
        """Change waiting to running; return False if the job is not waiting."""
        change = "state = 'running', started = ?, attempts = attempts + 1"
        return self._change(job, ("waiting",), change, time.time())

    def credit(self, job: str) -> bool:
        """Count the attempts of a running job anew: it has got further than before."""
        return self._change(job, ("running",), "attempts = 1")

    def requeue(self, job: str) -> bool:
        """Change running to waiting without counting the attempt: the service stops, which is not the job's fault."""
        return self._change(job, ("running",), "state = 'waiting', started = NULL, attempts = attempts - 1")

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
        change = "state = 'done', ended = ?, result_bytes = ?, outcome = ?, failure = ?"
        values = time.time(), size, encode_answer(answer), None if fault is None else encode_failure(fault)
        done = self._change(job, ("waiting", "running"), change, *values)
        # Whatever fails from here, the job is done: the next one makes room, and `clean_up` deletes files.
        with suppress(OutOfStorage, StorageUnavailable):
            # Its owner may have deleted it meanwhile.
            for record in self._select("id = ? AND state = 'done'", job) if done else ():
                self.delete_unneeded_files(job)
                self._evict(0, record.owner, spare=job)
        return done

    def fail(self, job: str, error: BaseException) -> bool:
        """Change waiting or running to failed; return False if the job is over."""
        change = "state = 'failed', ended = ?, failure = ?"
        return self._change(job, ("waiting", "running"), change, time.time(), encode_failure(error))

    def cancel(self, job: str) -> bool:
        """Change waiting or running to cancelled; return False if the job is over."""
        return self._change(job, ("waiting", "running"), "state = 'cancelled', ended = ?", time.time())

    def delete(self, job: str) -> None:
        """Delete a job that is over."""
        with self._database.transaction() as database:
            database.execute("DELETE FROM jobs WHERE id = ? AND state NOT IN ('waiting', 'running')", (job,))
        self.delete_unneeded_files(job)

    def delete_unneeded_files(self, job: str) -> None:
        """Delete the files that a job in its present state does not need."""
        folder = self._jobs / job
        records = self._select("id = ?", job)
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
        for record in self._select("state = 'done'"):
            if _size(self.result_path(record.id)) != record.result_bytes:
                self._change(record.id, ("done",), "state = 'expired'")
        for record in self.pending():
            if _size(self.input_path(record.id)) != record.input_bytes:
                self.fail(record.id, InternalError("The input of the job is lost; post it again."))
            elif record.state == "running" and record.attempts >= self._attempts:
                times = "once" if record.attempts == 1 else f"{record.attempts} times"
                self.fail(record.id, Interrupted(f"The service died {times} while it ran; post a smaller part of it."))
            else:
                self._change(record.id, ("running",), "state = 'waiting', started = NULL")
        for job in self._list_folders():
            self.delete_unneeded_files(job)
        return self.pending()

    def clean_up(self, most: int = MAX_WITHOUT_RESULT) -> None:
        """Delete jobs that have been over for longer than they are kept, and files that a fault has left behind.

        Of those without a result, only the newest are kept, `most` of each owner.
        """
        without = "SELECT id, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY number DESC) AS place FROM jobs"
        without += " WHERE state IN ('failed', 'cancelled', 'expired')"
        for (job,) in self._database.query(f"SELECT id FROM ({without}) WHERE place > ?", most):  # noqa: S608
            self.delete(job)
        for record in self._select("ended < ?", time.time() - self._keep):
            if record.over:
                self.delete(record.id)
        for job in self._list_folders():
            # A job is accepted with the lock: its row is not there yet when its folder is.
            with self._lock:
                if not self._select("id = ? AND state IN ('waiting', 'running')", job):
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
        inputs = self._bytes_by_owner("input_bytes", "waiting", "running")
        left = self._quota - inputs.total() - size
        return left >= (inputs[owner] + size if self._shared else 0)

    def _bytes_by_owner(self, column: str, *states: JobState) -> Counter[str | None]:
        """Return the sums of `column`, input_bytes or result_bytes, over the jobs in these states."""
        places = ", ".join("?" * len(states))
        statement = f"SELECT owner, SUM({column}) FROM jobs WHERE state IN ({places}) GROUP BY owner"  # noqa: S608
        return Counter({owner: int(used) for owner, used in self._database.query(statement, *states)})

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs that are needed, and of the results."""
        return self._used().total()

    def _used(self) -> Counter[str | None]:
        return self._bytes_by_owner("input_bytes", "waiting", "running") + self._bytes_by_owner("result_bytes", "done")

    def _evict(self, size: int, owner: str | None, spare: str = "") -> bool:
        """Delete results but that of `spare` until `size` bytes of this owner fit; False, and none, if they never do.

        The oldest results of the owner who has most go first, and none of an owner who has less than this one would.
        So nobody's results go for another's while they take less than an equal share.
        """
        used = self._used()
        used[owner] += size
        results: dict[str | None, deque[JobRecord]] = {}
        if used.total() > self._quota:
            for record in self._select("state = 'done' AND id != ? ORDER BY ended", spare):
                results.setdefault(record.owner, deque()).append(record)
        chosen: list[JobRecord] = []
        while used.total() > self._quota:
            most = max((owner, *(other for other, left in results.items() if left)), key=used.__getitem__)
            if not results.get(most):
                return False
            chosen.append(results[most].popleft())
            used[most] -= chosen[-1].result_bytes
        for record in chosen:
            self._change(record.id, ("done",), "state = 'expired'")
            self.delete_unneeded_files(record.id)
        return True

    def _change(self, job: str, states: tuple[JobState, ...], change: str, *values: object) -> bool:
        """Change a job that is in one of these states; return whether it was."""
        places = ", ".join("?" * len(states))
        with self._database.transaction() as database:
            statement = f"UPDATE jobs SET {change} WHERE id = ? AND state IN ({places})"  # noqa: S608 - our own words
            return database.execute(statement, (*values, job, *states)).rowcount == 1


def _size(path: Path) -> int:
    """Return the bytes of a file, -1 for one that does not exist."""
    with translate_disk_faults():
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return -1
