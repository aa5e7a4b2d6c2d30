"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.answers import outcome_of, write_answer
from service.errors import Cancelled, NotReady
from service.jobs import Job
from service.metrics import Stages
from service.routes.answers import ANSWER, LabelResponse, headers_of
from service.routes.jobs import ACCEPTED, accept
from service.routes.requests import (
    BODY,
    RESPOND_ASYNC,
    AdmittedQuery,
    PreferHeader,
    RuntimeDependency,
    SpoolDependency,
    check_output,
    posted,
    wants_a_job,
    while_connected,
)
from service.routes.threads import in_thread
from service.routes.uploads import Upload
from service.runtime import Runtime
from service.schemas import Query
from service.segmenter import Result

router = APIRouter(tags=["segmentation"])


@router.post("/segment", response_class=FileResponse, responses=ANSWER | ACCEPTED, openapi_extra=BODY)
async def segment(
    request: Request,
    runtime: RuntimeDependency,
    spool: SpoolDependency,
    query: AdmittedQuery,
    prefer: PreferHeader = None,
) -> Response:
    """Segment a 3D stack.

    Post the TIFF itself (`curl --data-binary @stack.tif`), or a form with the field `file`. Axes and voxel size are
    taken from the file; what it does not say can be stated, and what is ambiguous is refused rather than guessed.
    With `Prefer: respond-async` the answer is that of `POST /jobs`.
    """
    if wants_a_job(prefer):
        response = await accept(request, runtime, spool, query)
        response.headers["Preference-Applied"] = RESPOND_ASYNC
        return response
    stages = Stages()
    async with posted(request, runtime, query, stages) as arrived:
        answer = await while_connected(request, _answer(runtime, arrived.query, arrived.upload, stages))
        answer.held = arrived.keep()
        return answer


async def _answer(runtime: Runtime, query: Query, upload: Upload, stages: Stages) -> LabelResponse:
    """Everything after the upload: read, wait for the device, segment, write."""
    segmenter = check_output(runtime, query)
    with stages.measure("read"):
        read = partial(runtime.read, upload.path, query.selection, upload.path.parent)
        volume = await in_thread(read, runtime.readers)
    result = await _finished(runtime.submit(segmenter, volume, query.options), stages)
    answer = await in_thread(partial(write_answer, runtime, query, upload.path, volume, result.segmentation))
    stages.update(answer.seconds)
    count = result.segmentation.count
    runtime.metrics.count_segmentation(segmenter.spec.name, volume.voxels, count, stages.seconds)
    seconds = {**stages.seconds, "total": stages.total}
    outcome = outcome_of(segmenter.spec.identifier, upload.name, answer, result, seconds)
    return LabelResponse(
        answer.path, media_type=outcome.media_type, headers=headers_of(outcome), filename=outcome.file_name
    )


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
