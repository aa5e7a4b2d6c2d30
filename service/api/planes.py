"""Planes of a volume as raw numbers, for canvases: a range of planes, every n-th voxel, and a bounded size."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Depends, Query, Request
from starlette.responses import Response

from service.api.cancellation import run_while_connected
from service.api.dependencies import get_client
from service.api.threads import run_in_thread
from service.core.errors import BadParameter
from service.core.volume import Array, Volume
from service.formats.sandbox_process import Cancelling
from service.serving.runtime import Runtime
from service.serving.scratch import translate_disk_faults

MAX_BYTES = 2**25
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
    """Planes `start` to `stop` (None: the last) of a volume in steps, along (z, y, x)."""

    start: int
    stop: int | None
    step: tuple[int, int, int]


def parse_range(
    start: Annotated[int, Query(alias="from", ge=0, description="The first plane.")] = 0,
    stop: Annotated[int | None, Query(alias="to", ge=1, description="One beyond the last plane.")] = None,
    step: Annotated[
        str,
        Query(
            pattern=r"^[1-9]\d{0,4}(,[1-9]\d{0,4}){2}$",
            description="Every n-th plane, row and column: Z,Y,X. Large stacks are looked at in coarse steps first.",
        ),
    ] = "1,1,1",
) -> PlaneRange:
    """Return the range that a query states."""
    z, y, x = map(int, step.split(","))
    return PlaneRange(start, stop, (z, y, x))


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


def read_planes(volume: Volume, wanted: PlaneRange) -> Array:
    """Read planes of the first channel, [z, y, x] little-endian. Blocks.

    Raises BadParameter for planes that the volume has not, and for more than `MAX_BYTES` of them.
    """
    depth = volume.shape[1]
    stop = depth if wanted.stop is None else wanted.stop
    if not wanted.start < stop <= depth:
        raise BadParameter(f"from, to: planes {wanted.start} to {stop} of {depth} cannot be had.")
    numbers = range(wanted.start, stop, wanted.step[0])
    shape = (len(numbers), *(-(-size // step) for size, step in zip(volume.shape[2:], wanted.step[1:], strict=True)))
    sent = volume.dtype if volume.dtype.name in SENT_TYPES else np.dtype(np.float32)
    if math.prod(shape) * sent.itemsize > MAX_BYTES:
        raise BadParameter(f"from, to, step: more than {MAX_BYTES:,} bytes; ask for fewer planes, or larger steps.")
    planes = np.empty(shape, sent.newbyteorder("<"))
    for place, z in enumerate(numbers):
        planes[place] = volume.read(z, z + 1)[0, 0, :: wanted.step[1], :: wanted.step[2]]
    return planes


def planes_response(volume: Volume, planes: Array) -> Response:
    """Return planes of a volume as a response."""
    headers = {
        "X-StackSeg-Shape": _join(planes.shape),
        "X-StackSeg-Dtype": planes.dtype.name,
        "X-StackSeg-Volume": _join(volume.shape[1:]),
        # They never change under their address.
        "Cache-Control": "private, max-age=3600",
        "Vary": "Authorization, X-API-Key",
    }
    return Response(planes.tobytes(), media_type="application/octet-stream", headers=headers)


def _join(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
