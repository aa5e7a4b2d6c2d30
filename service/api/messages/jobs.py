"""Responses about jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.types import Scope

from service.api.messages.headers import make_url_path
from service.api.messages.text import RedactedText
from service.core.errors import StackSegError
from service.serving.jobs.active_job import JobView
from service.serving.jobs.record import JobRecord, JobState


class JobProgress(BaseModel):
    """Number of completed units of work (`done`), and total number of units (`total`).

    If the unit is windows, decoding counts as the number of windows that would take the same time.
    """

    done: int
    total: int


class JobProblem(BaseModel):
    """Reason for the failure of a job: `type` and `detail` of the problem document that is the result of the job."""

    type: str
    detail: RedactedText


class JobReport(BaseModel):
    """A segmentation job.

    - `state`: `waiting`, `loading` (waiting for the model to be loaded), `running`, `done`, `failed`, `cancelled`, or
      `expired` (the result was deleted to free disk space).
    - `stage`: current stage of a running job: `prepare`, `windows`, `decode` or `write`.
    - `progress`: completed and total work, in windows, or in stacks for a job on a folder.
    - `position`: position in the queue while the job is waiting; 1 is next.
    - `seconds_left`: estimated time in seconds until the result is ready, including the time in the queue; null if
      unknown.
    - `seconds`: duration of each stage so far, in seconds.
    - `time_points`: completed and total time points of a time series. If the job fails, its result contains the
      completed time points.
    - `stacks`: completed and total stacks of a job on a folder. When the job has ended, `done` counts the stacks that
      have results.
    - `confidence`: confidence in the result from 0 to 1, if the model supports it.
    - `doubt`: why confidence is low, and what to try; null if confidence is not low.
    - `warnings`: messages about the result for the user.
    - `diameter`: object diameter that was used, and whether it was specified or estimated.
    - `skipped`: number of windows that were skipped as background, if skipping was enabled.
    - `result`: URL path of the result; null if there is none.
    - `problem`: why the job failed; null if it did not fail.
    - `expires`: when the job and its result will be deleted; null if a project keeps them.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21",
                "state": "running",
                "model": "nuclei",
                "name": "embryo.tif",
                "parameters": {"overlap": 0.5},
                "created": "2026-03-01T10:00:00Z",
                "started": "2026-03-01T10:00:09Z",
                "ended": None,
                "expires": None,
                "stage": "windows",
                "position": None,
                "progress": {"done": 48, "total": 320},
                "time_points": None,
                "stacks": None,
                "seconds_left": 51.2,
                "seconds": {"receive": 0.4, "read": 1.2, "queue": 8.1},
                "confidence": None,
                "doubt": None,
                "warnings": [],
                "diameter": None,
                "skipped": None,
                "objects": None,
                "result": None,
                "problem": None,
            }
        }
    )

    id: str
    state: JobState | Literal["loading"]
    model: str
    name: str
    parameters: dict[str, Any]
    created: datetime
    started: datetime | None
    ended: datetime | None
    expires: datetime | None
    stage: str | None
    position: int | None
    progress: JobProgress
    time_points: JobProgress | None
    stacks: JobProgress | None
    seconds_left: float | None
    seconds: dict[str, float]
    confidence: float | None = None
    doubt: dict[str, Any] | None = None
    warnings: list[RedactedText]
    diameter: str | None = None
    skipped: str | None = None
    objects: int | None = None
    result: str | None
    problem: JobProblem | None


class JobList(BaseModel):
    """The caller's jobs, newest first."""

    jobs: list[JobReport]


def report_job(view: JobView, keep_seconds: float, scope: Scope) -> JobReport:
    """Return the report of a job for the client of a request. A job is deleted `keep_seconds` after it has ended."""
    record = view.record
    return JobReport(
        id=record.id,
        state=_get_reported_state(view),
        name=record.request.name,
        parameters=record.request.parameters,
        created=_to_utc(record.created),
        started=_to_utc_or_none(record.started),
        ended=_to_utc_or_none(record.ended),
        expires=None if record.ended is None or record.is_kept else _to_utc(record.ended + keep_seconds),
        stage=view.stage,
        position=view.position,
        progress=JobProgress(done=view.progress.done, total=view.progress.total),
        **_report_part_progress(view),
        seconds_left=None if view.seconds_left is None or record.ended is not None else round(view.seconds_left, 1),
        seconds={stage: round(seconds, 3) for stage, seconds in view.stage_seconds.items()},
        result=make_url_path(scope, f"/jobs/{record.id}/result") if record.state == "done" else None,
        problem=_report_problem(record.failure),
        **_report_result(record),
    )


def _get_reported_state(view: JobView) -> JobState | Literal["loading"]:
    """Return the state of a job for its report. A job with a partial result is reported as failed."""
    state = view.record.state
    if state == "waiting" and view.is_loading:
        return "loading"
    return "failed" if state == "done" and view.record.failure is not None else state


def _report_part_progress(view: JobView) -> dict[str, Any]:
    """Return the progress of a time series or a folder as members of a `JobReport`."""
    part_progress = (
        JobProgress(done=view.part_progress.done, total=view.part_progress.total) if view.part_progress.total else None
    )
    is_folder = view.record.request.is_folder
    return {"time_points": None if is_folder else part_progress, "stacks": part_progress if is_folder else None}


def _report_result(record: JobRecord) -> dict[str, Any]:
    """Return the members of a `JobReport` that describe the result.

    If there is no result, these are only `model` and an empty list of `warnings`.
    """
    metadata = record.result_metadata
    if metadata is None:
        return {"model": record.request.model, "warnings": []}
    return {
        "model": metadata.model,
        "confidence": metadata.confidence,
        "doubt": metadata.doubt,
        "warnings": [*([metadata.doubt["detail"]] if metadata.doubt else []), *metadata.notes],
        "diameter": metadata.diameter,
        "skipped": metadata.skipped,
        "objects": metadata.objects,
    }


def _report_problem(failure: StackSegError | None) -> JobProblem | None:
    if failure is None:
        return None
    return JobProblem(type=f"urn:stackseg:problem:{failure.slug}", detail=str(failure))


def _to_utc(timestamp: float) -> datetime:
    """Convert a POSIX timestamp to a datetime in UTC."""
    return datetime.fromtimestamp(timestamp, UTC)


def _to_utc_or_none(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else _to_utc(timestamp)
