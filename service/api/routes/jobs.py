"""/jobs: segment a stack in the background. Submit, follow and cancel jobs, and fetch their results."""

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
from service.api.messages.results import RESULT_RESPONSES, ResultResponse, build_response
from service.api.requests.admission import STACK_REQUEST, AdmittedQuery
from service.api.requests.answers import send_part
from service.api.requests.jobs import ACCEPTED_RESPONSES, accept_job
from service.core.errors import StorageUnavailable, UnknownJob
from service.core.files.atomic_files import descriptor_path
from service.serving.jobs.active_job import JobView
from service.serving.jobs.jobs import JobManager
from service.serving.results.media_types import choose_media_type
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["jobs"])

# Interval of checks for changes to a job.
POLL_SECONDS = 0.5
# After this time without an event, a comment is sent to prevent proxies from closing the connection.
KEEPALIVE_SECONDS = 15.0

JobId = Annotated[str, Path(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]

EVENTS_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An event with the report of the job, as from `GET /jobs/{job}`, whenever it changes. The last"
        " event has the final state.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"id": "0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21", "state": "running", ...}\n\n',
            }
        },
    }
}


@router.post("/jobs", status_code=202, responses=ACCEPTED_RESPONSES, openapi_extra=STACK_REQUEST)
async def submit(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, query: AdmittedQuery
) -> Response:
    """Segment a 3D stack in the background.

    Accepts the same body and parameters as `/segment` and returns a job. Errors that can be detected without decoding
    pixels are reported immediately.
    """
    return await accept_job(request, runtime, async_jobs, query)


@router.get("/jobs")
async def list_jobs(
    request: Request,
    async_jobs: AsyncJobsDependency,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of jobs to return.")] = 100,
) -> JobList:
    """List the caller's jobs, newest first."""
    views = await run_in_thread(partial(async_jobs.list_newest, get_caller(request), limit))
    return JobList(jobs=[report_job(view, async_jobs.keep_seconds) for view in views])


@router.get("/jobs/{job}")
async def show(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> JobReport:
    """Get the state and progress of a job.

    Includes its position in the queue, the estimated remaining time, the time per stage, and warnings.
    """
    view = await run_in_thread(partial(async_jobs.view, job, get_caller(request)))
    return report_job(view, async_jobs.keep_seconds)


@router.get("/jobs/{job}/events", response_class=StreamingResponse, responses=EVENTS_RESPONSES)
async def events(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, job: JobId
) -> StreamingResponse:
    """Follow a job with server-sent events until it has ended."""
    caller = get_caller(request)
    view = await run_in_thread(partial(async_jobs.view, job, caller))
    return StreamingResponse(
        _stream_events(runtime, async_jobs, view, caller),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get("/jobs/{job}/result", response_class=FileResponse, responses=RESULT_RESPONSES)
async def result(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, job: JobId
) -> ResultResponse:
    """Download the result of a job.

    The response is the same as from `/segment`: the labels with their headers, or the problem document of a failed job.
    Use `Accept: application/x-npy`, `application/x-nifti` or `application/x-ozx` to get the labels in another file
    format, and `Accept: image/tiff` or `text/csv` to get a single file of an archive.
    """
    file, metadata = await run_in_thread(partial(async_jobs.result, job, get_caller(request)))
    media_type = choose_media_type(request.headers.get("accept", ""), metadata)
    if media_type != metadata.media_type:
        return await send_part(request, runtime, file, metadata, media_type)
    # The file is already open, so it is sent completely even if the result is deleted in the meantime to free space.
    with ExitStack() as opened:
        opened.callback(file.close)
        space = opened.enter_context(runtime.scratch_space.new_reservation(get_client(request)))
        # A client without other requests may download a result of any size.
        space.reserve(min(os.fstat(file.fileno()).st_size, runtime.scratch_space.max_client_bytes))
        response = build_response(descriptor_path(file.fileno()), metadata)
        response.resources.callback(opened.pop_all().close)
        return response


@router.delete("/jobs/{job}", status_code=204)
async def cancel(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> None:
    """Cancel or delete a job.

    A waiting or running job is cancelled, and its computation stops before the next batch of windows. A job that has
    ended is deleted, together with its result.
    """
    await run_in_thread(partial(async_jobs.cancel, job, get_caller(request)))


async def _stream_events(
    runtime: Runtime, async_jobs: JobManager, view: JobView, caller: str | None
) -> AsyncIterator[str]:
    """Yield a server-sent event whenever the job's report changes, until the job has ended or the service stops."""
    sent, silent_seconds = "", 0.0
    while True:
        text = report_job(view, async_jobs.keep_seconds).model_dump_json()
        if text != sent:
            yield f"data: {text}\n\n"
            sent, silent_seconds = text, 0.0
        elif silent_seconds > KEEPALIVE_SECONDS:
            yield ": no change\n\n"
            silent_seconds = 0.0
        if view.record.has_ended or runtime.is_draining:
            return
        await asyncio.sleep(POLL_SECONDS)
        silent_seconds += POLL_SECONDS
        try:
            view = await run_in_thread(partial(async_jobs.view, view.record.id, caller))
        except UnknownJob:
            return
        except StorageUnavailable:
            continue
