"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.answers import Answer, answer_name, fingerprint, outcome_of, read_pixels, settle, write_answer
from service.errors import Cancelled, NotReady
from service.jobs import Job
from service.metrics import Stages
from service.repository import ModelSpec
from service.routes.answers import ANSWER, Found, LabelResponse, opened, respond
from service.routes.jobs import ACCEPTED, accept
from service.routes.requests import (
    REQUEST,
    RESPOND_ASYNC,
    AdmittedQuery,
    Posted,
    PreferHeader,
    RuntimeDependency,
    SpoolDependency,
    caller_of,
    check_output,
    posted,
    wants_a_job,
    while_connected,
)
from service.routes.threads import FILES, NAMED_FILES, in_thread
from service.runtime import Runtime
from service.segmenter import Result

router = APIRouter(tags=["segmentation"])


@router.post("/segment", response_class=FileResponse, responses=ANSWER | ACCEPTED, openapi_extra=REQUEST)
async def segment(
    request: Request,
    runtime: RuntimeDependency,
    spool: SpoolDependency,
    query: AdmittedQuery,
    prefer: PreferHeader = None,
) -> Response:
    """Segment a 3D stack.

    Post the TIFF itself (`curl --data-binary @stack.tif`), or a form with the field `file`, or name a file of the
    service's host with `input`. Axes and voxel size are taken from the file; what it does not say can be stated, and
    what is ambiguous is refused rather than guessed.
    With `Prefer: respond-async` the answer is that of `POST /jobs`.
    """
    if wants_a_job(prefer):
        response = await accept(request, runtime, spool, query)
        response.headers["Preference-Applied"] = RESPOND_ASYNC
        return response
    stages = Stages()
    async with posted(request, runtime, query, stages) as arrived:
        query, spec = arrived.query, check_output(runtime, arrived.query)

        def key_now() -> str | None:
            if arrived.digest is None or query.output_to is not None:
                # A file that others may change does not tell whether it is still the same.
                return None
            return fingerprint(caller_of(request), arrived.digest, spec, query, runtime.manner(spec.name))

        answer = None
        if runtime.cache.enabled:
            answer = await _again(runtime, arrived.name, key_now(), stages)
        if answer is None:
            answer = await while_connected(request, _answer(runtime, arrived, spec, key_now, stages))
            answer.held = arrived.keep()
        return answer


async def _again(runtime: Runtime, name: str, key: str | None, stages: Stages) -> LabelResponse | None:
    """The result of an earlier request for the same, if it is kept."""
    if key is None:
        return None
    kept = await in_thread(partial(runtime.cache.get, key))
    runtime.metrics.count_cache("miss" if kept is None else "hit")
    if kept is None:
        return None
    outcome, suffix = kept.told
    seconds = {**stages.seconds, "total": stages.total}
    outcome = replace(outcome, file_name=answer_name(name, suffix), seconds=seconds)
    response = respond(opened(kept.file), outcome, ETag=etag(key), X_Cache="hit")
    response.held.callback(kept.file.close)
    return response


async def _answer(
    runtime: Runtime, posted: Posted, spec: ModelSpec, key_now: Callable[[], str | None], stages: Stages
) -> LabelResponse:
    """Everything after the upload: read, wait for the device, segment, write, keep.

    `key_now` is asked at the end: only once a model is loaded it is known how it runs.
    """
    arrival, query = posted.arrival, posted.query
    with stages.measure("read"):
        read = partial(read_pixels, runtime, query, arrival.source, arrival.folder)
        volume, measured = await in_thread(read, runtime.readers)
    result = await _finished(runtime.submit(spec, volume, query.options), stages)

    def write() -> tuple[Answer, Found]:
        """In one go: a client that hangs up meanwhile leaves nothing beside what was written on the host."""
        written = write_answer(runtime, arrival, measured, result, spec.identifier)
        settle(runtime, arrival)
        return written, Found.at(written.path)

    answer, found = await in_thread(write, FILES if query.output_to is None else NAMED_FILES)
    stages.update(answer.seconds)
    count = result.segmentation.count
    runtime.metrics.count_segmentation(spec.name, volume.voxels, count, stages.seconds)
    seconds = {**stages.seconds, "total": stages.total}
    outcome = outcome_of(spec.identifier, posted.name, answer, result, seconds)
    if (key := key_now()) is None:
        return respond(answer.path, outcome, found)
    if not runtime.cache.enabled:
        return respond(answer.path, outcome, found, ETag=etag(key))
    await in_thread(partial(runtime.cache.put, key, answer.path, (outcome, answer.suffix)))
    return respond(answer.path, outcome, found, ETag=etag(key), X_Cache="miss")


def etag(key: str) -> str:
    """A strong validator: the same key has the same labels, though not the same times beside them."""
    return f'"{key[:32]}"'


async def _finished(job: Job[Result], stages: Stages) -> Result:
    """The job's result; adds the times of waiting and of each stage. The job is cancelled when the caller is."""
    stopped = NotReady("The service stopped before the request was finished; send it again.")
    try:
        result = await asyncio.wrap_future(job.future)
    except Cancelled:
        raise stopped from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise stopped from None
    finally:
        job.cancel()
    stages.add("queue", job.seconds_waited)
    stages.update(result.seconds)
    return result
