"""/annotations: keep stacks with corrected labels, to train on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path as Folder
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import TypeAdapter
from starlette.responses import FileResponse

from service.api.access.authentication import is_admin
from service.api.admission import merge_fields
from service.api.cancellation import run_while_connected
from service.api.dependencies import AsyncJobsDependency, RuntimeDependency, get_annotations, get_caller, get_stacks
from service.api.http.uploads import LABELS, Upload, is_multipart, plain_name
from service.api.request_body import ReceivedFile, incoming_folder, receive_file
from service.api.responses import describe_attachment
from service.api.schemas import AnnotationList, AnnotationReport
from service.api.threads import run_in_thread
from service.core.errors import BadParameter
from service.core.quantities import TimeRange, VoxelSize
from service.core.timing import Stages
from service.serving.jobs.jobs import AsyncJobs
from service.serving.learning.annotation import Annotation, NewAnnotation, Origin, Region, find_overlaps
from service.serving.learning.annotations import AnnotationStore
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime
from service.serving.storage.stack_store import StoredStack

router = APIRouter(tags=["learning"])

ID = "^[0-9a-f]{32}$"
AnnotationId = Annotated[str, Path(pattern=ID, description="The id of the annotated stack.")]
_BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"file": _BINARY["schema"], "labels": _BINARY["schema"]},
        "required": ["labels"],
    }
}
BODY: dict[str, Any] = {
    "requestBody": {
        "description": "Labels of the whole stack: a TIFF, or .npy [Z, Y, X], which may be within gzip; or a form with"
        " `labels` and the stack itself, `file`.",
        "required": True,
        "content": {
            "image/tiff": _BINARY,
            "application/x-npy": _BINARY,
            "application/gzip": _BINARY,
            "multipart/form-data": FORM,
        },
    }
}
TIFF: dict[int | str, dict[str, Any]] = {200: {"description": "An OME-TIFF ZYX.", "content": {"image/tiff": _BINARY}}}
_JSON = TypeAdapter(dict[str, Any])
# What a job's parameters say about the part of the stack that it has segmented.
SELECTION = ("stack", "channel", "time", "axes", "voxel_size")


@router.post("/annotations", status_code=201, openapi_extra=BODY)
async def keep(  # noqa: PLR0913
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    response: Response,
    *,
    stack: Annotated[str | None, Query(pattern=ID, description="The stack, of POST /stacks; the job's.")] = None,
    job: Annotated[str | None, Query(pattern=ID, description="The job whose labels were corrected.")] = None,
    name: Annotated[str, Query(max_length=200, description="The name of the stack if not given.")] = "",
    region: Annotated[
        str | None, Query(max_length=80, description="The corrected part, z0:z1,y0:y1,x0:x1; all if not given.")
    ] = None,
    changes: Annotated[int | None, Query(ge=0, description="Number of corrections.")] = None,
    channel: Annotated[str | None, Query(max_length=256, description="As in /segment; the job's.")] = None,
    time: Annotated[str | None, Query(max_length=32, description="As in /segment; the job's.")] = None,
    axes: Annotated[str | None, Query(max_length=16, description="As in /segment; the job's.")] = None,
    voxel_size: Annotated[str | None, Query(max_length=64, description="As in /segment; the job's.")] = None,
) -> AnnotationReport:
    """Keep a stack with corrected labels, which are the body, or with those of a form that has both.

    The stack is that of the form, else one of `POST /stacks`, read as the job has read it. It is kept until it is
    deleted.
    """
    caller, annotations = get_caller(request), get_annotations(request)
    runtime.check_admission(caller)
    await run_in_thread(partial(annotations.check_room, caller))
    given = {"stack": stack, "channel": channel, "time": time, "axes": axes, "voxel_size": voxel_size}
    stated = {key: value for key, value in given.items() if value is not None}
    parameters, origin = await run_in_thread(partial(_read_job, async_jobs, job, caller, stated, changes))
    find_stack = partial(_find_stack, request, parameters, caller)
    # A form may bring the stack, for which another must not be stated then; that of a job may be gone.
    stored = None if stack is None and is_multipart(request) else await run_in_thread(find_stack)
    folder = incoming_folder(async_jobs)
    async with receive_file(request, runtime, Parameters(), Stages(), folder, kinds=LABELS) as file:
        if file.stack is not None and stored is not None:
            raise BadParameter("stack: the form brings the stack itself; leave one of them out.")
        source = file.stack or stored
        if source is None:
            source = await run_in_thread(find_stack)
        cancelled = threading.Event()

        def work() -> Annotation:
            return _keep(runtime, annotations, file, source, parameters, cancelled, plain_name(name), region, origin)

        threads = runtime.decode_threads.of(file.space.client)
        annotation = await run_while_connected(request, run_in_thread(work, threads, cancelled))
    response.headers["Location"] = f"/annotations/{annotation.id}"
    return await _report_one(request, runtime, annotation)


@router.get("/annotations", response_model=AnnotationList)
async def list_annotations(request: Request, runtime: RuntimeDependency) -> Response:
    """The caller's annotated stacks, those of all keys for an admin, newest first."""
    annotations, caller, everyone = get_annotations(request), get_caller(request), _is_admin(request, runtime)

    def report() -> bytes:
        kept = annotations.newest(caller, everyone=everyone)
        overlaps = find_overlaps(kept)
        # There may be thousands, which take the longest as instances of a model, and as dictionaries that are all there
        # at once for the garbage collector to look through.
        parts = [_JSON.dump_json(_describe(annotation, overlaps[annotation.id])) for annotation in kept]
        return b'{"annotations":[' + b",".join(parts) + b"]}"

    return Response(await run_in_thread(report), media_type="application/json")


