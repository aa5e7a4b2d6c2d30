"""GET /stacks/{stack}/planes and GET /jobs/{job}/planes: planes of a stack or of labels, for display."""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import Response

from service.api.dependencies import RuntimeDependency, get_quota_name
from service.api.http.waiting import run_while_connected
from service.api.messages.planes import PLANES_RESPONSES, PlaneRangeQuery, PlanesResponse, SelectionQuery
from service.api.requests.volumes import open_label_volume, open_stack_volume
from service.core.errors import RateLimited
from service.core.types import Volume
from service.serving.parameters import DecimalInteger
from service.serving.results.planes import PLANE_MEMORY_BUDGET, PlaneRange, PlaneSelection
from service.serving.runtime import Runtime
from service.serving.storage.memory_budget import FairMemoryBudget
from service.serving.storage.threads import FILE_THREADS, run_in_thread

router = APIRouter()

# Options of both routes, in the decorators of FastAPI.
PLANES_ROUTE: dict[str, Any] = {
    "name": "planes",
    "response_class": Response,
    "responses": PLANES_RESPONSES,
}

# Retry-After header of responses to requests that are refused because the memory for planes is in use.
RETRY_SECONDS = 1

StackId = Annotated[str, PathParameter(pattern="^[0-9a-f]{32}$", description="The id of the stack.")]
JobId = Annotated[str, PathParameter(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]
JobTime = Annotated[
    DecimalInteger | None,
    Query(
        ge=0,
        description="Zero-based index of the time point in the result. Required if the result has several time points.",
    ),
]


@router.get("/stacks/{stack}/planes", tags=["stacks"], **PLANES_ROUTE)
async def get_stack_planes(
    request: Request,
    runtime: RuntimeDependency,
    stack: StackId,
    selection: SelectionQuery,
    plane_range: PlaneRangeQuery,
) -> Response:
    """Get planes of an uploaded stack as raw pixel values, for display."""
    volume = await open_stack_volume(request, runtime, stack, selection)
    return await _send_planes(request, runtime, volume, plane_range)


@router.get("/jobs/{job}/planes", tags=["jobs"], **PLANES_ROUTE)
async def get_label_planes(
    request: Request, runtime: RuntimeDependency, job: JobId, plane_range: PlaneRangeQuery, time: JobTime = None
) -> Response:
    """Get planes of the labels from a finished job as raw pixel values, for display.

    For planes of the segmented stack, use `GET /stacks/{stack}/planes`.
    """
    volume = await open_label_volume(request, runtime, job, time)
    return await _send_planes(request, runtime, volume, plane_range)


async def _send_planes(request: Request, runtime: Runtime, volume: Volume, plane_range: PlaneRange) -> Response:
    """Return the response with planes of a volume.

    Raises the same errors as `build_planes_response`, and Cancelled if the client disconnects.
    """
    client = get_quota_name(request)
    threads = runtime.plane_threads.for_client(client)
    return await run_while_connected(request, build_planes_response(volume, plane_range, client, threads))


async def build_planes_response(
    volume: Volume,
    plane_range: PlaneRange,
    client: str,
    threads: Executor = FILE_THREADS,
    memory: FairMemoryBudget = PLANE_MEMORY_BUDGET,
) -> Response:
    """Read planes of the first channel in a thread, and return the response with these planes.

    Raises the same errors as `PlaneSelection.select`, and RateLimited if other responses use up the client's share of
    the memory.
    """
    cancelled = threading.Event()
    planes = PlaneSelection.select(volume, plane_range)
    if not memory.reserve(client, planes.nbytes):
        raise RateLimited("Too many image planes are being sent at the moment. Try again in a second.", RETRY_SECONDS)
    release = partial(memory.release, client, planes.nbytes)
    try:
        pixels = await run_in_thread(partial(planes.read, cancelled.is_set), threads, cancelled)
    except BaseException:
        release()
        raise
    return PlanesResponse(volume.shape[1:], pixels, release)
