"""Requests for planes of a volume, and responses with the raw pixel values of the planes, for display in a viewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.messages.headers import set_send_timeout
from service.core.types import Array, Selection
from service.serving.parameters import DecimalInteger
from service.serving.results.planes import MAX_PLANE_BYTES, PLANE_DTYPES, PlaneRange

# Clients that receive planes more slowly than this are disconnected, because planes occupy memory until they are sent.
MIN_BYTES_PER_SECOND = 2**18
# Time allowed for each response in addition to the time that follows from its size.
BASE_SEND_SECONDS = 10.0
# Size of the chunks in which planes are sent.
CHUNK_BYTES = 2**20

PLANES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Little-endian pixel values in C order (z, y, x). A response contains at most"
        f" {MAX_PLANE_BYTES >> 20} MiB. Use a larger `step` or several requests for larger volumes.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "X-StackSeg-Shape": {
                "description": "Number of planes, rows and columns in this response.",
                "schema": {"type": "string", "example": "16,512,512"},
            },
            "X-StackSeg-Dtype": {
                "description": "Data type of the pixel values.",
                "schema": {"type": "string", "enum": sorted(PLANE_DTYPES)},
            },
            "X-StackSeg-Volume": {
                "description": "Number of planes, rows and columns in the whole volume.",
                "schema": {"type": "string", "example": "64,2048,2048"},
            },
        },
    }
}


def parse_plane_range(
    start: Annotated[DecimalInteger, Query(alias="from", ge=0, description="Zero-based index of the first plane.")] = 0,
    stop: Annotated[
        DecimalInteger | None,
        Query(alias="to", ge=1, description="Index after the last plane. Default: the end of the axis."),
    ] = None,
    step: Annotated[
        str,
        Query(
            pattern=r"^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4}){2}$",
            description="Steps along Z,Y,X. A step of n returns only every nth plane, row or column. Use large steps"
            " for a preview of a large stack.",
        ),
    ] = "1,1,1",
    axis: Annotated[
        Literal["z", "y", "x"],
        Query(description="Axis perpendicular to the planes. `from` and `to` are indices along this axis."),
    ] = "z",
) -> PlaneRange:
    """Parse the query parameters that select a range of planes."""
    z, y, x = map(int, step.split(","))
    return PlaneRange(start, stop, (z, y, x), "zyx".index(axis))


PlaneRangeQuery = Annotated[PlaneRange, Depends(parse_plane_range)]


def parse_selection(
    channel: Annotated[DecimalInteger, Query(ge=0, description="Zero-based index of the channel.")] = 0,
    scene: Annotated[
        DecimalInteger | None, Query(ge=0, description="Zero-based index of the image in a file with several images.")
    ] = None,
    time: Annotated[
        DecimalInteger | None,
        Query(ge=0, description="Zero-based index of the time point. Required if the stack has several time points."),
    ] = None,
    axes: Annotated[
        str | None,
        Query(
            max_length=16, description="Axes of the stored array, such as TZCYX. Overrides the metadata of the file."
        ),
    ] = None,
    allow_incomplete: Annotated[
        bool | None, Query(description="Whether to read a file that has fewer planes than its metadata declares.")
    ] = None,
) -> Selection:
    """Parse the query parameters that select the part of the file to read."""
    return Selection(
        channel, time, axes.upper() if axes else None, allow_incomplete=bool(allow_incomplete), scene=scene
    )


SelectionQuery = Annotated[Selection, Depends(parse_selection)]


class PlanesResponse(Response):
    """Response with planes of a volume, in chunks that are small enough to limit the memory used by slow clients.

    volume_shape  number of planes, rows and columns in the whole volume
    planes        pixel values to send
    release       function to call when the planes have been sent or the client has disconnected
    """

    def __init__(self, volume_shape: tuple[int, ...], planes: Array, release: Callable[[], None]) -> None:
        headers = {
            "Content-Length": str(planes.nbytes),
            "X-StackSeg-Shape": _format_shape(planes.shape),
            "X-StackSeg-Dtype": planes.dtype.name,
            "X-StackSeg-Volume": _format_shape(volume_shape),
            # The pixel values at a URL never change.
            "Cache-Control": "private, max-age=3600",
            "Vary": "Authorization, X-API-Key",
        }
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._planes, self._release = planes, release

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        content = self._planes.reshape(-1).view(np.uint8).data
        set_send_timeout(scope, BASE_SEND_SECONDS + len(content) / MIN_BYTES_PER_SECOND)
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
