"""Requests for planes of a volume, and answers with them as raw numbers, for canvases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.core.types import Array, Selection
from service.serving.results.planes import MAX_BYTES, SENT_TYPES, PlaneRange

CHUNK_BYTES = 2**20

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


def parse_selection(
    channel: Annotated[int, Query(ge=0, description="Channel to look at.")] = 0,
    time: Annotated[int | None, Query(ge=0, description="Time point; the only one if not given.")] = None,
    axes: Annotated[str | None, Query(max_length=16, description="Overrides the axes of the file.")] = None,
) -> Selection:
    """Return the part of the file that a query states."""
    return Selection(channel, time, axes.upper() if axes else None)


SelectionQuery = Annotated[Selection, Depends(parse_selection)]


class PlanesResponse(Response):
    """A response with planes of a volume, which calls `release` once they are sent, or nobody takes them any more.

    They are sent in small parts: whatever waits for a slow client is then still here, and counted. `whole` has the
    planes, rows and columns of the volume.
    """

    def __init__(self, whole: tuple[int, ...], planes: Array, release: Callable[[], None]) -> None:
        headers = {
            "Content-Length": str(planes.nbytes),
            "X-StackSeg-Shape": _join(planes.shape),
            "X-StackSeg-Dtype": planes.dtype.name,
            "X-StackSeg-Volume": _join(whole),
            # They never change under their address.
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


def _join(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
