"""Jobs on disk: a database row and a folder with the input and the result for each job.

The process may be killed at any moment. The folder of a job gets its final name after the input has been written to
disk. Then the row of the job is inserted. The state becomes `done` after the result has been written to disk. `recover`
deletes folders without a row, and files that a job no longer needs. Sequence numbers and job IDs are never reused.

All methods raise OutOfStorage if the disk is full. They raise StorageUnavailable if the folder or the database is
damaged, deleted or locked by another program. In both cases, the database is unchanged. `clean_up` deletes files that
such a call has left without a row.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from service.core.errors import (
    InternalError,
    JobInterrupted,
    OutOfStorage,
    StackSegError,
    StorageUnavailable,
    UnknownJob,
)
from service.core.files.atomic_files import sync_to_disk
from service.serving.jobs.database import INSERT_JOB, OLD_JOBS_TEMPLATE, SELECT_JOBS, UPDATE_TEMPLATE, JobDatabase
from service.serving.jobs.failure import encode_failure
from service.serving.jobs.record import IdempotencyKey, IdempotencyKeys, JobRecord, JobRequest
from service.serving.results.metadata import ResultMetadata
from service.serving.storage.disk import ExpiryClock, get_file_size, translate_disk_errors

INPUT_NAME = "upload.tif"
RESULT_NAME = "result"
# SQL condition for jobs that are waiting or running.
UNFINISHED_CONDITION = "state IN ('waiting', 'running')"
# Maximum number of failed, canceled and expired jobs per owner. They have no files, so the quota does not limit them.
MAX_JOBS_WITHOUT_RESULT = 1000
# Maximum number of jobs with a result per owner. The quota limits the bytes of the results, but not the number of rows
# and folders.
MAX_JOBS_WITH_RESULT = 10_000


class JobStore:
    """The jobs folder. Thread-safe; only one process at a time can use a folder.

    Args:
        folder: path of the folder, which is created if it does not exist
        quota_bytes: maximum size of all files; new files evict the oldest results of the owner who uses the most space
        is_shared: whether owners share the quota; an owner's inputs can then use half of the space left by other owners
        keep_seconds: time for which a finished job is retained
        max_attempts: maximum number of times that a job is started if the process dies while the job is running

    Raises ConfigError if the folder cannot be used, or if another process is using the folder.
    """

    def __init__(
        self, folder: Path, *, quota_bytes: int, keep_seconds: float, max_attempts: int, is_shared: bool = False
    ) -> None:
        self._folder, self._quota_bytes, self._is_shared = folder, quota_bytes, is_shared
        self._keep_seconds, self._max_attempts, self._clock = keep_seconds, max_attempts, ExpiryClock()
        self._jobs_folder, self._incoming_folder = folder / "jobs", folder / "incoming"
        self.database = JobDatabase(folder, (self._jobs_folder, self._incoming_folder))
        self.keys, self._lock = IdempotencyKeys(self.database), self.database.lock
        # Functions that are called with the ID of a job after all of its files have been deleted.
        self.deletion_callbacks: list[Callable[[str], object]] = []

    def repair(self) -> str | None:
        """Recreate deleted folders and files. Return the current problem of the store as one sentence, or None.

        The rows are preserved, because the deleted database is still open. Inputs and results are lost.
        """
        return self.database.repair()

    def close(self) -> None:
        """Unlock the folder for other processes. Further calls have no effect."""
        self.database.close()

    def make_incoming_folder(self) -> Path:
        """Create a folder for an uploaded file. The file counts toward the quota only after `accept`."""
        folder = self._incoming_folder / uuid.uuid4().hex
        with translate_disk_errors():
            folder.mkdir()
        return folder

    def accept(self, upload: Path, owner: str | None, request: JobRequest, key: IdempotencyKey | None = None) -> str:
        """Store a job, and return its ID: the name of the folder of `upload`, which is from `make_incoming_folder`.

        When this method returns, the job is on disk and survives a restart. If a job has this key, store nothing, and
        return the ID of that job. Raises the errors of `IdempotencyKeys.find_job`, and OutOfStorage at the quota.
        """
        job_id = upload.parent.name
        folder = self._jobs_folder / job_id
        with translate_disk_errors():
            size = upload.stat().st_size
            self._free_space(size, owner)
            sync_to_disk(upload, upload.parent)
        values = (job_id, owner, request.model, json.dumps(request.parameters), request.name, request.window_count)
        # Check again, because other jobs may have taken the space while the file was being written to disk.
        with self._lock:
            if key is not None and (earlier_id := self.keys.find_job(key)) is not None:
                return earlier_id
            self._free_space(size, owner)
            try:
                with translate_disk_errors():
                    upload.parent.rename(folder)
                    sync_to_disk(self._jobs_folder)
                if key is not None:
                    self.keys.add(key, job_id)
                self.database.execute(INSERT_JOB, *values, request.receive_seconds, self._clock.read_time(), size)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return job_id

    def find(self, job_id: str, owner: str | None) -> JobRecord:
        """Return a job of this owner. Raises UnknownJob if the ID is unknown or the job belongs to another owner."""
        records = self._select("WHERE id = ? AND owner IS ?", job_id, owner)
        if not records:
            raise UnknownJob("There is no such job: the ID is wrong, or the job was deleted or has expired.")
        return records[0]

    def list_newest(self, owner: str | None, limit: int) -> list[JobRecord]:
        """Return up to `limit` jobs of an owner, newest first."""
        return self._select("WHERE owner IS ? ORDER BY number DESC LIMIT ?", owner, limit)

    def list_unfinished(self) -> list[JobRecord]:
        """Return the jobs that are waiting or running, oldest first."""
        return self._select(f"WHERE {UNFINISHED_CONDITION} ORDER BY number")

    def get_input_path(self, job_id: str) -> Path:
        """Return the path of the uploaded file. Write results to the same folder before `finish`."""
        return self._jobs_folder / job_id / INPUT_NAME

    def get_result_path(self, job_id: str) -> Path:
        """Return the path of the result. The file is complete if the job is done."""
        return self._jobs_folder / job_id / RESULT_NAME

    def begin(self, job_id: str) -> bool:
        """Change the state from waiting to running. Return False if the job is not waiting."""
        changes = "state = 'running', started = ?, attempts = attempts + 1"
        return self._update(job_id, "state = 'waiting'", changes, self._clock.read_time())

    def reset_attempts(self, job_id: str) -> bool:
        """Reset the number of attempts of a running job to 1, because the job has made progress."""
        return self._update(job_id, "state = 'running'", "attempts = 1")

    def requeue(self, job_id: str) -> bool:
        """Change the state from running to waiting without counting the attempt, because the service is stopping."""
        changes = "state = 'waiting', started = NULL, attempts = attempts - 1"
        return self._update(job_id, "state = 'running'", changes)

    def finish(self, job_id: str, file: Path, metadata: ResultMetadata, failure: StackSegError | None = None) -> bool:
        """Change the state to done, and store `file` as the result. Return False if the job had already ended.

        `file` is in the folder of the job. `failure` is the error that made the result incomplete, or None.
        """
        result_path = self.get_result_path(job_id)
        with translate_disk_errors():
            sync_to_disk(file)
            file.rename(result_path)
            sync_to_disk(result_path.parent)
            size = result_path.stat().st_size
        changes = "state = 'done', ended = ?, result_bytes = ?, outcome = ?, failure = ?"
        metadata_json, failure_json = json.dumps(asdict(metadata)), None if failure is None else encode_failure(failure)
        is_done = self._update(
            job_id, UNFINISHED_CONDITION, changes, self._clock.read_time(), size, metadata_json, failure_json
        )
        # Ignore storage errors below. The next job frees space, and `clean_up` deletes the unneeded files.
        with suppress(OutOfStorage, StorageUnavailable), self._lock:
            # The owner may have deleted the job in the meantime.
            for record in self._select("WHERE id = ? AND state = 'done'", job_id) if is_done else ():
                self.delete_unneeded_files(job_id)
                self._evict(0, record.owner, spared_id=job_id)
        return is_done

    def fail(self, job_id: str, error: BaseException) -> bool:
        """Change the state to failed. Return False if the job had already ended."""
        changes = "state = 'failed', ended = ?, failure = ?"
        return self._update(job_id, UNFINISHED_CONDITION, changes, self._clock.read_time(), encode_failure(error))

    def cancel(self, job_id: str) -> bool:
        """Change the state to `cancelled`. Return False if the job had already ended."""
        return self._update(job_id, UNFINISHED_CONDITION, "state = 'cancelled', ended = ?", self._clock.read_time())

    def delete(self, job_id: str, condition: str = "TRUE") -> None:
        """Delete a job if it has ended and meets a condition. This works even if the disk is full of results."""
        condition = f"NOT {UNFINISHED_CONDITION} AND {condition}"
        self.database.delete_job(job_id, condition, self.get_result_path(job_id))
        self.delete_unneeded_files(job_id)

    def _delete_old(self, job_id: str) -> None:
        """Delete a job that has ended, unless it has been added to a project in the meantime."""
        self.delete(job_id, "id NOT IN kept_jobs")

    def delete_unneeded_files(self, job_id: str) -> None:
        """Delete the files that a job does not need in its current state."""
        folder = self._jobs_folder / job_id
        records = self._select("WHERE id = ?", job_id)
        with translate_disk_errors(), suppress(FileNotFoundError):
            if not records or records[0].state in {"failed", "cancelled", "expired"}:
                shutil.rmtree(folder)
                for callback in self.deletion_callbacks:
                    callback(job_id)
                return
            needed_name = RESULT_NAME if records[0].state == "done" else INPUT_NAME
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != needed_name:
                    path.unlink(missing_ok=True)

    def recover(self) -> list[JobRecord]:
        """Clean up after a killed process. Return the jobs to resume, oldest first."""
        with translate_disk_errors():
            shutil.rmtree(self._incoming_folder)
            self._incoming_folder.mkdir(mode=0o700)
        for record in self._select("WHERE state = 'done'"):
            if get_file_size(self.get_result_path(record.id)) != record.result_bytes:
                self._expire(record.id)
        for record in self.list_unfinished():
            if get_file_size(self.get_input_path(record.id)) != record.input_bytes:
                self.fail(record.id, InternalError("The input of the job was lost. Submit the job again."))
            elif record.state == "running" and record.attempts >= self._max_attempts:
                times = "once" if record.attempts == 1 else f"{record.attempts} times"
                self.fail(
                    record.id,
                    JobInterrupted(f"The service died {times} while the job was running. Submit a smaller stack."),
                )
            else:
                self._update(record.id, "state = 'running'", "state = 'waiting', started = NULL")
        for job_id in self._list_folders():
            self.delete_unneeded_files(job_id)
        return self.list_unfinished()

    def clean_up(
        self,
        max_jobs_without_result: int = MAX_JOBS_WITHOUT_RESULT,
        max_jobs_with_result: int = MAX_JOBS_WITH_RESULT,
    ) -> None:
        """Delete jobs that ended more than `keep_seconds` ago, and files that remain after errors.

        For each owner, retain only the newest `max_jobs_without_result` jobs without a result, and the newest
        `max_jobs_with_result` jobs with a result. Jobs that a project keeps are never deleted.
        """
        for states, max_jobs in (
            ("'failed', 'cancelled', 'expired'", max_jobs_without_result),
            ("'done'", max_jobs_with_result),
        ):
            for (job_id,) in self.database.query(OLD_JOBS_TEMPLATE.format(states), max_jobs):
                self._delete_old(job_id)
        limit = self._clock.compute_limit(self._keep_seconds)
        for record in self._select("WHERE ended < ? AND id NOT IN kept_jobs", limit):
            self._delete_old(record.id)
        self.keys.delete_unused()
        for job_id in self._list_folders():
            # `accept` holds the lock while a new job has a folder but no row yet.
            with self._lock:
                if not self._select(f"WHERE id = ? AND {UNFINISHED_CONDITION}", job_id):
                    self.delete_unneeded_files(job_id)

    def _list_folders(self) -> list[str]:
        with translate_disk_errors():
            return [folder.name for folder in self._jobs_folder.iterdir() if folder.is_dir()]

    def _free_space(self, size: int, owner: str | None) -> None:
        """Free space for an input of `size` bytes. If this is impossible, raise OutOfStorage and delete nothing."""
        with self._lock:
            if not self._has_space_for_input(size, owner) or not self._evict(size, owner):
                raise OutOfStorage(
                    "Unfinished jobs and the results in projects use all the space configured for jobs. Try again when"
                    " some jobs are done, submit a smaller file, or delete projects."
                )

    def _has_space_for_input(self, size: int, owner: str | None) -> bool:
        input_bytes = self._sum_input_bytes()
        free_bytes = self._quota_bytes - self.sum_kept_bytes().total() - input_bytes.total() - size
        return free_bytes >= (input_bytes[owner] + size if self._is_shared else 0)

    @property
    def nbytes(self) -> int:
        """Total bytes of results and of the inputs of unfinished jobs."""
        return (self._sum_input_bytes() + self._sum_result_bytes()).total()

    def _sum_input_bytes(self) -> Counter[str | None]:
        """Return the bytes of the inputs of unfinished jobs, by owner."""
        return self._sum_bytes(
            "SELECT owner, SUM(input_bytes) FROM jobs WHERE state IN ('waiting', 'running') GROUP BY owner"
        )

    def _sum_result_bytes(self) -> Counter[str | None]:
        """Return the bytes of the results, by owner."""
        return self._sum_bytes("SELECT owner, SUM(result_bytes) FROM jobs WHERE state = 'done' GROUP BY owner")

    def sum_kept_bytes(self) -> Counter[str | None]:
        """Return the bytes of the results that projects keep, by owner."""
        return self._sum_bytes(
            "SELECT owner, SUM(result_bytes) FROM jobs WHERE state = 'done' AND id IN kept_jobs GROUP BY owner"
        )

    def _sum_bytes(self, statement: str) -> Counter[str | None]:
        return Counter({owner: int(nbytes) for owner, nbytes in self.database.query(statement)})

    def _evict(self, size: int, owner: str | None, spared_id: str = "") -> bool:
        """Delete results until `size` bytes of this owner fit within the quota. Call this with the lock held.

        The results in projects and the result of job `spared_id` are not deleted.

        The oldest results of the owner who uses the most space are deleted first. Results of an owner who uses less
        space than `owner` would use are never deleted, so each owner is guaranteed an equal share. If the bytes cannot
        fit, delete nothing and return False.
        """
        used_bytes = self._sum_input_bytes() + self._sum_result_bytes()
        used_bytes[owner] += size
        results: dict[str | None, deque[JobRecord]] = {}
        if used_bytes.total() > self._quota_bytes:
            clause = "WHERE state = 'done' AND id != ? AND id NOT IN kept_jobs ORDER BY ended"
            for record in self._select(clause, spared_id):
                results.setdefault(record.owner, deque()).append(record)
        evicted_records: list[JobRecord] = []
        while used_bytes.total() > self._quota_bytes:
            largest_owner = max((owner, *(name for name, jobs in results.items() if jobs)), key=used_bytes.__getitem__)
            if not results.get(largest_owner):
                return False
            evicted_records.append(results[largest_owner].popleft())
            used_bytes[largest_owner] -= evicted_records[-1].result_bytes
        for record in evicted_records:
            self._expire(record.id)
            self.delete_unneeded_files(record.id)
        return True

    def _expire(self, job_id: str) -> None:
        """Change the state from done to expired, because the result is lost or will be deleted."""
        self._update(job_id, "state = 'done'", "state = 'expired'")

    def _update(self, job_id: str, condition: str, changes: str, *values: object) -> bool:
        """Change the row of a job. Return False if the row does not meet the condition."""
        return self.database.execute(UPDATE_TEMPLATE.format(changes, condition), *values, job_id) == 1

    def _select(self, clause: str, *values: object) -> list[JobRecord]:
        """Return the records of the jobs that a clause selects."""
        return [JobRecord.from_row(row) for row in self.database.query(f"{SELECT_JOBS} {clause}", *values)]
