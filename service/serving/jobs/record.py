"""A job as stored on disk: the request, the state of the job, the metadata of its result, its failure, and its key."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import TypeAdapter

from service.core.errors import BadParameter, StackSegError
from service.serving.jobs.failure import decode_failure
from service.serving.results.metadata import ResultMetadata

if TYPE_CHECKING:
    import sqlite3

    from service.serving.jobs.database import JobDatabase

JobState = Literal["waiting", "running", "done", "failed", "cancelled", "expired"]
# Earlier versions of the service ignore this table. The keys of deleted jobs have no effect, and are deleted later.
CREATE_KEYS_TABLE = """
CREATE TABLE IF NOT EXISTS idempotency_keys (
  client TEXT NOT NULL,
  value TEXT NOT NULL,
  digest TEXT NOT NULL,
  job TEXT NOT NULL,
  PRIMARY KEY (client, value)
) STRICT
"""
SELECT_KEY = (
    "SELECT job, digest FROM idempotency_keys JOIN jobs ON jobs.id = idempotency_keys.job"
    " WHERE client = ? AND value = ?"
)
INSERT_KEY = "INSERT OR REPLACE INTO idempotency_keys (client, value, digest, job) VALUES (?, ?, ?, ?)"
DELETE_UNUSED_KEYS = "DELETE FROM idempotency_keys WHERE job NOT IN (SELECT id FROM jobs)"
_METADATA_ADAPTER = TypeAdapter(ResultMetadata)


@dataclass(frozen=True)
class JobRequest:
    """The request of a job.

    model            name of the model that was requested, or that the service chose
    parameters       values of the specified parameters, by their names in the HTTP interface
    name             name of the uploaded file
    window_count     estimated number of windows
    receive_seconds  duration of the upload
    """

    model: str
    parameters: dict[str, Any]
    name: str
    window_count: int
    receive_seconds: float = 0.0

    @property
    def is_folder(self) -> bool:
        """Whether the input is a folder of stacks. The path of a folder is stored with a trailing slash."""
        return str(self.parameters.get("input", "")).endswith("/")


@dataclass(frozen=True)
class JobRecord:
    """A row of the jobs table. Times are in seconds since the Unix epoch.

    number           sequence number in the order of creation, named like its column in the database
    attempts         number of times that the job has been started
    result_metadata  metadata of the result; retained after the result has been deleted
    failure          error that made the job fail, or that made the result of a finished job incomplete
    is_kept          whether a project keeps the job, so that the job is not deleted automatically
    """

    id: str
    number: int
    owner: str | None
    state: JobState
    request: JobRequest
    created: float
    started: float | None
    ended: float | None
    attempts: int
    input_bytes: int
    result_bytes: int
    result_metadata: ResultMetadata | None
    failure: StackSegError | None
    is_kept: bool

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> Self:
        """Decode a row that was selected with `SELECT_JOBS`."""
        request = JobRequest(
            row["model"], json.loads(row["parameters"]), row["name"], row["windows"], row["receive_seconds"]
        )
        decoded_values: dict[str, Any] = {
            "request": request,
            "result_metadata": None if row["outcome"] is None else _METADATA_ADAPTER.validate_json(row["outcome"]),
            "failure": decode_failure(row["failure"]),
            "is_kept": bool(row["is_kept"]),
        }
        names = {field.name for field in fields(cls)} - decoded_values.keys()
        return cls(**{name: row[name] for name in names}, **decoded_values)

    @property
    def has_ended(self) -> bool:
        """Whether the job is neither waiting nor running."""
        return self.state not in {"waiting", "running"}


@dataclass(frozen=True)
class IdempotencyKey:
    """Key by which a client identifies a job.

    client  API key or address of the client; different clients may use the same values
    value   text that the client has chosen
    digest  digest of the file and the parameters, which distinguishes a repeated request from another one
    """

    client: str
    value: str
    digest: str


class IdempotencyKeys:
    """The keys of the jobs in a database. A key exists as long as its job. Methods raise the errors of the database."""

    def __init__(self, database: JobDatabase) -> None:
        self._database = database
        database.execute(CREATE_KEYS_TABLE)

    def contains(self, client: str, value: str) -> bool:
        """Return whether there is a job with this key, whatever its request was."""
        return bool(self._database.query(SELECT_KEY, client, value))

    def find_job(self, key: IdempotencyKey) -> str | None:
        """Return the ID of the job with this key, or None. Raises BadParameter if its request was a different one."""
        rows = self._database.query(SELECT_KEY, key.client, key.value)
        if not rows:
            return None
        if rows[0]["digest"] != key.digest:
            raise BadParameter(
                "Idempotency-Key: this key belongs to a job with a different file or different parameters. Use a new"
                " key for every new job.",
                parameter="Idempotency-Key",
            )
        return str(rows[0]["job"])

    def add(self, key: IdempotencyKey, job_id: str) -> None:
        """Add the key of a job, before the job itself. If the process is killed in between, the key has no effect."""
        self._database.execute(INSERT_KEY, key.client, key.value, key.digest, job_id)

    def delete_unused(self) -> None:
        """Delete the keys of deleted jobs."""
        self._database.execute(DELETE_UNUSED_KEYS)
