"""Accept a request as a job, and respond with the report of the job."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse

from service.api.http.waiting import run_while_connected
from service.api.messages.jobs import JobReport, report_job
from service.api.requests.admission import select_model
from service.api.requests.body import incoming_folder, inspect_file, receive_file
from service.serving.jobs.active_job import JobView
from service.serving.jobs.jobs import JobManager
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

LOCATION_HEADER: dict[str, Any] = {
    "Location": {
        "description": "URL path of the job.",
        "schema": {"type": "string", "example": "/jobs/0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"},
    }
}
ACCEPTED_RESPONSES: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "The job has been accepted. It continues after a restart of the service.",
        "model": JobReport,
        "headers": LOCATION_HEADER,
    }
}


async def accept_job(request: Request, runtime: Runtime, async_jobs: JobManager, query: Parameters) -> Response:
    """Receive the file into the jobs folder, submit a job, and return the response with the job's report."""
    async with receive_file(request, query, incoming_folder(async_jobs), allow_folders=True) as file:
        select_model(runtime, file.request.query)

        async def inspect_and_submit() -> JobView:
            receive_seconds = file.stages.seconds["receive"]
            input_path, host_files = file.request.query.input, runtime.host_files
            is_folder = partial(host_files.is_folder, input_path or "", file.request.caller)
            threads = runtime.host_threads.for_client(file.space.client)
            if input_path is not None and await run_in_thread(is_folder, threads):
                await run_in_thread(file.complete)
                cancelled = threading.Event()
                arguments = file.request, file.name, receive_seconds, cancelled.is_set
                return await run_in_thread(partial(async_jobs.submit_folder, *arguments), threads, cancelled)
            description = await inspect_file(runtime, file)
            # Submit the job in a thread, because syncing a large file to disk takes a while.
            return await run_in_thread(
                partial(async_jobs.submit, file.request, file.name, description, receive_seconds)
            )

        view = await run_while_connected(request, inspect_and_submit())
    report = report_job(view, async_jobs.keep_seconds)
    return JSONResponse(report.model_dump(mode="json"), 202, headers={"Location": f"/jobs/{report.id}"})
