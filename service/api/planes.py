"""Planes of a volume as raw numbers, for canvases: a range of planes, every n-th voxel, and a bounded size."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import Depends, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.cancellation import run_while_connected
from service.api.dependencies import get_client
from service.api.http.uploads import MemoryBudget
from service.api.threads import run_in_thread
from service.core.errors import BadParameter, RateLimited
from service.core.types import Array, Cancelling, Volume
from service.serving.runtime import Runtime
from service.serving.storage.disk import translate_disk_faults

MAX_BYTES = 2**25
# Memory of this process for planes that are being read and sent.
MEMORY = MemoryBudget(4 * MAX_BYTES)
RETRY_SECONDS = 1
CHUNK_BYTES = 2**20
# What typed arrays of browsers hold; other numbers are sent as float32.
SENT_TYPES = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"}

PLANES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": f"Numbers in C order [z, y, x], little-endian, {MAX_BYTES >> 20} MiB at most.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "X-StackSeg-Shape": {
                "description": "Planes, rows and columns that are sent",
                "schema": {"type": "string", "example": "16,512,512"},
            },
            "X-StackSeg-Dtype": {
                "description": "Kind of the numbers",
                "schema": {"type": "string", "enum": sorted(SENT_TYPES)},
            },
            "X-StackSeg-Volume": {
                "description": "Planes, rows and columns of the whole volume",
                "schema": {"type": "string", "example": "64,2048,2048"},
            },
        },
    }
}


class PlaneRange(NamedTuple):
    """Planes `start` to `stop` (None: the last) of a volume along an axis (0: z), in steps along (z, y, x)."""

    start: int
    stop: int | None
    step: tuple[int, int, int]
    axis: int = 0


def parse_range(
    start: Annotated[int, Query(alias="from", ge=0, description="The first plane.")] = 0,
    stop: Annotated[int | None, Query(alias="to", ge=1, description="One beyond the last plane.")] = None,
    step: Annotated[
        str,
        Query(
            pattern=r"^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4}){2}$",
            description="Every n-th plane, row and column: Z,Y,X. Large stacks are looked at in coarse steps first.",
        ),
    ] = "1,1,1",
    axis: Annotated[
        Literal["z", "y", "x"], Query(description="The axis across the planes, along which `from` and `to` count.")
    ] = "z",
) -> PlaneRange:
    """Return the range that a query states."""
    z, y, x = map(int, step.split(","))
    return PlaneRange(start, stop, (z, y, x), "zyx".index(axis))


PlaneRangeQuery = Annotated[PlaneRange, Depends(parse_range)]


async def open_volume(
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

    Raises BadParameter for planes that the volume has not, and for more than `MAX_BYTES` of them; RateLimited where
    planes for others leave no memory for these.
    """
    dtype = volume.dtype if volume.dtype.name in SENT_TYPES else np.dtype(np.float32)
    ranges = _find_ranges(volume, wanted)
    nbytes = math.prod(map(len, ranges)) * dtype.itemsize
    if nbytes > MAX_BYTES:
        raise BadParameter(f"from, to, step: more than {MAX_BYTES:,} bytes; ask for fewer planes, or larger steps.")
    if not memory.reserve(nbytes):
        raise RateLimited("Too many planes are on their way already; ask for these again.", RETRY_SECONDS)
    release = partial(memory.release, nbytes)
    try:
        planes = await run_in_thread(partial(read_planes, volume, ranges, dtype.newbyteorder("<")))
    except BaseException:
        release()
        raise
    return _PlanesResponse(volume, planes, release)


def _find_ranges(volume: Volume, wanted: PlaneRange) -> tuple[range, range, range]:
    """Return the voxels along z, y and x. Raises BadParameter for planes that the volume has not."""
    count = volume.shape[1 + wanted.axis]
    stop = count if wanted.stop is None else wanted.stop
    if not wanted.start < stop <= count:
        raise BadParameter(f"from, to: planes {wanted.start} to {stop} of {count} cannot be had.")
    whole = [range(0, size, step) for size, step in zip(volume.shape[1:], wanted.step, strict=True)]
    whole[wanted.axis] = range(wanted.start, stop, wanted.step[wanted.axis])
    z, y, x = whole
    return z, y, x


def read_planes(volume: Volume, ranges: tuple[range, range, range], dtype: np.dtype[Any]) -> Array:
    """Read every voxel of the first channel in ranges along z, y and x; [z, y, x] of this dtype. Blocks."""
    planes = np.empty(tuple(map(len, ranges)), dtype)
    rows, columns = (slice(numbers.start, numbers.stop, numbers.step) for numbers in ranges[1:])
    for place, z in enumerate(ranges[0]):
        planes[place] = volume.read(z, z + 1)[0, 0, rows, columns]
    return planes


class _PlanesResponse(Response):
    """A response with planes of a volume, which calls `release` once they are sent, or nobody takes them any more.

    They are sent in small parts: whatever waits for a slow client is then still here, and counted.
    """

    def __init__(self, volume: Volume, planes: Array, release: Callable[[], None]) -> None:
        headers = {
            "Content-Length": str(planes.nbytes),
            "X-StackSeg-Shape": _join(planes.shape),
            "X-StackSeg-Dtype": planes.dtype.name,
            "X-StackSeg-Volume": _join(volume.shape[1:]),
            # They never change under their address.
            "Cache-Control": "private, max-age=3600",
            "Vary": "Authorization, X-API-Key",
        }
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._planes, self._release = planes, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - of ASGI
        content = self._planes.reshape(-1).view(np.uint8).data
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(content), CHUNK_BYTES):
                await send(
                    {
                        "type": "http.response.body",
                        "body": bytes(content[start : start + CHUNK_BYTES]),
                        "more_body": start + CHUNK_BYTES < len(content),
                    }
                )
        finally:
            self._release()


def _join(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
