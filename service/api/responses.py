"""An answer with pixels: the document of it, its headers, and the response that lets go of what it held."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from service.core.volume import VoxelSize
from service.serving.job_record import AnswerMetadata
from service.serving.results import Saved

NOTE_LETTERS = 2000

# Up to so many bytes an answer is in memory while it is sent.
SMALL_BYTES = 2**20

ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An OME-TIFF on the grid and with the voxel size of the input: labels or classes ZYX, "
        "probabilities CZYX. With measurements=csv a table of the objects instead, with measurements=zip both. With "
        "output_to only what was written on the service's host.",
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "text/csv": {"schema": {"type": "string"}},
            "application/zip": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": Saved.model_json_schema()},
        },
        "headers": {
            "X-StackSeg-Model": {
                "description": "Name and version of the model",
                "schema": {"type": "string", "example": "nuclei/1"},
            },
            "X-StackSeg-Objects": {
                "description": "Number of objects; only with output=labels",
                "schema": {"type": "integer", "example": 87},
            },
            "X-StackSeg-Voxel-Size": {
                "description": "Z,Y,X in micrometres; only where it is known",
                "schema": {"type": "string", "example": "0.5,0.2,0.2"},
            },
            "X-StackSeg-Diameter": {
                "description": "Width of the objects, and whether it was stated or estimated; only where there is one",
                "schema": {"type": "string", "example": "7,15,15px; estimated"},
            },
            "X-StackSeg-Skipped": {
                "description": "Windows not computed as no voxel in them exceeds a grey value; only with skip_below",
                "schema": {"type": "string", "example": "312 of 480 windows; up to 120"},
            },
            "X-StackSeg-Note": {
                "description": "What a user should know about this result",
                "schema": {"type": "string"},
            },
            "ETag": {
                "description": "The same for the same file, model, parameters, settings and engine; for sent files",
                "schema": {"type": "string", "example": '"d1f0c3a7f11e4c8e9a541f0d0c3a7f11"'},
            },
            "X-Cache": {
                "description": "Whether an earlier result was sent again; only from /segment, where results are kept",
                "schema": {"type": "string", "enum": ["hit", "miss"]},
            },
            "Server-Timing": {
                "description": "Milliseconds per stage",
                "schema": {"type": "string", "example": "receive;dur=12.1, read;dur=8.0, queue;dur=0.1"},
            },
        },
    }
}


class Found(NamedTuple):
    """What was found of a file in a thread: its status, and its bytes where they are few; or the bytes of none."""

    status: os.stat_result | None
    content: bytes | None

    @classmethod
    def at(cls, path: Path) -> Self:
        """Raises OSError."""
        status = path.stat()
        return cls(status, path.read_bytes() if status.st_size <= SMALL_BYTES else None)


class LabelResponse(FileResponse):
    """Streams the result and then, however that ended, lets go of everything the request held.

    With its bytes at hand they are sent at once, which spares a small answer four ways to a thread and back. That is
    for answers to POST, of which nobody can ask for a range.
    """

    chunk_size = 2**20

    def __init__(self, path: Path, found: Found | None = None, **options: Any) -> None:
        super().__init__(path, stat_result=found and found.status, **options)
        self._content = found and found.content
        if self._content is not None:
            self.headers["content-length"] = str(len(self._content))
        self.held = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held:
            if self._content is None:
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._content})


def respond(path: Path, outcome: AnswerMetadata, found: Found | None = None, **headers: str) -> LabelResponse:
    """The file with all that is told beside it; `found` for answers to POST."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return LabelResponse(
        path, found, media_type=outcome.media_type, headers=headers_of(outcome) | named, filename=outcome.file_name
    )


def opened(file: BinaryIO) -> Path:
    """A path to an open file, which leads to it though its name may be gone by then."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def headers_of(outcome: AnswerMetadata) -> dict[str, str]:
    """What the answer says beside the pixels."""
    headers = {
        "Cache-Control": "no-store",
        "X-StackSeg-Model": outcome.model,
        "Server-Timing": ", ".join(f"{name};dur={1000 * value:.1f}" for name, value in outcome.seconds.items()),
    }
    if outcome.objects is not None:
        headers["X-StackSeg-Objects"] = str(outcome.objects)
    if outcome.voxel_size is not None:
        headers["X-StackSeg-Voxel-Size"] = written(outcome.voxel_size)
    if outcome.diameter is not None:
        headers["X-StackSeg-Diameter"] = outcome.diameter
    if outcome.skipped is not None:
        headers["X-StackSeg-Skipped"] = outcome.skipped
    if outcome.notes:
        headers["X-StackSeg-Note"] = in_ascii(" ".join(outcome.notes))[:NOTE_LETTERS]
    return headers


def written(size: VoxelSize) -> str:
    """As the parameter `voxel_size` takes it."""
    return ",".join(f"{edge:.10g}" for edge in size)


def in_ascii(text: str) -> str:
    """Without what a header cannot carry: control characters, and letters beyond ASCII."""
    return (
        "".join(letter if letter.isprintable() else " " for letter in text.replace("µ", "u"))
        .encode("ascii", "replace")
        .decode()
    )
