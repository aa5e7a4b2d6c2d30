"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.api.dependencies import AsyncJobsDependency, RuntimeDependency
from service.api.http.waiting import run_while_connected
from service.api.messages.results import ANSWER, ResultResponse
from service.api.requests.admission import PREFER, REQUEST, RESPOND_ASYNC, admit, prefers_async, select_model
from service.api.requests.answers import send_segmented
from service.api.requests.body import receive_file
from service.api.requests.jobs import ACCEPTED, accept_job
from service.core.errors import Cancelled, NotReady
from service.serving.runtime import Runtime
from service.serving.segmentation import SegmentationTask

router = APIRouter(tags=["segmentation"])


@router.post(
    "/segment",
    response_class=FileResponse,
    responses=ANSWER | ACCEPTED,
    openapi_extra=REQUEST | {"parameters": [*REQUEST["parameters"], PREFER]},
)
async def segment(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency) -> Response:
    """Segment a 3D stack.

    Post the TIFF itself (`curl --data-binary @stack.tif`), or a form with the field `file`, or name a file of the
    service's host with `input`. Axes and voxel size are taken from the file; what it does not say can be stated, and
    what is ambiguous is refused rather than guessed.
    `Accept` chooses the form of the labels as at `GET /jobs/{id}/result`.
    With `Prefer: respond-async` the answer is that of `POST /jobs`.
    """
    query, spec = await admit(request, runtime)
    if prefers_async(request):
        response = await accept_job(request, runtime, async_jobs, query)
        response.headers["Preference-Applied"] = RESPOND_ASYNC
        return response
    async with receive_file(request, query) as stack:
        spec = spec or select_model(runtime, stack.received.query)
        task = SegmentationTask(runtime, stack, spec, stack.stages)
        answer = await run_while_connected(request, _answer(request, runtime, task))
        answer.resources.push_async_callback(stack.resources.pop_all().aclose)
        return answer


async def _answer(request: Request, runtime: Runtime, task: SegmentationTask) -> ResultResponse:
    try:
        segmented = await task.run()
    except Cancelled:
        raise NotReady("The service stopped before the request was finished; send it again.") from None
    return await send_segmented(request, runtime, segmented)
