"""A job as stored on disk: the request, the state of the job, the metadata of its result, and its failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from service.core.errors import StackSegError
from service.serving.results.metadata import ResultMetadata

JobState = Literal["waiting", "running", "done", "failed", "cancelled", "expired"]


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

    @property
    def has_ended(self) -> bool:
        """Whether the job is neither waiting nor running."""
        return self.state not in {"waiting", "running"}
