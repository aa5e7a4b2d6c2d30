"""Answers about jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.api.messages.text import Text
from service.serving.jobs.record import JobState


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
