"""Answer with a result: its OpenAPI document, its headers, and a response that releases what the request held."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from service.serving.results.answers import Saved
from service.serving.results.metadata import AnswerMetadata

MAX_NOTE_LETTERS = 2000


def _document_header(meaning: str, **schema: Any) -> dict[str, Any]:
    return {"description": meaning, "schema": {"type": "string", **schema}}


ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An OME-TIFF on the grid and with the voxel size of the input: labels or classes ZYX, "
        "probabilities CZYX, of several time points with a first axis T. With measurements=csv a table of the objects "
        "instead, with measurements=zip both. With output_to only what was written on the service's host. Labels and "
        "classes of one time point come as .npy, NIfTI or OME-Zarr (.ozx) where Accept says so.",
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "text/csv": {"schema": {"type": "string"}},
            "application/zip": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": Saved.model_json_schema()},
            "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
            "application/x-nifti": {"schema": {"type": "string", "format": "binary"}},
            "application/x-ozx": {"schema": {"type": "string", "format": "binary"}},
        },
        "headers": {
            "X-StackSeg-Model": _document_header("Name and version of the model", example="nuclei/1"),
            "X-StackSeg-Objects": _document_header(
                "Number of objects; only with output=labels", type="integer", example=87
            ),
            "X-StackSeg-Voxel-Size": _document_header(
                "Z,Y,X in micrometres; only where it is known", example="0.5,0.2,0.2"
            ),
            "X-StackSeg-Diameter": _document_header(
                "Width of the objects, and whether it was stated or estimated; only where there is one",
                example="7,15,15px; estimated",
            ),
            "X-StackSeg-Skipped": _document_header(
                "Windows not computed as no voxel in them exceeds a grey value; only with skip_below",
                example="312 of 480 windows; up to 120",
            ),
            "X-StackSeg-Confidence": _document_header(
                "How far the labels can be trusted, 0 to 1; only where the model knows", type="number", example=0.97
            ),
            "X-StackSeg-Warning": _document_header(
                "Why the labels are not to be trusted and what to try, as JSON; only where that is so",
                example='{"type": "urn:stackseg:warning:doubtful-result", "title": "Doubtful result", "detail": "This '
                'result is doubtful (confidence 0.04): objects seem to be 4px wide; try diameter=4px.", '
                '"confidence": 0.04, "try": "diameter=4px"}',
            ),
            "X-StackSeg-Note": _document_header("What a user should know about this result"),
            "ETag": _document_header(
                "The same for the same file, model, parameters, settings and engine; for sent files",
                example='"d1f0c3a7f11e4c8e9a541f0d0c3a7f11"',
            ),
            "X-Cache": _document_header(
                "Whether an earlier result was sent again; only from /segment, where results are kept",
                enum=["hit", "miss"],
            ),
            "Server-Timing": _document_header(
                "Milliseconds per stage", example="receive;dur=12.1, read;dur=8.0, queue;dur=0.1"
            ),
        },
    }
}


class ResultResponse(FileResponse):
    """A response that sends a result and then, however that ended, closes `resources`.

    Content that is at hand is sent at once, which saves a small answer four trips to a thread and back. Such an answer
    ignores ranges: it is for POST, where no client can ask for one.
    """

    chunk_size = 2**20

    def __init__(
        self,
        path: Path,
        metadata: AnswerMetadata,
        content: bytes | None = None,
        status: os.stat_result | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(path, stat_result=status, media_type=metadata.media_type, headers=headers)
        self.metadata = metadata
        self._content = content
        if content is not None:
            self.headers["content-length"] = str(len(content))
        self.resources = AsyncExitStack()

    def open(self) -> BinaryIO:
        """Open the file, which is written first where its content is at hand. Blocks. Raises OSError."""
        path = Path(self.path)
        if self._content is not None:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(self._content)
        return path.open("rb")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.resources:
            if self._content is None:
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._content})


def build_response(
    path: Path, metadata: AnswerMetadata, content: bytes | None = None, status: os.stat_result | None = None
) -> ResultResponse:
    """Return the response with a file and its metadata; for answers to POST, with its content and status if known."""
    headers = build_headers(metadata) | {"Content-Disposition": describe_attachment(metadata.file_name)}
    return ResultResponse(path, metadata, content, status, headers)


def describe_attachment(name: str) -> str:
    """Return a `Content-Disposition` under which any client saves an answer by a name (RFC 6266).

    `curl -J` and wget know the quoted form alone, so a name that is not plain ASCII is stated twice: without accents
    and with underscores for what a quoted name cannot hold, and as it is, percent-encoded (RFC 8187).
    """
    letters = (letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    plain = re.sub(r'[^ -~]|["\\%]', "_", "".join(letters))
    header = f'attachment; filename="{plain}"'
    return header if plain == name else f"{header}; filename*=UTF-8''{quote(name, safe='')}"


def build_headers(metadata: AnswerMetadata) -> dict[str, str]:
    """Return the headers with the metadata of a result."""
    headers = {
        "Cache-Control": "no-store",
        "X-StackSeg-Model": metadata.model,
        "Server-Timing": ", ".join(f"{name};dur={1000 * value:.1f}" for name, value in metadata.seconds.items()),
    }
    if metadata.objects is not None:
        headers["X-StackSeg-Objects"] = str(metadata.objects)
    if metadata.voxel_size is not None:
        # In the form of the parameter `voxel_size`.
        headers["X-StackSeg-Voxel-Size"] = ",".join(f"{edge:.10g}" for edge in metadata.voxel_size)
    if metadata.diameter is not None:
        headers["X-StackSeg-Diameter"] = metadata.diameter
    if metadata.skipped is not None:
        headers["X-StackSeg-Skipped"] = metadata.skipped
    if metadata.confidence is not None:
        headers["X-StackSeg-Confidence"] = f"{metadata.confidence:.2f}"
    if metadata.doubt is not None:
        headers["X-StackSeg-Warning"] = json.dumps(metadata.doubt)
    if metadata.notes:
        headers["X-StackSeg-Note"] = to_ascii(" ".join(metadata.notes))[:MAX_NOTE_LETTERS]
    return headers


def to_ascii(text: str) -> str:
    """Replace what a header cannot carry: control characters, and letters beyond ASCII."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text.replace("µ", "u"))
    return printable.encode("ascii", "replace").decode()
