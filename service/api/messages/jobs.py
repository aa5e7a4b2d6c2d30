"""Answers about jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.api.messages.text import Text
from service.core.errors import StackSegError
from service.serving.jobs.active_job import JobView
from service.serving.jobs.record import JobRecord, JobState


class JobProgress(BaseModel):
    """Progress in windows, done and all: decoding counts as many as are computed in the time that it takes."""

    done: int
    total: int


class JobProblem(BaseModel):
    """The reason why a job failed, as the problem document of its result says it."""

    type: str
    detail: Text


class JobReport(BaseModel):
    """A job.

    state         waiting, loading while it waits for its model to be loaded, running, done, failed, cancelled, or
                  expired once its result had to make room
    stage         that a job which runs is at: prepare, windows, decode, write
    position      1 for the job whose turn is next, only while it waits
    seconds_left  until the result is there, those before it included; null where that cannot be told yet
    seconds       by stage, as far as the job has come
    time_points   those that are done, of a series. The result of one that failed has them
    stacks        those that are done, of a folder; so is `progress` then. At the end those that have results
    confidence    in the result, 0 to 1, where the model knows; `doubt` says why it is low and what to try
    warnings      what a user should know about the result
    diameter      of the objects, and whether it was stated or estimated
    skipped       windows that were not computed because nothing is in them, where such were looked for
    expires       when the job and its result are deleted
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
    warnings: list[Text]
    diameter: str | None = None
    skipped: str | None = None
    objects: int | None = None
    result: str | None
    problem: JobProblem | None


class JobList(BaseModel):
    """The caller's jobs, newest first."""

    jobs: list[JobReport]


def report_job(view: JobView, keep_seconds: float) -> JobReport:
    """Return a job as JSON shows it; its result is kept for `keep_seconds`."""
    record = view.record
    return JobReport(
        id=record.id,
        state=_name_state(view),
        name=record.request.name,
        parameters=record.request.parameters,
        created=_utc(record.created),
        started=_utc_or_none(record.started),
        ended=_utc_or_none(record.ended),
        expires=None if record.ended is None else _utc(record.ended + keep_seconds),
        stage=view.stage,
        position=view.position,
        progress=JobProgress(done=view.progress.done, total=view.progress.total),
        **_report_parts(view),
        seconds_left=None if view.seconds_left is None or record.ended is not None else round(view.seconds_left, 1),
        seconds={stage: round(seconds, 3) for stage, seconds in view.seconds.items()},
        result=f"/jobs/{record.id}/result" if record.state == "done" else None,
        problem=_report_problem(record.failure),
        **_report_result(record),
    )


def _name_state(view: JobView) -> JobState | Literal["loading"]:
    """Return the state that the owner is told: a job of which a part is done has failed, with a result."""
    state = view.record.state
    if state == "waiting" and view.loading:
        return "loading"
    return "failed" if state == "done" and view.record.failure is not None else state


def _report_parts(view: JobView) -> dict[str, Any]:
    """Return how far a series or a folder has come, as members of a `JobReport`."""
    parts = JobProgress(done=view.points.done, total=view.points.total) if view.points.total else None
    is_folder = view.record.request.is_folder
    return {"time_points": None if is_folder else parts, "stacks": parts if is_folder else None}


def _report_result(record: JobRecord) -> dict[str, Any]:
    """Return the members of a `JobReport` that are known of a result; the model is named before there is one."""
    metadata = record.answer
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


def _utc(seconds: float) -> datetime:
    """Return seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def _utc_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else _utc(seconds)
