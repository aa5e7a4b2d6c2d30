"""POST /inspect: describe a file, and estimate the time and memory that its segmentation requires."""

from __future__ import annotations

from fastapi import APIRouter, Request

from service.api.dependencies import RuntimeDependency
from service.api.messages.stacks import Inspection
from service.api.requests.admission import STACK_REQUEST, AdmittedQuery
from service.api.requests.inspection import inspect_request

router = APIRouter(tags=["segmentation"])


@router.post("/inspect", openapi_extra=STACK_REQUEST)
async def inspect_stack(request: Request, runtime: RuntimeDependency, query: AdmittedQuery) -> Inspection:
    """Inspect a stack without segmenting it.

    Reports the axes, voxel size and channels of the file, and estimates the time and memory that its segmentation would
    require. Accepts the same body and parameters as `/segment`. No pixels are decoded, and no device is used.
    """
    return await inspect_request(request, runtime, query)
