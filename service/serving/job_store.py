"""Jobs on disk: a row each in an embedded database, and a folder each for the input and the result.

What makes it safe to kill the process at any moment: a folder gets its final name once its input is whole on disk, its
row comes after it, and the row says `done` once the result is whole on disk. What has no row, and what a row has no
more use for, is deleted at the next start. Numbers and ids are never given twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from service.core import errors
from service.core.errors import ConfigError, Interrupted, OutOfStorage, StackSegError, UnknownJob
from service.core.volume import OutputKind, VoxelSize

JobState = Literal["waiting", "running", "done", "failed", "cancelled", "expired"]

INPUT = "upload.tif"
RESULT = "result"
VERSION = 1

_TABLE = """
CREATE TABLE jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT,
  state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed', 'cancelled', 'expired')),
  model TEXT NOT NULL,
  parameters TEXT NOT NULL,
  name TEXT NOT NULL,
  windows INTEGER NOT NULL,
  receive_seconds REAL NOT NULL,
  created REAL NOT NULL,
  started REAL,
  ended REAL,
  attempts INTEGER NOT NULL DEFAULT 0,
  input_bytes INTEGER NOT NULL,
  result_bytes INTEGER NOT NULL DEFAULT 0,
  outcome TEXT,
  failure TEXT
) STRICT
"""
_INDEX = "CREATE INDEX jobs_by_state ON jobs (state, ended)"


@dataclass(frozen=True)
class JobRequest:
    """What was asked for.

    model       name of the model, also where the caller left it to the service
    parameters  as given, by the names of the HTTP interface
    name        of the posted file, for naming the answer
    windows     how many there should be
    """

    model: str
    parameters: dict[str, Any]
    name: str
    windows: int
    receive_seconds: float = 0.0


@dataclass(frozen=True)
class AnswerMetadata:
    """What is told about a result beside its file. `model` has the version; `seconds` are those of the stages.

    diameter  of the objects and whether it was stated or estimated; None where it was neither
    skipped   how many windows were not computed because nothing is in them; None where such were not looked for
    """

    model: str
    media_type: str
    file_name: str
    kind: OutputKind
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    objects: int | None = None
    voxel_size: VoxelSize | None = None
    diameter: str | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class Record:
    """A row. Times are seconds since 1970; `failure` where the state is failed, `outcome` once it was done."""

    id: str
    number: int
    owner: str | None
    state: JobState
    order: JobRequest
    created: float
    started: float | None
    ended: float | None
    attempts: int
    input_bytes: int
    result_bytes: int
    outcome: AnswerMetadata | None
    failure: StackSegError | None

    @property
    def over(self) -> bool:
        return self.state not in {"waiting", "running"}


class JobStore:
    """The jobs folder. Safe to use from several threads; only one process at a time may hold a folder.

    Args:
        folder: made where it does not exist
        quota_bytes: of inputs and results together; the oldest results make room for new ones
        keep_seconds: how long a job is kept once it is over
        attempts: how often a job may be begun when the process dies of it

    Raises ConfigError for a folder that cannot be used, or that another process holds.
    """

    def __init__(self, folder: Path, *, quota_bytes: int, keep_seconds: float, attempts: int) -> None:
        self._folder, self._quota, self._keep, self._attempts = folder, quota_bytes, keep_seconds, attempts
        self._jobs, self._incoming = folder / "jobs", folder / "incoming"
        self._lock = threading.RLock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._hold: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            # The folder itself may be one that the operator made, and open to others.
            for inner in (self._jobs, self._incoming):
                inner.mkdir(mode=0o700, exist_ok=True)
                inner.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"jobs.folder: {folder} cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(self._hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._database = _open(folder / "jobs.sqlite3")
        except (BlockingIOError, sqlite3.Error, ConfigError) as error:
            os.close(self._hold)
            if isinstance(error, ConfigError):
                raise
            reason = "is in use by another service; give each its own" if isinstance(error, OSError) else f"{error}"
            raise ConfigError(f"jobs.folder: {folder}: {reason}.") from error

    def close(self) -> None:
        """Let another process have the folder. To be called once or more."""
        with self._lock:
            self._database.close()
            if self._hold is not None:
                os.close(self._hold)
                self._hold = None

    def make_incoming(self) -> Path:
        """A new folder for a file that arrives; it takes up no place until `accept`."""
        folder = self._incoming / uuid.uuid4().hex
        folder.mkdir()
        return folder

    def accept(self, upload: Path, owner: str | None, order: JobRequest) -> Record:
        """Keep the file INPUT that arrived in a folder of `make_incoming`, whose name becomes the job's id.

        From the moment this returns the job outlives the process. Raises OutOfStorage where the quota has no room.
        """
        size, job = upload.stat().st_size, upload.parent.name
        self.make_room(size)
        folder = self._jobs / job
        _sync(upload, upload.parent)
        values = (job, owner, order.model, json.dumps(order.parameters), order.name, order.windows)
        # Others may have taken the room while the file went to the disk.
        with self._lock:
            self.make_room(size)
            upload.parent.rename(folder)
            _sync(self._jobs)
            try:
                with self._transaction() as database:
                    database.execute(
                        "INSERT INTO jobs (state, id, owner, model, parameters, name, windows, receive_seconds,"
                        " created, input_bytes) VALUES ('waiting', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (*values, order.receive_seconds, time.time(), size),
                    )
            except OutOfStorage:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return self.get(job)

    def get(self, job: str) -> Record:
        """Raises UnknownJob."""
        rows = self._select("id = ?", job)
        if not rows:
            raise UnknownJob("There is no such job: its id is wrong, it was deleted, or it was kept long enough.")
        return rows[0]

    def find(self, job: str, owner: str | None) -> Record:
        """A job of this owner. Raises UnknownJob, for those of others as well."""
        record = self.get(job)
        if record.owner != owner:
            raise UnknownJob("There is no such job: its id is wrong, it was deleted, or it was kept long enough.")
        return record

    def of(self, owner: str | None, most: int) -> list[Record]:
        """The newest jobs of an owner, newest first."""
        return self._select("owner IS ? ORDER BY number DESC LIMIT ?", owner, most)

    def pending(self) -> list[Record]:
        """Jobs that are not over, oldest first."""
        return self._select("state IN ('waiting', 'running') ORDER BY number")

    def input(self, job: str) -> Path:
        """The posted file; results may be written beside it before they are handed to `finish`."""
        return self._jobs / job / INPUT

    def result(self, job: str) -> Path:
        """The result's file, whole if the job is done."""
        return self._jobs / job / RESULT

    def begin(self, job: str) -> bool:
        """Waiting -> running; False if the job is not waiting."""
        change = "state = 'running', started = ?, attempts = attempts + 1"
        return self._move(job, ("waiting",), change, time.time())

    def put_back(self, job: str) -> bool:
        """Running -> waiting, as if it had not begun: the service stops, which is not the job's fault."""
        return self._move(job, ("running",), "state = 'waiting', started = NULL, attempts = attempts - 1")

    def finish(self, job: str, written: Path, outcome: AnswerMetadata) -> bool:
        """Running -> done, with a result that was written into the job's folder; False if it was cancelled meanwhile.

        Raises OSError and OutOfStorage.
        """
        result = self.result(job)
        _sync(written)
        written.rename(result)
        _sync(result.parent)
        change = "state = 'done', ended = ?, result_bytes = ?, outcome = ?"
        told = json.dumps(asdict(outcome))
        done = self._move(job, ("running",), change, time.time(), result.stat().st_size, told)
        if done:
            self.tidy(job)
            self._evict(0, spare=job)
        return done

    def fail(self, job: str, error: BaseException) -> bool:
        """To failed. What is not an error of the service's own tree is kept without its text."""
        known = error if isinstance(error, StackSegError) else errors.InternalError(_UNFORESEEN)
        failure = {"slug": known.slug, "message": str(known), "needed_bytes": getattr(known, "needed_bytes", None)}
        change = "state = 'failed', ended = ?, failure = ?"
        return self._move(job, ("waiting", "running"), change, time.time(), json.dumps(failure))

    def cancel(self, job: str) -> bool:
        """To cancelled; False if the job is over."""
        return self._move(job, ("waiting", "running"), "state = 'cancelled', ended = ?", time.time())

    def delete(self, job: str) -> None:
        """Forget a job that is over."""
        with self._transaction() as database:
            database.execute("DELETE FROM jobs WHERE id = ? AND state NOT IN ('waiting', 'running')", (job,))
        self.tidy(job)

    def tidy(self, job: str) -> None:
        """Delete the files of a job for which it has no more use."""
        folder = self._jobs / job
        rows = self._select("id = ?", job)
        if not rows or rows[0].state in {"failed", "cancelled", "expired"}:
            shutil.rmtree(folder, ignore_errors=True)
            return
        kept = RESULT if rows[0].state == "done" else INPUT
        with suppress(FileNotFoundError):
            for path in folder.iterdir():
                if path.name != kept:
                    path.unlink(missing_ok=True)

    def recover(self) -> list[Record]:
        """Make good what a killed process left behind; gives the jobs that have to run, oldest first."""
        shutil.rmtree(self._incoming)
        self._incoming.mkdir()
        for record in self.pending():
            if self._size(record.id) != record.input_bytes:
                self.fail(record.id, errors.InternalError("The input of the job is lost; post it again."))
            elif record.state == "running" and record.attempts >= self._attempts:
                times = "once" if record.attempts == 1 else f"{record.attempts} times"
                self.fail(record.id, Interrupted(f"The service died {times} while it ran; post a smaller part of it."))
            else:
                self._move(record.id, ("running",), "state = 'waiting', started = NULL")
        for folder in self._jobs.iterdir():
            self.tidy(folder.name)
        return self.pending()

    def expire(self) -> None:
        """Forget what is over for longer than it is kept."""
        for record in self._select("ended < ?", time.time() - self._keep):
            if record.over:
                self.delete(record.id)

    def make_room(self, size: int) -> None:
        """Delete the oldest results until so many bytes more fit; none where they never would. Raises OutOfStorage."""
        with self._lock:
            if not self._evict(size):
                raise OutOfStorage(
                    "The jobs that wait and run take up the room that the operator allows; try again when some are "
                    "done, or post a smaller file."
                )

    def used_bytes(self) -> int:
        """Of the inputs of jobs that are not over, and of results."""
        (used,) = self._query(
            "SELECT COALESCE(SUM(CASE state WHEN 'done' THEN result_bytes ELSE input_bytes END), 0) FROM jobs"
            " WHERE state IN ('waiting', 'running', 'done')"
        )[0]
        return int(used)

    def _evict(self, size: int, spare: str = "") -> bool:
        """Delete the oldest results but that of `spare` until `size` bytes fit; False, and none, if they never do."""
        excess = self.used_bytes() + size - self._quota
        results = self._select("state = 'done' AND id != ? ORDER BY ended", spare) if excess > 0 else []
        if excess > sum(record.result_bytes for record in results):
            return False
        for record in results:
            if excess > 0:
                self._move(record.id, ("done",), "state = 'expired'")
                self.tidy(record.id)
                excess -= record.result_bytes
        return True

    def _size(self, job: str) -> int:
        try:
            return self.input(job).stat().st_size
        except FileNotFoundError:
            return -1

    def _move(self, job: str, sources: tuple[JobState, ...], change: str, *values: object) -> bool:
        places = ", ".join("?" * len(sources))
        with self._transaction() as database:
            statement = f"UPDATE jobs SET {change} WHERE id = ? AND state IN ({places})"  # noqa: S608 - our own words
            return database.execute(statement, (*values, job, *sources)).rowcount == 1

    def _select(self, condition: str, *values: object) -> list[Record]:
        return [_record(row) for row in self._query(f"SELECT * FROM jobs WHERE {condition}", *values)]  # noqa: S608

    def _query(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commits at the end, on disk. A full disk raises OutOfStorage."""
        with self._lock:
            try:
                with self._database:
                    yield self._database
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    raise OutOfStorage("The disk that holds the jobs is full; try again later.") from error
                raise


_UNFORESEEN = "Something went wrong in the service while the job ran; its log tells more."


def _open(path: Path) -> sqlite3.Connection:
    path.touch(0o600)
    path.chmod(0o600)
    database = sqlite3.connect(path, check_same_thread=False)
    try:
        _prepare(database, path)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    with database:
        database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            database.execute(_TABLE)
            database.execute(_INDEX)
            database.execute(f"PRAGMA user_version = {VERSION}")
    if version not in {0, VERSION}:
        raise ConfigError(f"jobs.folder: {path} was written by another version of StackSeg; choose another folder.")


def _record(row: sqlite3.Row) -> Record:
    order = JobRequest(row["model"], json.loads(row["parameters"]), row["name"], row["windows"], row["receive_seconds"])
    own = {field.name for field in fields(Record)} - {"order", "outcome", "failure"}
    plain = {name: row[name] for name in own}
    return Record(**plain, order=order, outcome=_outcome(row["outcome"]), failure=_failure(row["failure"]))


def _outcome(text: str | None) -> AnswerMetadata | None:
    if text is None:
        return None
    told: dict[str, Any] = json.loads(text)
    size = told["voxel_size"]
    return AnswerMetadata(**told | {"notes": tuple(told["notes"]), "voxel_size": VoxelSize(**size) if size else None})


def _failure(text: str | None) -> StackSegError | None:
    """The error that a job ended with, of its own class, so that it is answered as it would have been at once."""
    if text is None:
        return None
    told: Mapping[str, Any] = json.loads(text)
    kind = next((kind for kind in _below(StackSegError) if kind.slug == told["slug"]), errors.InternalError)
    if issubclass(kind, errors.OutOfMemory):
        return kind(told["message"], told["needed_bytes"] or 0)
    if issubclass(kind, errors.QueueFull | errors.NotReady | errors.RateLimited | errors.DeviceLost):
        return kind(told["message"], 5)
    return kind(told["message"])


def _below(kind: type[StackSegError]) -> Iterator[type[StackSegError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _below(child)


def _sync(*paths: Path) -> None:
    """Have files, and the names in folders, on disk before anything is done that counts on them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
