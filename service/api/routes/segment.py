"""POST /segment: segment a stack and return its labels."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.api.dependencies import AsyncJobsDependency, RuntimeDependency
from service.api.http.waiting import run_while_connected
from service.api.messages.results import RESULT_RESPONSES, ResultResponse
from service.api.requests.admission import (
    PREFER_HEADER,
    RESPOND_ASYNC,
    STACK_REQUEST,
    admit,
    prefers_async,
    select_model,
)
from service.api.requests.body import receive_file
from service.api.requests.jobs import ACCEPTED_RESPONSES, KEY_HEADER, accept_job
from service.api.requests.responses import build_stack_response
from service.core.errors import Cancelled, NotReady
from service.serving.runtime import Runtime
from service.serving.segmentation import SegmentationTask

router = APIRouter(tags=["segmentation"])


@router.post(
    "/segment",
    response_class=FileResponse,
    responses=RESULT_RESPONSES | ACCEPTED_RESPONSES,
    openapi_extra=STACK_REQUEST | {"parameters": [*STACK_REQUEST["parameters"], PREFER_HEADER, KEY_HEADER]},
)
async def segment(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency) -> Response:
    """Segment a 3D stack.

    Send a TIFF file as the body (`curl --data-binary @stack.tif`) or in the form field `file`, or select a file on the
    service's host with `input`. The axes and the voxel size are read from the metadata of the file. If the metadata is
    missing, set the parameters `axes` and `voxel_size`. Files with ambiguous axes are rejected.

    The header `Accept` selects the file format of the labels, as for `GET /jobs/{job}/result`. With
    `Prefer: respond-async`, the response is the same as from `POST /jobs`.
    """
    if prefers_async(request):
        response = await accept_job(request, runtime, async_jobs)
        response.headers["Preference-Applied"] = RESPOND_ASYNC
        return response
    query, spec = await admit(request, runtime)
    async with receive_file(request, query) as stack:
        spec = spec or select_model(runtime, stack.request.query)
        task = SegmentationTask(runtime, stack, spec, stack.stages)
        result = await run_while_connected(request, _run_task(request, runtime, task))
        result.resources.push_async_callback(stack.resources.pop_all().aclose)
        return result


async def _run_task(request: Request, runtime: Runtime, task: SegmentationTask) -> ResultResponse:
    try:
        stack_result = await task.run()
    except Cancelled:
        raise NotReady(
            "The service stopped before the request was completed. Send the request again in a moment."
        ) from None
    return await build_stack_response(request, runtime, stack_result)
