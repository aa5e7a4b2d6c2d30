"""/jobs: segment a stack without waiting for the answer; follow, fetch and cancel such jobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from service.api.dependencies import AsyncJobsDependency, RuntimeDependency, get_caller, get_client
from service.api.messages.jobs import JobList, JobReport, report_job
from service.api.messages.results import ANSWER, ResultResponse, build_response
from service.api.requests.admission import REQUEST, AdmittedQuery
from service.api.requests.answers import send_part
from service.api.requests.jobs import ACCEPTED, accept_job
from service.core.errors import StorageUnavailable, UnknownJob
from service.core.files.whole_file import descriptor_path
from service.serving.jobs.active_job import JobView
from service.serving.jobs.jobs import AsyncJobs
from service.serving.results.media_types import choose_media_type
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["jobs"])

POLL_SECONDS = 0.5
# A comment after so much silence keeps proxies from taking the connection for a dead one.
KEEPALIVE_SECONDS = 15.0

JobId = Annotated[str, Path(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]

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
    return await accept_job(request, runtime, async_jobs, query)


@router.get("/jobs")
async def list_jobs(
    request: Request,
    async_jobs: AsyncJobsDependency,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many jobs at most.")] = 100,
) -> JobList:
    """The caller's jobs, newest first."""
    views = await run_in_thread(partial(async_jobs.newest, get_caller(request), limit))
    return JobList(jobs=[report_job(view, async_jobs.keep_seconds) for view in views])


@router.get("/jobs/{job}")
async def show(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> JobReport:
    """State, position in the queue, progress in windows, seconds left, stage times, warnings."""
    view = await run_in_thread(partial(async_jobs.view, job, get_caller(request)))
    return report_job(view, async_jobs.keep_seconds)


@router.get("/jobs/{job}/events", response_class=StreamingResponse, responses=EVENTS)
async def events(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, job: JobId
) -> StreamingResponse:
    """Follow a job by server-sent events, until it is over."""
    caller = get_caller(request)
    view = await run_in_thread(partial(async_jobs.view, job, caller))
    return StreamingResponse(
        _stream_events(runtime, async_jobs, view, caller),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get("/jobs/{job}/result", response_class=FileResponse, responses=ANSWER)
async def result(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, job: JobId
) -> ResultResponse:
    """Fetch the answer of a job as `/segment` gives it: the labels with their headers, or the problem of the job.

    With `Accept: application/x-npy`, `application/x-nifti` or `application/x-ozx` the labels in that form, with
    `Accept: image/tiff` or `text/csv` one file of an archive.
    """
    file, metadata = await run_in_thread(partial(async_jobs.result, job, get_caller(request)))
    media_type = choose_media_type(request.headers.get("accept", ""), metadata)
    if media_type != metadata.media_type:
        return await send_part(request, runtime, file, metadata, media_type)
    # The file is open already, so that a result that has to make room meanwhile is still sent whole.
    with ExitStack() as opened:
        opened.callback(file.close)
        space = opened.enter_context(runtime.scratch_space.hold(get_client(request)))
        # Whoever holds nothing else may take a result of any size.
        space.reserve(min(os.fstat(file.fileno()).st_size, runtime.scratch_space.most))
        response = build_response(descriptor_path(file.fileno()), metadata)
        response.resources.callback(opened.pop_all().close)
        return response


@router.delete("/jobs/{job}", status_code=204)
async def cancel(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> None:
    """Cancel a job that waits or runs: the device stops before its next batch of windows. Forget one that is over."""
    await run_in_thread(partial(async_jobs.cancel, job, get_caller(request)))


async def _stream_events(
    runtime: Runtime, async_jobs: AsyncJobs, view: JobView, caller: str | None
) -> AsyncIterator[str]:
    """Yield a server-sent event whenever the job's report changes, until the job is over or the service stops."""
    sent, silent = "", 0.0
    while True:
        text = report_job(view, async_jobs.keep_seconds).model_dump_json()
        if text != sent:
            yield f"data: {text}\n\n"
            sent, silent = text, 0.0
        elif silent > KEEPALIVE_SECONDS:
            yield ": still the same\n\n"
            silent = 0.0
        if view.record.over or runtime.draining:
            return
        await asyncio.sleep(POLL_SECONDS)
        silent += POLL_SECONDS
        try:
            view = await run_in_thread(partial(async_jobs.view, view.record.id, caller))
        except UnknownJob:
            return
        except StorageUnavailable:
            continue
