"""Accept a request as a job, and respond with the report of the job."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from starlette.responses import JSONResponse

from service.api.dependencies import get_quota_name
from service.api.http.waiting import run_while_connected
from service.api.messages.headers import make_url_path
from service.api.messages.jobs import JobReport, report_job
from service.api.requests.admission import admit, parse_query, select_model
from service.api.requests.body import ReceivedFile, incoming_folder, inspect_file, receive_file
from service.core.errors import BadParameter
from service.serving.jobs.active_job import JobView
from service.serving.jobs.job_manager import JobManager
from service.serving.jobs.record import IdempotencyKey
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


# An idempotency key. The characters are those of a URL, so that keys need no escaping in the log.
KEY_PATTERN = re.compile(r"[!#-\[\]-~]{1,128}")
KEY_HEADER = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "schema": {"anyOf": [{"type": "string", "maxLength": 128}, {"type": "null"}]},
    "description": "Identifies the job, for example a UUID. If the request is repeated with the same key, file and"
    " parameters, no further job is created, and the response contains the report of the existing one.",
}


async def get_async_jobs(request: Request) -> JobManager:
    """Return the manager of asynchronous jobs."""
    async_jobs: JobManager = request.app.state.async_jobs
    return async_jobs


AsyncJobsDependency = Annotated[JobManager, Depends(get_async_jobs)]


async def accept_job(request: Request, runtime: Runtime, async_jobs: JobManager) -> Response:
    """Submit a job like `submit_job`, and return the response with its report."""
    report = await submit_job(request, runtime, async_jobs)
    location = make_url_path(request.scope, f"/jobs/{report.id}")
    return JSONResponse(report.model_dump(mode="json"), 202, headers={"Location": location})


async def submit_job(request: Request, runtime: Runtime, async_jobs: JobManager) -> JobReport:
    """Admit a request, receive its file into the jobs folder, submit a job, and return its report.

    If the client has already submitted the job with the same idempotency key, return the report of the existing job.
    """
    key_value = _get_key_value(request)
    is_known = key_value is not None and await run_in_thread(
        partial(async_jobs.has_key, get_quota_name(request), key_value)
    )
    # Some checks would refuse a repeated request, for example because the job has written its output.
    query = parse_query(request) if is_known else (await admit(request, runtime)).query
    async with receive_file(request, query, incoming_folder(async_jobs), allow_folders=True) as file:
        view = await run_while_connected(request, _find_or_submit(request, runtime, async_jobs, file, key_value))
    return report_job(view, async_jobs.keep_seconds, request.scope)


async def _find_or_submit(
    request: Request, runtime: Runtime, async_jobs: JobManager, file: ReceivedFile, key_value: str | None
) -> JobView:
    """Return the job with the idempotency key if there is one, or else submit a job."""
    key: IdempotencyKey | None = None
    if key_value is not None:
        digest = _compute_request_digest(file, await run_in_thread(file.complete))
        key = IdempotencyKey(get_quota_name(request), key_value, digest)
        find_repeated = partial(async_jobs.find_repeated, key, file.request.caller)
        if (view := await run_in_thread(find_repeated)) is not None:
            return view
    select_model(runtime, file.request.query)
    receive_seconds = file.stages.seconds["receive"]
    input_path, host_files = file.request.query.input, runtime.host_files
    is_folder = partial(host_files.is_folder, input_path or "", file.request.caller)
    threads = runtime.host_threads.for_client(file.space.client)
    if input_path is not None and await run_in_thread(is_folder, threads):
        await run_in_thread(file.complete)
        cancelled = threading.Event()
        arguments = file.request, file.name, receive_seconds, cancelled.is_set, key
        return await run_in_thread(partial(async_jobs.submit_folder, *arguments), threads, cancelled)
    description = await inspect_file(runtime, file)
    # Submit the job in a thread, because syncing a large file to disk takes a while.
    submit = partial(async_jobs.submit, file.request, file.name, description, receive_seconds, key)
    return await run_in_thread(submit)


def _get_key_value(request: Request) -> str | None:
    """Return the idempotency key of a request; None if it has none. Raises BadParameter for an invalid key."""
    values = request.headers.getlist("idempotency-key")
    if not values:
        return None
    # The header is defined as a quoted string, but most clients send the key without quotes.
    value = values[0].strip()
    value = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    if len(values) > 1 or KEY_PATTERN.fullmatch(value) is None:
        raise BadParameter(
            "Idempotency-Key: the key must consist of 1 to 128 printable ASCII characters without blanks, quotes and"
            " backslashes, for example a UUID.",
            parameter="Idempotency-Key",
        )
    return value


def _compute_request_digest(file: ReceivedFile, file_digest: str | None) -> str:
    """Return a digest of the parameters, and of the digest and the name of the uploaded file."""
    parameters = file.request.query.model_dump(mode="json", exclude_unset=True)
    content = json.dumps([parameters, file_digest, file.name], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
