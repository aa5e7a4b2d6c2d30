"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from service.errors import Cancelled, NotReady
from service.jobs import Job
from service.metrics import Stages
from service.routes.answers import write_answer
from service.routes.requests import BODY, AdmittedQuery, RuntimeDependency, check_output, posted, while_connected
from service.routes.threads import in_thread
from service.routes.uploads import Upload
from service.runtime import Runtime
from service.schemas import Query
from service.segmenter import Result
from service.volume import VoxelSize

router = APIRouter(tags=["segmentation"])

NOTE_LETTERS = 2000

ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An OME-TIFF on the grid and with the voxel size of the input: labels or classes ZYX, "
        "probabilities CZYX. With measurements=csv a table of the objects instead, with measurements=zip both.",
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "text/csv": {"schema": {"type": "string"}},
            "application/zip": {"schema": {"type": "string", "format": "binary"}},
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
            "X-StackSeg-Note": {
                "description": "What a user should know about this result",
                "schema": {"type": "string"},
            },
            "Server-Timing": {
                "description": "Milliseconds per stage",
                "schema": {"type": "string", "example": "receive;dur=12.1, read;dur=8.0, queue;dur=0.1"},
            },
        },
    }
}


class LabelResponse(FileResponse):
    """Streams the result and then, however that ended, lets go of everything the request held."""

    chunk_size = 2**20

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.held = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held:
            await super().__call__(scope, receive, send)


@router.post("/segment", response_class=FileResponse, responses=ANSWER, openapi_extra=BODY)
async def segment(request: Request, runtime: RuntimeDependency, query: AdmittedQuery) -> LabelResponse:
    """Segment a 3D stack.

    Post the TIFF itself (`curl --data-binary @stack.tif`), or a form with the field `file`. Axes and voxel size are
    taken from the file; what it does not say can be stated, and what is ambiguous is refused rather than guessed.
    """
    stages = Stages()
    async with posted(request, runtime, query, stages) as arrived:
        response = await while_connected(request, _answer(runtime, arrived.query, arrived.upload, stages))
        response.held = arrived.keep()
        return response


async def _answer(runtime: Runtime, query: Query, upload: Upload, stages: Stages) -> LabelResponse:
    """Everything after the upload: read, wait for the device, segment, write."""
    segmenter = check_output(runtime, query)
    with stages.measure("read"):
        read = partial(runtime.read, upload.path, query.selection, upload.path.parent)
        volume = await in_thread(read, runtime.readers)
    result = await _finished(runtime.submit(segmenter, volume, query.options), stages)
    answer = await write_answer(runtime, query, upload.path, volume, result.segmentation)
    stages.update(answer.seconds)
    count = result.segmentation.count
    runtime.metrics.count_segmentation(segmenter.spec.name, volume.voxels, count, stages.seconds)
    return LabelResponse(
        answer.path,
        media_type=answer.media_type,
        headers=headers_of(segmenter.spec.identifier, result, stages),
        filename=answer_name(upload.name, answer.suffix),
    )


async def _finished(job: Job[Result], stages: Stages) -> Result:
    """The job's result; adds the times of waiting and of each stage. The job is cancelled when the caller is."""
    stopped = NotReady("The service stopped before the request was finished; send it again.")
    try:
        result = await asyncio.wrap_future(job.future)
    except Cancelled:
        raise stopped from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise stopped from None
    finally:
        job.cancel()
    stages.add("queue", job.seconds_waited)
    stages.update(result.seconds)
    return result


def headers_of(model: str, result: Result, stages: Stages) -> dict[str, str]:
    """What the answer says beside the pixels."""
    seconds = {**stages.seconds, "total": stages.total}
    headers = {
        "Cache-Control": "no-store",
        "X-StackSeg-Model": model,
        "Server-Timing": ", ".join(f"{name};dur={1000 * value:.1f}" for name, value in seconds.items()),
    }
    if result.segmentation.count is not None:
        headers["X-StackSeg-Objects"] = str(result.segmentation.count)
    if result.segmentation.voxel_size is not None:
        headers["X-StackSeg-Voxel-Size"] = written(result.segmentation.voxel_size)
    if result.notes:
        headers["X-StackSeg-Note"] = in_ascii(" ".join(result.notes))[:NOTE_LETTERS]
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


def answer_name(name: str, suffix: str) -> str:
    """`embryo.ome.tif` -> `embryo_labels.ome.tif`; for the client's convenience only."""
    stem = re.sub(r"(\.ome)?\.tiff?$", "", name, flags=re.IGNORECASE) or "stack"
    return stem + suffix
