"""/jobs: segment a stack without waiting for the answer; follow, fetch and cancel such jobs."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path as Folder
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import FileResponse, JSONResponse, StreamingResponse

from service.api.admission import REQUEST, AdmittedQuery, select_model
from service.api.cancellation import run_while_connected
from service.api.dependencies import AsyncJobsDependency, RuntimeDependency, get_caller, get_client
from service.api.planes import PLANES, PlaneRangeQuery, answer_planes, open_volume
from service.api.request_body import incoming_folder, receive_file
from service.api.responses import ANSWER, ResultResponse, build_response
from service.api.routes.inspect import inspect_file
from service.api.schemas import JobList, JobProblem, JobProgress, JobReport
from service.api.threads import HOST_FILE_THREADS, run_in_thread
from service.core.errors import StackSegError, StorageUnavailable, UnknownJob
from service.core.telemetry import Stages
from service.core.types import Volume
from service.formats.sandbox.parent import descriptor_path
from service.formats.sandbox.process import Cancelling
from service.serving.jobs.active_job import JobView
from service.serving.jobs.jobs import AsyncJobs
from service.serving.jobs.record import JobRecord, JobState
from service.serving.parameters import Query as Parameters
from service.serving.results.metadata import AnswerMetadata
from service.serving.results.parts import choose_media_type, extract, read_labels
from service.serving.runtime import Runtime
from service.serving.storage.scratch import translate_disk_faults

router = APIRouter(tags=["jobs"])

POLL_SECONDS = 0.5
# A comment after so much silence keeps proxies from taking the connection for a dead one.
KEEPALIVE_SECONDS = 15.0

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
    return await accept_job(request, runtime, async_jobs, query)


@router.get("/jobs")
async def list_jobs(
    request: Request,
    async_jobs: AsyncJobsDependency,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many jobs at most.")] = 100,
) -> JobList:
    """The caller's jobs, newest first."""
    views = await run_in_thread(partial(async_jobs.newest, get_caller(request), limit))
    return JobList(jobs=[report_job(async_jobs, view) for view in views])


@router.get("/jobs/{job}")
async def show(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> JobReport:
    """State, position in the queue, progress in windows, seconds left, stage times, warnings."""
    return report_job(async_jobs, await run_in_thread(partial(async_jobs.view, job, get_caller(request))))


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
        return await answer_part(request, runtime, file, metadata, media_type)
    # The file is open already, so that a result that has to make room meanwhile is still sent whole.
    with ExitStack() as opened:
        opened.callback(file.close)
        space = opened.enter_context(runtime.scratch_space.hold(get_client(request)))
        # Whoever holds nothing else may take a result of any size.
        space.reserve(min(os.fstat(file.fileno()).st_size, runtime.scratch_space.most))
        response = build_response(descriptor_path(file.fileno()), metadata)
        response.resources.callback(opened.pop_all().close)
        return response


@router.get("/jobs/{job}/planes", response_class=Response, responses=PLANES)
async def planes(  # noqa: PLR0913
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    *,
    job: JobId,
    wanted: PlaneRangeQuery,
    time: Annotated[
        int | None, Query(ge=0, description="Of several time points the one, counted from the first of them.")
    ] = None,
) -> Response:
    """Planes of the labels of a job that is done, as raw numbers, to be drawn. Those of its input: `/stacks`."""
    file, metadata = await run_in_thread(partial(async_jobs.result, job, get_caller(request)))

    def read(folder: Folder, cancelled: Cancelling) -> Volume:
        return read_labels(runtime.reader, file, metadata, folder, time=time, cancelled=cancelled)

    with file:
        volume = await open_volume(request, runtime, (job, time), read)
    return await answer_planes(volume, wanted)


@router.delete("/jobs/{job}", status_code=204)
async def cancel(request: Request, async_jobs: AsyncJobsDependency, job: JobId) -> None:
    """Cancel a job that waits or runs: the device stops before its next batch of windows. Forget one that is over."""
    await run_in_thread(partial(async_jobs.cancel, job, get_caller(request)))


async def answer_part(
    request: Request, runtime: Runtime, file: BinaryIO, metadata: AnswerMetadata, media_type: str
) -> ResultResponse:
    """Answer with a part of a result, or with its labels in another form, from a file of its own."""
    with translate_disk_faults(), ExitStack() as opened:
        opened.callback(file.close)
        space = opened.enter_context(runtime.scratch_space.hold(get_client(request)))
        folder = runtime.scratch.make_request_folder()
        opened.callback(partial(shutil.rmtree, folder, ignore_errors=True))
        making = partial(extract, runtime.reader, file, metadata, media_type, folder)
        path, described = await run_in_thread(making, runtime.decode_threads.of(space.client))
        space.reserve(path.stat().st_size)
        response = build_response(path, described)
        response.resources.callback(opened.pop_all().close)
        return response


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


async def _stream_events(
    runtime: Runtime, async_jobs: AsyncJobs, view: JobView, caller: str | None
) -> AsyncIterator[str]:
    """Yield a server-sent event whenever the job's report changes, until the job is over or the service stops."""
    sent, silent = "", 0.0
    while True:
        text = report_job(async_jobs, view).model_dump_json()
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


def _utc(seconds: float) -> datetime:
    """Return seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def _utc_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else _utc(seconds)
