"""A job as it is kept on disk: the request, its state, and its answer or failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from service.core.errors import StackSegError
from service.serving.results.metadata import AnswerMetadata

JobState = Literal["waiting", "running", "done", "failed", "cancelled", "expired"]


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
