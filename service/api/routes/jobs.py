"""/jobs: segmentation in the background. Submit, follow and cancel jobs, and download their results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from service.api.dependencies import RuntimeDependency, get_caller, get_quota_name
from service.api.messages.headers import get_list_header
from service.api.messages.jobs import JobList, JobReport, report_job
from service.api.messages.result_headers import RESULT_RESPONSES
from service.api.requests.admission import STACK_REQUEST
from service.api.requests.downloads import build_response
from service.api.requests.jobs import ACCEPTED_RESPONSES, KEY_HEADER, AsyncJobsDependency, accept_job
from service.api.requests.result_responses import build_derived_response
from service.core.errors import StorageUnavailable, UnknownJob
from service.core.files.atomic_files import make_descriptor_path
from service.serving.jobs.active_job import JobView
from service.serving.jobs.job_manager import JobManager
from service.serving.parameters import DecimalInteger
from service.serving.results.conversion import convert_result
from service.serving.results.filters import FilteredResult, ObjectFilter, convert_filtered_result
from service.serving.results.media_types import choose_media_type
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["jobs"])

# Interval between checks for changes to a job.
POLL_SECONDS = 0.5
# Time without events after which a comment is sent, so that proxies do not close the connection.
KEEPALIVE_SECONDS = 15.0

JobId = Annotated[str, Path(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]
ObjectLimits = Annotated[
    Sequence[str],
    Query(
        alias="filter",
        description="Keep only the objects for which a column of the table lies between two values, `COLUMN:LOW:HIGH`."
        " Either value can be empty. Repeat the parameter for several columns. The result must have been requested with"
        " `measurements`.",
        examples=[["confidence:0.8:", "touching_border:0:0"]],
    ),
]
KeepFinished = Annotated[
    bool,
    Query(
        description="Do nothing if the job has already ended. Otherwise, canceling a job that ends at the same moment"
        " deletes its result.",
    ),
]

EVENTS_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An event whenever the job changes, with the same report as from `GET /jobs/{job}`. The last"
        " event reports the final state.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"id": "0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21", "state": "running", ...}\n\n',
            }
        },
    }
}


@router.post(
    "/jobs",
    status_code=202,
    responses=ACCEPTED_RESPONSES,
    openapi_extra=STACK_REQUEST | {"parameters": [*STACK_REQUEST["parameters"], KEY_HEADER]},
)
async def submit_job(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency) -> Response:
    """Segment a 3D stack in the background.

    Accepts the same body and parameters as `/segment`, and returns the report of the job. Errors that can be detected
    without decoding pixels are reported immediately. With the header `Idempotency-Key`, the request can be repeated
    without creating a second job.
    """
    return await accept_job(request, runtime, async_jobs)


@router.get("/jobs")
async def list_jobs(
    request: Request,
    async_jobs: AsyncJobsDependency,
    limit: Annotated[DecimalInteger, Query(ge=1, le=1000, description="Maximum number of jobs to return.")] = 100,
) -> JobList:
    """List the caller's jobs, newest first."""
    views = await run_in_thread(partial(async_jobs.list_newest, get_caller(request), limit))
    return JobList(jobs=[report_job(view, async_jobs.keep_seconds, request.scope) for view in views])


@router.get("/jobs/{job}")
async def get_job(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> JobReport:
    """Get the state and progress of a job.

    Includes the position in the queue, the estimated remaining time, the duration of each stage, and warnings.
    """
    view = await run_in_thread(partial(async_jobs.view, job, get_caller(request)))
    return report_job(view, async_jobs.keep_seconds, request.scope)


@router.get("/jobs/{job}/events", response_class=StreamingResponse, responses=EVENTS_RESPONSES)
async def follow_job(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, job: JobId
) -> StreamingResponse:
    """Follow a job with server-sent events until it has ended."""
    view = await run_in_thread(partial(async_jobs.view, job, get_caller(request)))
    return StreamingResponse(
        iter(()) if request.method == "HEAD" else _stream_events(request, runtime, async_jobs, view),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get("/jobs/{job}/result", response_class=FileResponse, responses=RESULT_RESPONSES)
async def download_result(
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    job: JobId,
    limits: ObjectLimits = (),
) -> Response:
    """Download the result of a job.

    The response is the same as from `/segment`: the labels with their headers or, if the job has failed, a problem
    document. Use `Accept: application/x-npy`, `application/x-nifti` or `application/x-ozx` to get the labels in another
    file format, and `Accept: image/tiff` or `text/csv` to get a single file from an archive. With `filter`, the labels
    and the table contain only the objects within all limits.
    """
    object_filter = ObjectFilter.parse(limits)
    file, metadata = await run_in_thread(partial(async_jobs.open_result, job, get_caller(request)))
    with ExitStack() as exit_stack:
        exit_stack.callback(file.close)
        media_type = choose_media_type(get_list_header(request.scope, b"accept"), metadata)
        exit_stack.pop_all()
    if object_filter is not None:
        result = FilteredResult(file, metadata, media_type, object_filter)
        convert = partial(convert_filtered_result, runtime.reader, result)
        return await build_derived_response(request, runtime, file, convert, f"{media_type} {object_filter}")
    if media_type != metadata.media_type:
        convert = partial(convert_result, runtime.reader, file, metadata, media_type)
        return await build_derived_response(request, runtime, file, convert, media_type)
    # The file is already open, so it is sent completely even if the result is deleted in the meantime.
    with ExitStack() as exit_stack:
        exit_stack.callback(file.close)
        space = exit_stack.enter_context(runtime.scratch_space.make_reservation(get_quota_name(request)))
        # A client with no other request in progress may download a result of any size.
        file_status = os.fstat(file.fileno())
        space.reserve(min(file_status.st_size, runtime.scratch_space.max_client_bytes))
        response = build_response(make_descriptor_path(file.fileno()), metadata, stat_result=file_status)
        response.resources.callback(exit_stack.pop_all().close)
        return response


@router.delete("/jobs/{job}", status_code=204)
async def cancel_job(
    request: Request, async_jobs: AsyncJobsDependency, job: JobId, *, keep_finished: KeepFinished = False
) -> None:
    """Cancel or delete a job.

    A waiting or running job is cancelled. A running job stops before the next batch of windows. A job that has ended is
    deleted, together with its result, unless `keep_finished` is true.
    """
    await run_in_thread(partial(async_jobs.cancel, job, get_caller(request), keep_finished=keep_finished))


async def _stream_events(
    request: Request, runtime: Runtime, async_jobs: JobManager, view: JobView
) -> AsyncIterator[str]:
    """Yield a server-sent event whenever the report of a job changes, until the job has ended or the service stops."""
    last_report, silent_seconds = "", 0.0
    while True:
        report = report_job(view, async_jobs.keep_seconds, request.scope).model_dump_json()
        if report != last_report:
            yield f"data: {report}\n\n"
            last_report, silent_seconds = report, 0.0
        elif silent_seconds > KEEPALIVE_SECONDS:
            yield ": no change\n\n"
            silent_seconds = 0.0
        if view.record.has_ended or runtime.is_draining:
            return
        await asyncio.sleep(POLL_SECONDS)
        silent_seconds += POLL_SECONDS
        try:
            view = await run_in_thread(partial(async_jobs.view, view.record.id, get_caller(request)))
        except UnknownJob:
            return
        except StorageUnavailable:
            continue
