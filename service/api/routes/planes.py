"""GET /stacks/{stack}/planes and GET /jobs/{job}/planes: planes of a stack or of labels, for display."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import Response

from service.api.dependencies import RuntimeDependency, get_async_jobs, get_caller, get_quota_name, get_stacks
from service.api.http.waiting import run_while_connected
from service.api.messages.planes import PLANES_RESPONSES, PlaneRangeQuery, PlanesResponse, SelectionQuery
from service.core.errors import RateLimited
from service.core.types import CancellationCheck, Selection, Volume
from service.serving.reading import read_with_reservation
from service.serving.results.media_types import read_labels
from service.serving.results.planes import PLANE_MEMORY_BUDGET, PlaneRange, PlaneSelection
from service.serving.runtime import Runtime
from service.serving.storage.disk import translate_disk_errors
from service.serving.storage.memory_budget import FairMemoryBudget
from service.serving.storage.threads import FILE_THREADS, run_in_thread
from service.serving.storage.volume_cache import ReserveFunction, VolumeKey

router = APIRouter()

# Retry-After header of responses to requests that are refused because the memory for planes is in use.
RETRY_SECONDS = 1

StackId = Annotated[str, PathParameter(pattern="^[0-9a-f]{32}$", description="The id of the stack.")]
JobId = Annotated[str, PathParameter(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]
JobTime = Annotated[
    int | None,
    Query(
        ge=0,
        description="Zero-based index of the time point in the result. Required if the result has several time points.",
    ),
]


@router.get(
    "/stacks/{stack}/planes", name="planes", tags=["stacks"], response_class=Response, responses=PLANES_RESPONSES
)
async def get_stack_planes(
    request: Request,
    runtime: RuntimeDependency,
    stack: StackId,
    selection: SelectionQuery,
    plane_range: PlaneRangeQuery,
) -> Response:
    """Get planes of an uploaded stack as raw pixel values, for display."""
    stored_stack = await run_in_thread(partial(get_stacks(request).find, stack, get_caller(request)))

    def read(folder: Path, reserve: ReserveFunction, cancelled: CancellationCheck) -> Volume:
        return read_with_reservation(
            runtime.reader, stored_stack.path, selection, reserve, scratch=folder, cancelled=cancelled
        )

    volume = await _open_volume(request, runtime, VolumeKey(stack, selection), read)
    return await _send_planes(request, runtime, volume, plane_range)


@router.get("/jobs/{job}/planes", name="planes", tags=["jobs"], response_class=Response, responses=PLANES_RESPONSES)
async def get_label_planes(
    request: Request, runtime: RuntimeDependency, job: JobId, plane_range: PlaneRangeQuery, time: JobTime = None
) -> Response:
    """Get planes of the labels from a finished job as raw pixel values, for display.

    For planes of the segmented stack, use `GET /stacks/{stack}/planes`.
    """
    async_jobs = await get_async_jobs(request)
    file, metadata = await run_in_thread(partial(async_jobs.open_result, job, get_caller(request)))

    def read(folder: Path, reserve: ReserveFunction, cancelled: CancellationCheck) -> Volume:
        read_file = partial(
            read_with_reservation,
            runtime.reader,
            selection=Selection(time=time),
            scratch=folder,
            reserve=reserve,
            cancelled=cancelled,
        )
        return read_labels(read_file, file, metadata, folder)

    with file:
        volume = await _open_volume(request, runtime, VolumeKey(job, time), read)
    return await _send_planes(request, runtime, volume, plane_range)


async def _open_volume(
    request: Request,
    runtime: Runtime,
    key: VolumeKey,
    read: Callable[[Path, ReserveFunction, CancellationCheck], Volume],
) -> Volume:
    """Return the cached volume for a key, or decode the volume in a decoder thread.

    `read` decodes the volume into an empty folder, after reserving disk space for it.

    Raises the same errors as `read` and `VolumeCache.get_or_read`, and Cancelled if the client disconnects.
    """
    if (volume := runtime.volume_cache.find(key)) is not None:
        return volume
    cancelled = threading.Event()

    def decode(reserve: ReserveFunction) -> Volume:
        folder = runtime.scratch.make_request_folder()
        try:
            return read(folder, reserve, cancelled.is_set)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    with translate_disk_errors():
        client = get_quota_name(request)
        open_volume = partial(runtime.volume_cache.get_or_read, key, client, runtime.scratch_space, decode)
        threads = runtime.decode_threads.for_client(client)
        return await run_while_connected(request, run_in_thread(open_volume, threads, cancelled))


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
