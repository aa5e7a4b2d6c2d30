"""Headers of responses with a result, and the description of these responses in the OpenAPI document."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any
from urllib.parse import quote

from service.api.messages.headers import BINARY_CONTENT, OCTET_STREAM
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
            "image/tiff": BINARY_CONTENT,
            # Generated clients use the first type that they support, which must not be text.
            OCTET_STREAM: BINARY_CONTENT,
            "text/csv": {"schema": {"type": "string"}},
            "application/zip": BINARY_CONTENT,
            "application/json": {"schema": SavedResult.model_json_schema()},
            "application/x-npy": BINARY_CONTENT,
            "application/x-nifti": BINARY_CONTENT,
            "application/x-ozx": BINARY_CONTENT,
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
