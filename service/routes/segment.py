"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path, PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi import Query as QueryParameters
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from service.metrics import Stages
from service.routes.requests import BODY, RuntimeDependency, outcome, with_fields, work_folder
from service.routes.uploads import receive
from service.runtime import Runtime
from service.schemas import Query
from service.segmenter import Result, Segmenter
from service.volume import Volume

router = APIRouter(tags=["segmentation"])

ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An OME-TIFF on the grid and with the voxel size of the input: labels or classes ZYX, "
        "probabilities CZYX.",
        "content": {"image/tiff": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "X-StackSeg-Model": {
                "description": "Name and version of the model",
                "schema": {"type": "string", "example": "nuclei/1"},
            },
            "X-StackSeg-Objects": {
                "description": "Number of objects; only with output=labels",
                "schema": {"type": "integer", "example": 87},
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

    def __init__(self, path: Path, held: AsyncExitStack, **options: Any) -> None:
        super().__init__(path, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


@router.post("/segment", response_class=FileResponse, responses=ANSWER, openapi_extra=BODY)
async def segment(
    request: Request, runtime: RuntimeDependency, query: Annotated[Query, QueryParameters()]
) -> LabelResponse:
    """Segment a 3D stack.

    Post the TIFF itself (`curl --data-binary @stack.tif`), or a form with the field `file`. Axes and voxel size are
    taken from the file; what it does not say can be stated, and what is ambiguous is refused rather than guessed.
    """
    runtime.queue.check()
    stages = Stages()
    async with AsyncExitStack() as stack:
        folder = await stack.enter_async_context(work_folder(runtime))
        with stages.measure("receive"):
            upload = await receive(request, folder, runtime.settings.limits.upload_bytes)
        query = with_fields(query, upload.fields)
        segmenter = runtime.segmenter(query.model)
        with stages.measure("read"):
            volume = await asyncio.to_thread(runtime.read, upload.path, query.selection, folder)
        result = await _segmented(request, runtime, segmenter, volume, query, stages)
        path = folder / "labels.ome.tif"
        with stages.measure("write"):
            await asyncio.to_thread(runtime.write, result.segmentation, path)
        count = result.segmentation.count
        runtime.metrics.count_segmentation(segmenter.spec.name, volume.voxels, count, stages.seconds)
        headers = _headers(segmenter, result, stages)
        return LabelResponse(
            path, stack.pop_all(), media_type="image/tiff", headers=headers, filename=_answer_name(upload.name, result)
        )


async def _segmented(  # noqa: PLR0913, PLR0917 - the stages of one request, told in one place
    request: Request, runtime: Runtime, segmenter: Segmenter, volume: Volume, query: Query, stages: Stages
) -> Result:
    """Let the worker segment the volume, and add the times of waiting and of each stage."""
    job = runtime.submit(segmenter, volume, query.options)
    result = await outcome(request, job, runtime.settings.limits.request_seconds)
    stages.add("queue", job.seconds_waited)
    stages.update(result.seconds)
    return result


def _headers(segmenter: Segmenter, result: Result, stages: Stages) -> dict[str, str]:
    seconds = {**stages.seconds, "total": stages.total}
    headers = {
        "X-StackSeg-Model": segmenter.spec.identifier,
        "Server-Timing": ", ".join(f"{name};dur={1000 * value:.1f}" for name, value in seconds.items()),
    }
    if result.segmentation.count is not None:
        headers["X-StackSeg-Objects"] = str(result.segmentation.count)
    if result.notes:
        headers["X-StackSeg-Note"] = " ".join(result.notes).encode("ascii", "replace").decode()
    return headers


def _answer_name(name: str, result: Result) -> str:
    """`embryo.ome.tif` -> `embryo_labels.ome.tif`; for the client's convenience only."""
    stem = PurePath(name or "stack").name.split(".")[0] or "stack"
    return f"{stem}_{result.segmentation.kind}.ome.tif"
