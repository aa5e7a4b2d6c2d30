"""Requests for planes of a volume, and responses with their raw pixel values, for display in a viewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.core.types import Array, Selection
from service.serving.results.planes import MAX_PLANE_BYTES, PLANE_DTYPES, PlaneRange

# Size of the parts in which planes are sent.
CHUNK_BYTES = 2**20

PLANES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Pixel values in C order (z, y, x), little-endian. At most"
        f" {MAX_PLANE_BYTES >> 20} MiB per response; use a larger `step` or fewer planes for more.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "X-StackSeg-Shape": {
                "description": "Number of planes, rows and columns in this response",
                "schema": {"type": "string", "example": "16,512,512"},
            },
            "X-StackSeg-Dtype": {
                "description": "Data type of the pixel values",
                "schema": {"type": "string", "enum": sorted(PLANE_DTYPES)},
            },
            "X-StackSeg-Volume": {
                "description": "Number of planes, rows and columns of the whole volume",
                "schema": {"type": "string", "example": "64,2048,2048"},
            },
        },
    }
}


def parse_plane_range(
    start: Annotated[int, Query(alias="from", ge=0, description="Index of the first plane, counted from 0.")] = 0,
    stop: Annotated[
        int | None, Query(alias="to", ge=1, description="Index after the last plane; by default the end of the axis.")
    ] = None,
    step: Annotated[
        str,
        Query(
            pattern=r"^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4}){2}$",
            description="Step along Z,Y,X: return every n-th plane, row and column. Use large steps for a preview of a"
            " large stack.",
        ),
    ] = "1,1,1",
    axis: Annotated[
        Literal["z", "y", "x"], Query(description="Axis perpendicular to the planes. `from` and `to` are along it.")
    ] = "z",
) -> PlaneRange:
    """Return the range of planes that the query parameters select."""
    z, y, x = map(int, step.split(","))
    return PlaneRange(start, stop, (z, y, x), "zyx".index(axis))


PlaneRangeQuery = Annotated[PlaneRange, Depends(parse_plane_range)]


def parse_selection(
    channel: Annotated[int, Query(ge=0, description="Index of the channel, counted from 0.")] = 0,
    time: Annotated[
        int | None,
        Query(ge=0, description="Index of the time point, counted from 0. Required if the stack has several."),
    ] = None,
    axes: Annotated[
        str | None, Query(max_length=16, description="Axes of the file, such as TZCYX. Overrides its metadata.")
    ] = None,
) -> Selection:
    """Return the part of the file that the query parameters select."""
    return Selection(channel, time, axes.upper() if axes else None)


SelectionQuery = Annotated[Selection, Depends(parse_selection)]


class PlanesResponse(Response):
    """A response with planes of a volume. It calls `release` when they have been sent or the client has disconnected.

    The planes are sent in small parts, so that data waiting for a slow client stays in `planes` and in the memory
    budget. `volume_shape` is the number of planes, rows and columns of the volume.
    """

    def __init__(self, volume_shape: tuple[int, ...], planes: Array, release: Callable[[], None]) -> None:
        headers = {
            "Content-Length": str(planes.nbytes),
            "X-StackSeg-Shape": _format_shape(planes.shape),
            "X-StackSeg-Dtype": planes.dtype.name,
            "X-StackSeg-Volume": _format_shape(volume_shape),
            # The planes at a URL never change.
            "Cache-Control": "private, max-age=3600",
            "Vary": "Authorization, X-API-Key",
        }
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._planes, self._release = planes, release

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
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


def _format_shape(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
