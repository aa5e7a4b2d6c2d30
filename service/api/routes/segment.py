"""POST /segment: segment a stack and return its labels."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.api.dependencies import RuntimeDependency
from service.api.messages.result_headers import RESULT_RESPONSES
from service.api.requests.admission import (
    PREFER_HEADER,
    RESPOND_ASYNC,
    STACK_REQUEST,
    admit,
    prefers_async,
)
from service.api.requests.body import segment_stack
from service.api.requests.jobs import ACCEPTED_RESPONSES, KEY_HEADER, AsyncJobsDependency, accept_job
from service.api.requests.result_responses import build_stack_response, check_accept_header

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
    admission = await admit(request, runtime)
    check_accept_header(request, runtime, admission)
    return await segment_stack(request, runtime, admission, partial(build_stack_response, request, runtime))
