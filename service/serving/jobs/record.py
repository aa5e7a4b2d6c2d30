"""A job as it is kept on disk: the request, its state, and its answer or failure; to and from a database row."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from service.core import errors
from service.core.errors import StackSegError
from service.core.quantities import VoxelSize
from service.inference.runner.memory_errors import translate_error
from service.serving.results.metadata import AnswerMetadata

JobState = Literal["waiting", "running", "done", "failed", "cancelled", "expired"]

TABLE = """
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
INDEX = "CREATE INDEX jobs_by_state ON jobs (state, ended)"

UNEXPECTED_FAILURE = "Something went wrong in the service while the job ran; its log tells more."


@dataclass(frozen=True)
class JobRequest:
    """A request that is answered later.

    model       name of the model, also if the caller left the choice to the service
    parameters  as given, by the names of the HTTP interface
    name        of the posted file
    windows     estimated number of windows
    """

    model: str
    parameters: dict[str, Any]
    name: str
    windows: int
    receive_seconds: float = 0.0

    @property
    def is_folder(self) -> bool:
        """Whether the stacks of a folder are to be segmented: its place is kept with a slash at the end."""
        return str(self.parameters.get("input", "")).endswith("/")


@dataclass(frozen=True)
class JobRecord:
    """A row of the table. Times are seconds since 1970.

    answer   of a job that is done, or that was done before its result was deleted
    failure  of a job that failed, or why the result of one that is done is only a part of what was asked for
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
    answer: AnswerMetadata | None
    failure: StackSegError | None

    @property
    def over(self) -> bool:
        """Whether the job neither waits nor runs."""
        return self.state not in {"waiting", "running"}


def decode_row(row: sqlite3.Row) -> JobRecord:
    """Decode a row of the table."""
    request = JobRequest(
        row["model"], json.loads(row["parameters"]), row["name"], row["windows"], row["receive_seconds"]
    )
    columns = {field.name for field in fields(JobRecord)} - {"request", "answer", "failure"}
    plain = {name: row[name] for name in columns}
    return JobRecord(
        **plain, request=request, answer=_decode_answer(row["outcome"]), failure=_decode_failure(row["failure"])
    )


def encode_answer(answer: AnswerMetadata) -> str:
    """Encode for the column `outcome`."""
    return json.dumps(asdict(answer))


def _decode_answer(text: str | None) -> AnswerMetadata | None:
    if text is None:
        return None
    answer: dict[str, Any] = json.loads(text)
    size = answer["voxel_size"]
    decoded: dict[str, Any] = {"notes": tuple(answer["notes"]), "voxel_size": VoxelSize(**size) if size else None}
    decoded |= {name: tuple(answer[name]) for name in ("time_points", "stacks") if answer.get(name)}
    return AnswerMetadata(**answer | decoded)


def as_failure(error: BaseException) -> StackSegError:
    """Return the error as the job's owner sees it. The text of an unexpected one is left out: it may tell secrets."""
    known = translate_error(error)
    return known if isinstance(known, StackSegError) else errors.InternalError(UNEXPECTED_FAILURE)


def encode_failure(error: BaseException) -> str:
    """Encode for the column `failure`."""
    known = as_failure(error)
    needed = getattr(known, "needed_bytes", None)
    return json.dumps({"slug": known.slug, "message": str(known), "needed_bytes": needed})


def _decode_failure(text: str | None) -> StackSegError | None:
    """Return the error with its class, so that it is answered like that of a request that waited."""
    if text is None:
        return None
    failure: Mapping[str, Any] = json.loads(text)
    classes = (kind for kind in _subclasses(StackSegError) if kind.slug == failure["slug"])
    kind = next(classes, errors.InternalError)
    if issubclass(kind, errors.OutOfMemory):
        return kind(failure["message"], failure["needed_bytes"])
    if issubclass(kind, errors.QueueFull | errors.NotReady | errors.RateLimited | errors.DeviceLost):
        return kind(failure["message"], 5)
    return kind(failure["message"])


def _subclasses(kind: type[StackSegError]) -> Iterator[type[StackSegError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