@router.get("/annotations/{annotation}")
async def show(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> AnnotationReport:
    """One annotated stack."""
    return await _report_one(request, runtime, await _find(request, runtime, annotation))


@router.get("/annotations/{annotation}/image", response_class=FileResponse, responses=TIFF)
async def image(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """The image of an annotated stack: the channel and the time point that were segmented."""
    found = await _find(request, runtime, annotation)
    return _send(found.image, f"{_stem(found)}.ome.tif")


@router.get("/annotations/{annotation}/labels", response_class=FileResponse, responses=TIFF)
async def labels(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """The corrected labels of an annotated stack."""
    found = await _find(request, runtime, annotation)
    return _send(found.labels, f"{_stem(found)}_labels.ome.tif")


@router.delete("/annotations/{annotation}", status_code=204)
async def delete(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> None:
    """Delete an annotated stack. Models that were trained on it stay."""
    everyone = _is_admin(request, runtime)
    await run_in_thread(partial(get_annotations(request).delete, annotation, get_caller(request), everyone=everyone))


def _is_admin(request: Request, runtime: Runtime) -> bool:
    return is_admin(request, runtime.settings.access)


async def _find(request: Request, runtime: Runtime, annotation: str) -> Annotation:
    everyone = _is_admin(request, runtime)
    find = partial(get_annotations(request).find, annotation, get_caller(request), everyone=everyone)
    return await run_in_thread(find)


def _read_job(
    async_jobs: AsyncJobs, job: str | None, caller: str | None, stated: dict[str, str], changes: int | None
) -> tuple[Parameters, Origin]:
    """Return how the stack is read, and what the labels were made of. Raises UnknownJob and BadParameter."""
    if job is None:
        parameters = merge_fields(Parameters(), stated)
        return parameters, Origin(changes=changes, time=_one_time(parameters), stack=parameters.stack)
    record = async_jobs.view(job, caller).record
    known = {key: value for key, value in record.request.parameters.items() if key in SELECTION}
    answer = record.answer
    width = None if answer is None or answer.diameter is None else answer.diameter.partition(";")[0]
    parameters = merge_fields(Parameters(), {**known, **stated})
    model = record.request.model if answer is None else answer.model
    return parameters, Origin(model, width, changes, _one_time(parameters), parameters.stack, job)


def _one_time(parameters: Parameters) -> int | None:
    """Return the time point that is stated. Raises BadParameter for several."""
    time = parameters.selection.time
    if isinstance(time, TimeRange):
        raise BadParameter("time: labels are those of one time point; say which, as in time=3.")
    return time


def _find_stack(request: Request, parameters: Parameters, caller: str | None) -> StoredStack:
    if parameters.stack is None:
        raise BadParameter(
            "stack: send a form with the stack, 'file', and the labels, 'labels'; or keep the stack with POST /stacks"
            " first, and say here which one it is."
        )
    return get_stacks(request).find(parameters.stack, caller)


def _keep(  # noqa: PLR0913, PLR0917
    runtime: Runtime,
    annotations: AnnotationStore,
    file: ReceivedFile,
    stack: StoredStack | Upload,
    parameters: Parameters,
    cancelled: threading.Event,
    name: str,
    region: str | None,
    origin: Origin,
) -> Annotation:
    """Read image and labels, and keep them, in a thread that decodes."""
    selection, reader = parameters.selection, runtime.reader
    file.complete()
    description = reader.inspect(stack.path, selection, cancelled=cancelled.is_set)
    channels, *size = description.shape
    if channels != 1:
        raise BadParameter(f"channel: the stack has {channels} channels, and labels belong to one; say which.")
    shape = (size[0], size[1], size[2])
    corrected = None if region is None else Region.parse(region, shape)
    # Of the image and of the labels, as they are read and as they are written.
    file.space.reserve(2 * (description.nbytes + 4 * description.nbytes // _itemsize(description.dtype)))
    folder: Folder = file.received.folder
    image = reader.read(stack.path, selection, folder, cancelled=cancelled.is_set)
    numbers = reader.read_labels(file.source, shape, folder, cancelled=cancelled.is_set)
    if parameters.voxel_size is None:
        _check_voxel_size(numbers.voxel_size, image.voxel_size)
    stated = NewAnnotation(name or stack.name, file.received.caller, corrected, origin)
    return annotations.keep(image, numbers, stated)


def _check_voxel_size(labels: VoxelSize | None, stack: VoxelSize | None) -> None:
    """Raise BadParameter where both files state one and these differ: then the labels may be of another stack."""
    if labels is None or stack is None or np.allclose(tuple(labels), tuple(stack), rtol=0.01, atol=0):
        return
    stated = [",".join(f"{edge:g}" for edge in size) for size in (labels, stack)]
    raise BadParameter(
        f"voxel_size: the labels say {stated[0]} micrometres (Z,Y,X) and the stack says {stated[1]}; save the labels"
        f" without one, or state which is right, as in voxel_size={stated[1]}."
    )


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


async def _report_one(request: Request, runtime: Runtime, annotation: Annotation) -> AnnotationReport:
    annotations, caller, everyone = get_annotations(request), get_caller(request), _is_admin(request, runtime)

    def report() -> AnnotationReport:
        kept = annotations.newest(caller, everyone=everyone)
        overlaps = find_overlaps([other for other in kept if other.digest == annotation.digest])
        # It may be deleted meanwhile.
        return AnnotationReport(**_describe(annotation, overlaps.get(annotation.id, ())))

    return await run_in_thread(report)


def _describe(annotation: Annotation, overlaps: Sequence[Annotation]) -> dict[str, Any]:
    """Return the content of an `AnnotationReport`."""
    origin, size = annotation.origin, annotation.voxel_size
    return {
        "id": annotation.id,
        "name": annotation.name,
        "owner": annotation.owner,
        "shape": annotation.shape,
        "voxel_size": None if size is None else (size.z, size.y, size.x),
        "region": None if annotation.region is None else str(annotation.region),
        "objects": annotation.objects,
        "base_model": origin.model,
        "diameter": origin.diameter,
        "changes": origin.changes,
        "time": origin.time,
        "stack": origin.stack,
        "job": origin.job,
        "overlaps": [other.id for other in overlaps],
        "created": datetime.fromtimestamp(annotation.created, UTC),
        "bytes": annotation.nbytes,
    }


def _stem(annotation: Annotation) -> str:
    stem = plain_name(annotation.name)
    for suffix in (".tif", ".tiff", ".ome"):
        stem = stem.removesuffix(suffix)
    return stem or annotation.id


def _send(path: Folder, name: str) -> FileResponse:
    headers = {"Cache-Control": "no-store", "Content-Disposition": describe_attachment(name)}
    return FileResponse(path, media_type="image/tiff", headers=headers)
