"""Idempotency keys: a client that got no response submits its job again with the same key, and gets the same job."""

from __future__ import annotations

from dataclasses import dataclass

from service.core.errors import BadParameter
from service.serving.jobs.database import JobDatabase

# Earlier versions of the service ignore this table. The keys of deleted jobs have no effect, and are deleted later.
CREATE_TABLE = """
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
        database.execute(CREATE_TABLE)

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
