"""Responses with a result: OpenAPI description, headers, and a response class that releases its resources."""

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

from service.core.files.atomic_files import make_descriptor_path
from service.serving.results.answers import SavedResult
from service.serving.results.metadata import ResultMetadata

# Notes longer than this are truncated in the header `X-StackSeg-Note`.
MAX_NOTE_CHARS = 2000


def _describe_header(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string", **schema}}


RESULT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An OME-TIFF file with the voxel grid and voxel size of the input. Labels and classes have the "
        "axes ZYX, and probabilities have the axes CZYX. Results with several time points have an additional first "
        "axis T. With `measurements=csv`, the result is a table of the objects. With `measurements=zip`, the result is "
        "an archive with the labels and this table. With `output_to`, the result is written to a file on the service's "
        "host, and the response only describes that file. For labels and classes of one time point, the header "
        "`Accept` can select .npy, NIfTI or OME-Zarr (.ozx).",
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "text/csv": {"schema": {"type": "string"}},
            "application/zip": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": SavedResult.model_json_schema()},
            "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
            "application/x-nifti": {"schema": {"type": "string", "format": "binary"}},
            "application/x-ozx": {"schema": {"type": "string", "format": "binary"}},
        },
        "headers": {
            "X-StackSeg-Model": _describe_header("Name and version of the model.", example="nuclei/1"),
            "X-StackSeg-Objects": _describe_header(
                "Number of objects. Only with `output=labels`.", type="integer", example=87
            ),
            "X-StackSeg-Voxel-Size": _describe_header(
                "Voxel size along Z,Y,X in micrometers. Absent if unknown.", example="0.5,0.2,0.2"
            ),
            "X-StackSeg-Diameter": _describe_header(
                "Object diameter that was used (one value, or three values along Z,Y,X), and whether it was specified "
                "(`stated`) or `estimated`. Absent if no object diameter was used.",
                example="7,15,15px; estimated",
            ),
            "X-StackSeg-Skipped": _describe_header(
                "Number of windows that were skipped as background, and the highest gray value of background voxels. "
                "Only with `skip_below`.",
                example="312 of 480 windows; up to 120",
            ),
            "X-StackSeg-Confidence": _describe_header(
                "Confidence in the labels from 0 to 1, if the model supports it.", type="number", example=0.97
            ),
            "X-StackSeg-Warning": _describe_header(
                "JSON with the likely reason why the labels may be wrong (`detail`), and a parameter to try next "
                "(`try`). Absent if the confidence is not low.",
                example='{"type": "urn:stackseg:warning:doubtful-result", "title": "Low confidence", "detail": "The '
                'labels may be wrong: the objects seem to be 4 px wide. Try diameter=4px.", "confidence": 0.044, '
                '"try": "diameter=4px"}',
            ),
            "X-StackSeg-Note": _describe_header(
                "Notes about this result for the user, such as assumptions about the file."
            ),
            "ETag": _describe_header(
                "Identifier of the result. Results for the same file, model, parameters, settings and engine have the "
                "same identifier. Only for uploaded files.",
                example='"d1f0c3a7f11e4c8e9a541f0d0c3a7f11"',
            ),
            "X-Cache": _describe_header(
                "Whether the result comes from the cache. Only for `/segment`, if the service caches results.",
                enum=["hit", "miss"],
            ),
            "Server-Timing": _describe_header(
                "Duration of each stage in milliseconds.", example="receive;dur=12.1, read;dur=8.0, queue;dur=0.1"
            ),
        },
    }
}


class OpenFileResponse(FileResponse):
    """Response that sends an open file, even if its path is deleted in the meantime, and then closes the file."""

    def __init__(self, file: BinaryIO, media_type: str, headers: dict[str, str]) -> None:
        path, status = make_descriptor_path(file.fileno()), os.fstat(file.fileno())
        super().__init__(path, stat_result=status, media_type=media_type, headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


class ResultResponse(FileResponse):
    """Response that sends a result and then closes `resources`, even after an error.

    If the content is already in memory, it is sent directly, which saves four thread switches for a small result. In
    this case, Range headers are ignored, which is allowed because such responses are sent only for POST.
    """

    chunk_size = 2**20

    def __init__(
        self,
        path: Path,
        metadata: ResultMetadata,
        content: bytes | None = None,
        stat_result: os.stat_result | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(path, stat_result=stat_result, media_type=metadata.media_type, headers=headers)
        self.metadata = metadata
        self._content = content
        if content is not None:
            self.headers["content-length"] = str(len(content))
        self.resources = AsyncExitStack()

    def open(self) -> BinaryIO:
        """Open the result file. Write content that is only in memory to the file first. Blocks. Raises OSError."""
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
    path: Path, metadata: ResultMetadata, content: bytes | None = None, stat_result: os.stat_result | None = None
) -> ResultResponse:
    """Build the response with a result file and the metadata of the result.

    path         path of the file
    metadata     metadata to send as headers
    content      content of the file if it is in memory (only for POST)
    stat_result  result of `os.stat` for the file, if known
    """
    headers = build_headers(metadata) | {"Content-Disposition": describe_attachment(metadata.file_name)}
    return ResultResponse(path, metadata, content, stat_result, headers)


def describe_attachment(name: str) -> str:
    """Return a `Content-Disposition` header that makes all clients save the response as `name` (RFC 6266).

    `curl -J` and wget support only the quoted form. Therefore, a name that is not plain ASCII is included twice: with
    accents removed and other unsupported characters replaced with underscores, and unchanged but percent-encoded
    (RFC 8187).
    """
    characters = (char for char in unicodedata.normalize("NFKD", name) if not unicodedata.combining(char))
    ascii_name = re.sub(r'[^ -~]|["\\%]', "_", "".join(characters))
    header = f'attachment; filename="{ascii_name}"'
    return header if ascii_name == name else f"{header}; filename*=UTF-8''{quote(name, safe='')}"


def build_headers(metadata: ResultMetadata) -> dict[str, str]:
    """Build the response headers that contain the metadata of a result."""
    headers = {
        "Cache-Control": "no-store",
        "X-StackSeg-Model": metadata.model,
        "Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in metadata.seconds.items()),
    }
    if metadata.objects is not None:
        headers["X-StackSeg-Objects"] = str(metadata.objects)
    if metadata.voxel_size is not None:
        # Use the format of the parameter `voxel_size`.
        headers["X-StackSeg-Voxel-Size"] = ",".join(f"{size:.10g}" for size in metadata.voxel_size)
    if metadata.diameter is not None:
        headers["X-StackSeg-Diameter"] = metadata.diameter
    if metadata.skipped is not None:
        headers["X-StackSeg-Skipped"] = metadata.skipped
    if metadata.confidence is not None:
        headers["X-StackSeg-Confidence"] = f"{metadata.confidence:.2f}"
    if metadata.doubt is not None:
        headers["X-StackSeg-Warning"] = json.dumps(metadata.doubt)
    if metadata.notes:
        headers["X-StackSeg-Note"] = to_ascii(" ".join(metadata.notes))[:MAX_NOTE_CHARS]
    return headers


def to_ascii(text: str) -> str:
    """Replace control characters and non-ASCII characters, which a header cannot contain."""
    printable_text = "".join(char if char.isprintable() else " " for char in text.replace("µ", "u"))
    return printable_text.encode("ascii", "replace").decode()
