"""GET /stacks/{stack}/planes and GET /jobs/{job}/planes: planes of a stack or of labels, to be drawn."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import Response

from service.api.dependencies import RuntimeDependency, get_async_jobs, get_caller, get_client, get_stacks
from service.api.http.waiting import run_while_connected
from service.api.messages.planes import PLANES, PlaneRangeQuery, PlanesResponse, SelectionQuery
from service.core.errors import RateLimited
from service.core.types import Cancelling, Volume
from service.serving.results.media_types import read_labels
from service.serving.results.planes import MEMORY, PlaneRange, Planes
from service.serving.runtime import Runtime
from service.serving.storage.disk import translate_disk_faults
from service.serving.storage.memory_budget import MemoryBudget
from service.serving.storage.threads import run_in_thread

router = APIRouter()

RETRY_SECONDS = 1

StackId = Annotated[str, PathParameter(pattern="^[0-9a-f]{32}$", description="The id of the stack.")]
JobId = Annotated[str, PathParameter(description="The id of the job.", examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"])]


JobTime = Annotated[
    int | None, Query(ge=0, description="Of several time points the one, counted from the first of them.")
]


@router.get("/stacks/{stack}/planes", name="planes", tags=["stacks"], response_class=Response, responses=PLANES)
async def stack_planes(
    request: Request, runtime: RuntimeDependency, stack: StackId, selection: SelectionQuery, wanted: PlaneRangeQuery
) -> Response:
    """Planes of a kept stack as raw numbers, to be drawn."""
    stored = await run_in_thread(partial(get_stacks(request).find, stack, get_caller(request)))

    def read(folder: Path, cancelled: Cancelling) -> Volume:
        return runtime.reader.read(stored.path, selection, folder, cancelled=cancelled)

    return await answer_planes(await _open_volume(request, runtime, (stack, selection), read), wanted)


@router.get("/jobs/{job}/planes", name="planes", tags=["jobs"], response_class=Response, responses=PLANES)
async def label_planes(
    request: Request, runtime: RuntimeDependency, job: JobId, wanted: PlaneRangeQuery, time: JobTime = None
) -> Response:
    """Planes of the labels of a job that is done, as raw numbers, to be drawn. Those of its input: `/stacks`."""
    async_jobs = await get_async_jobs(request)
    file, metadata = await run_in_thread(partial(async_jobs.result, job, get_caller(request)))

    def read(folder: Path, cancelled: Cancelling) -> Volume:
        return read_labels(runtime.reader, file, metadata, folder, time=time, cancelled=cancelled)

    with file:
        volume = await _open_volume(request, runtime, (job, time), read)
    return await answer_planes(volume, wanted)


async def _open_volume(
    request: Request, runtime: Runtime, key: Hashable, read: Callable[[Path, Cancelling], Volume]
) -> Volume:
    """Return the volume under a key, else the one that `read` decodes to an empty folder, in a thread that decodes.

    Raises the errors of `read` and of `VolumeCache.open`, and Cancelled when the client disconnects.
    """
    if (volume := runtime.volumes.find(key)) is not None:
        return volume
    cancelled = threading.Event()

    def decode() -> Volume:
        folder = runtime.scratch.make_request_folder()
        try:
            return read(folder, cancelled.is_set)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    with translate_disk_faults():
        opening = partial(runtime.volumes.open, key, runtime.scratch_space, decode)
        threads = runtime.decode_threads.of(get_client(request))
        return await run_while_connected(request, run_in_thread(opening, threads, cancelled))


async def answer_planes(volume: Volume, wanted: PlaneRange, memory: MemoryBudget = MEMORY) -> Response:
    """Read planes of the first channel in a thread, and return the response with them.

    Raises what `Planes.select` raises, and RateLimited where planes for others leave no memory for these.
    """
    planes = Planes.select(volume, wanted)
    if not memory.reserve(planes.nbytes):
        raise RateLimited("Too many planes are on their way already; ask for these again.", RETRY_SECONDS)
    release = partial(memory.release, planes.nbytes)
    try:
        numbers = await run_in_thread(planes.read)
    except BaseException:
        release()
        raise
    return PlanesResponse(volume.shape[1:], numbers, release)
