"""Jobs: the work of `/segment` without waiting for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import FileResponse, JSONResponse, StreamingResponse

from service.api.admission import (
    REQUEST,
    AdmittedQuery,
    AsyncJobsDependency,
    RuntimeDependency,
    caller_of,
    check_output,
)
from service.api.request_body import incoming_folder, posted, while_connected
from service.api.responses import ANSWER, LabelResponse, opened, respond
from service.api.schemas import JobList, JobProblem, JobProgress, JobReport
from service.api.threads import in_thread
from service.core.errors import StackSegError, UnknownJob
from service.core.timing import Stages
from service.serving.async_jobs import AsyncJobs, JobView
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime

router = APIRouter(tags=["jobs"])

EVENT_SECONDS = 0.5
# So that proxies do not take a silent connection for a dead one.
SILENT_SECONDS = 15.0

JobId = Annotated[str, Path(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]

LOCATION: dict[str, Any] = {
    "Location": {
        "description": "Where the job is found",
        "schema": {"type": "string", "example": "/jobs/0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"},
    }
}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"description": "The job was accepted and outlives a restart.", "model": JobReport, "headers": LOCATION}
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The job, as GET /jobs/{id} gives it, whenever it changes; the last event has its final state.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"id": "0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21", "state": "running", ...}\n\n',
            }
        },
    }
}


@router.post("/jobs", status_code=202, responses=ACCEPTED, openapi_extra=REQUEST)
async def submit(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, query: AdmittedQuery
) -> Response:
    """Segment a 3D stack later: the same body and parameters as `/segment`, answered with the address of a job.

    What can be known to be wrong without decoding a pixel is refused at once.
    """
    return await accept(request, runtime, async_jobs, query)


@router.get("/jobs")
async def list_jobs(
    request: Request,
    async_jobs: AsyncJobsDependency,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many jobs at most.")] = 100,
) -> JobList:
    """The caller's jobs, newest first."""
    views = await in_thread(partial(async_jobs.newest, caller_of(request), limit))
    return JobList(jobs=[report(async_jobs, view) for view in views])


@router.get("/jobs/{job}")
async def show(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> JobReport:
    """State, position in the queue, progress in windows, seconds left, stage times, warnings."""
    return report(async_jobs, await in_thread(partial(async_jobs.view, job, caller_of(request))))


@router.get("/jobs/{job}/events", response_class=StreamingResponse, responses=EVENTS)
async def events(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, job: JobId
) -> StreamingResponse:
    """The same as server-sent events, until the job is over."""
    caller = caller_of(request)
    first = await in_thread(partial(async_jobs.view, job, caller))
    return StreamingResponse(
        _changes(runtime, async_jobs, first, caller),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get("/jobs/{job}/result", response_class=FileResponse, responses=ANSWER)
async def result(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> LabelResponse:
    """What `/segment` would have answered: the labels with their headers, or the problem that the job failed with."""
    file, outcome = await in_thread(partial(async_jobs.result, job, caller_of(request)))
    # Open already, so that a result that has to make room meanwhile is still sent whole.
    response = respond(opened(file), outcome)
    response.held.callback(file.close)
    return response


@router.delete("/jobs/{job}", status_code=204)
async def cancel(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> None:
    """Cancel a job that waits or runs: the device stops before its next batch of windows. Forget one that is over."""
    await in_thread(partial(async_jobs.cancel, job, caller_of(request)))


async def accept(request: Request, runtime: Runtime, async_jobs: AsyncJobs, query: Parameters) -> Response:
    """Receive the file into the jobs folder, and answer with the job."""
    stages = Stages()
    async with posted(request, runtime, query, stages, incoming_folder(async_jobs)) as arrived:
        check_output(runtime, arrived.query)

        def enter() -> JobView:
            with stages.measure("receive"):
                arrived.land()
            return async_jobs.submit(arrived.received, arrived.name, stages.seconds["receive"])

        # Among what touches the disk: a large file takes a while until it is safe there.
        view = await while_connected(request, in_thread(enter))
    told = report(async_jobs, view)
    return JSONResponse(told.model_dump(mode="json"), 202, headers={"Location": f"/jobs/{told.id}"})


def report(async_jobs: AsyncJobs, view: JobView) -> JobReport:
    """A job in the JSON that is spoken."""
    record, outcome = view.record, view.record.answer
    return JobReport(
        id=record.id,
        state="loading" if view.loading and record.state == "waiting" else record.state,
        model=outcome.model if outcome else record.request.model,
        name=record.request.name,
        parameters=record.request.parameters,
        created=_time(record.created),
        started=_moment(record.started),
        ended=_moment(record.ended),
        expires=None if record.ended is None else _time(record.ended + async_jobs.keep_seconds),
        position=view.position,
        progress=JobProgress(done=view.progress.done, total=view.progress.total),
        seconds_left=None if view.seconds_left is None or record.ended is not None else round(view.seconds_left, 1),
        seconds={stage: round(seconds, 3) for stage, seconds in view.seconds.items()},
        warnings=list(outcome.notes) if outcome else [],
        diameter=outcome.diameter if outcome else None,
        skipped=outcome.skipped if outcome else None,
        objects=outcome.objects if outcome else None,
        result=f"/jobs/{record.id}/result" if record.state == "done" else None,
        problem=_problem(record.failure),
    )


async def _changes(runtime: Runtime, async_jobs: AsyncJobs, view: JobView, caller: str | None) -> AsyncIterator[str]:
    told, silent = "", 0.0
    while True:
        text = report(async_jobs, view).model_dump_json()
        if text != told:
            yield f"data: {text}\n\n"
            told, silent = text, 0.0
        elif silent > SILENT_SECONDS:
            yield ": still the same\n\n"
            silent = 0.0
        if view.record.over or runtime.draining:
            return
        await asyncio.sleep(EVENT_SECONDS)
        silent += EVENT_SECONDS
        try:
            view = await in_thread(partial(async_jobs.view, view.record.id, caller))
        except UnknownJob:
            return


def _problem(failure: StackSegError | None) -> JobProblem | None:
    if failure is None:
        return None
    return JobProblem(type=f"urn:stackseg:problem:{failure.slug}", detail=str(failure))


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else _time(seconds)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
