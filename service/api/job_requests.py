"""Accept a request that is answered later, and report on its job."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import Request, Response
from starlette.responses import JSONResponse

from service.api.admission import select_model
from service.api.cancellation import run_while_connected
from service.api.request_body import incoming_folder, inspect_file, receive_file
from service.api.schemas import JobProblem, JobProgress, JobReport
from service.api.threads import HOST_FILE_THREADS, run_in_thread
from service.core.errors import StackSegError
from service.core.timing import Stages
from service.serving.jobs.active_job import JobView
from service.serving.jobs.jobs import AsyncJobs
from service.serving.jobs.record import JobRecord, JobState
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime

LOCATION: dict[str, Any] = {
    "Location": {
        "description": "Where the job is found",
        "schema": {"type": "string", "example": "/jobs/0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"},
    }
}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"description": "The job was accepted and outlives a restart.", "model": JobReport, "headers": LOCATION}
}


async def accept_job(request: Request, runtime: Runtime, async_jobs: AsyncJobs, query: Parameters) -> Response:
    """Receive the file into the jobs folder, and answer with the job."""
    stages = Stages()
    async with receive_file(request, runtime, query, stages, incoming_folder(async_jobs), folders=True) as file:
        select_model(runtime, file.received.query)

        async def inspect_and_submit() -> JobView:
            seconds = stages.seconds["receive"]
            place, host_files = file.received.query.input, runtime.host_files
            is_folder = partial(host_files.is_folder, place or "", file.received.caller)
            if place is not None and await run_in_thread(is_folder, HOST_FILE_THREADS):
                await run_in_thread(file.complete)
                submit = partial(async_jobs.submit_folder, file.received, file.name, seconds)
                return await run_in_thread(submit, HOST_FILE_THREADS)
            description = await inspect_file(runtime, file)
            # A thread for disk work: syncing a large file to disk takes a while.
            return await run_in_thread(partial(async_jobs.submit, file.received, file.name, description, seconds))

        view = await run_while_connected(request, inspect_and_submit())
    report = report_job(async_jobs, view)
    return JSONResponse(report.model_dump(mode="json"), 202, headers={"Location": f"/jobs/{report.id}"})


def report_job(async_jobs: AsyncJobs, view: JobView) -> JobReport:
    """Return a job as JSON shows it."""
    record = view.record
    return JobReport(
        id=record.id,
        state=_name_state(view),
        name=record.request.name,
        parameters=record.request.parameters,
        created=_utc(record.created),
        started=_utc_or_none(record.started),
        ended=_utc_or_none(record.ended),
        expires=None if record.ended is None else _utc(record.ended + async_jobs.keep_seconds),
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
