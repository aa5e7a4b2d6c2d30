"""/annotations: keep stacks with corrected labels, to train on."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path as Folder
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import TypeAdapter
from starlette.responses import FileResponse

from service.api.access.authentication import is_admin
from service.api.dependencies import AsyncJobsDependency, RuntimeDependency, get_annotations, get_caller, get_stacks
from service.api.http.media_types import LABELS
from service.api.http.uploads import is_multipart, plain_name
from service.api.http.waiting import run_while_connected
from service.api.messages.learning import (
    ANNOTATION_FILE,
    CORRECTION_BODY,
    ID_PATTERN,
    AnnotationList,
    AnnotationReport,
    CorrectionQuery,
    describe_annotation,
)
from service.api.messages.results import describe_attachment
from service.api.requests.admission import merge_fields
from service.api.requests.body import incoming_folder, receive_file
from service.core.errors import BadParameter
from service.core.quantities import TimeRange
from service.serving.jobs.jobs import AsyncJobs
from service.serving.learning.annotation import Annotation, Origin, find_overlaps
from service.serving.learning.corrections import Correction, keep_correction
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime
from service.serving.storage.stack_store import StoredStack
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["learning"])

AnnotationId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of the annotated stack.")]
_JSON = TypeAdapter(dict[str, Any])
# What a job's parameters say about the part of the stack that it has segmented.
SELECTION = ("stack", "channel", "time", "axes", "voxel_size")


@router.post("/annotations", status_code=201, openapi_extra=CORRECTION_BODY)
async def keep(
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    response: Response,
    query: Annotated[CorrectionQuery, Query()],
) -> AnnotationReport:
    """Keep a stack with corrected labels, which are the body, or with those of a form that has both.

    The stack is that of the form, else one of `POST /stacks`, read as the job has read it. It is kept until it is
    deleted.
    """
    caller, annotations = get_caller(request), get_annotations(request)
    runtime.check_admission(caller)
    await run_in_thread(partial(annotations.check_room, caller))
    parameters, origin = await run_in_thread(partial(_read_origin, async_jobs, query, caller))
    find_stack = partial(_find_stack, request, parameters, caller)
    # A form may bring the stack, for which another must not be stated then; that of a job may be gone.
    stored = None if query.stack is None and is_multipart(request) else await run_in_thread(find_stack)
    async with receive_file(request, Parameters(), incoming_folder(async_jobs), kinds=LABELS) as file:
        if file.stack is not None and stored is not None:
            raise BadParameter("stack: the form brings the stack itself; leave one of them out.", parameter="stack")
        stack = file.stack or stored
        if stack is None:
            stack = await run_in_thread(find_stack)
        cancelled = threading.Event()

        def work() -> Annotation:
            file.complete()
            name, received = plain_name(query.name) or stack.name, file.received
            places = parameters.selection, query.region, name, received.caller, origin, received.folder
            correction = Correction(stack.path, file.source, *places)
            return keep_correction(runtime.reader, annotations, correction, file.space, cancelled.is_set)

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
        parts = [_JSON.dump_json(describe_annotation(annotation, overlaps[annotation.id])) for annotation in kept]
        return b'{"annotations":[' + b",".join(parts) + b"]}"

    return Response(await run_in_thread(report), media_type="application/json")


@router.get("/annotations/{annotation}")
async def show(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> AnnotationReport:
    """One annotated stack."""
    return await _report_one(request, runtime, await _find(request, runtime, annotation))


@router.get("/annotations/{annotation}/image", response_class=FileResponse, responses=ANNOTATION_FILE)
async def image(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """The image of an annotated stack: the channel and the time point that were segmented."""
    found = await _find(request, runtime, annotation)
    return _send(found.image, f"{_stem(found)}.ome.tif")


@router.get("/annotations/{annotation}/labels", response_class=FileResponse, responses=ANNOTATION_FILE)
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


def _read_origin(async_jobs: AsyncJobs, query: CorrectionQuery, caller: str | None) -> tuple[Parameters, Origin]:
    """Return how the stack is read, and what the labels were made of. Raises UnknownJob and BadParameter."""
    stated = query.model_dump(include=set(SELECTION), exclude_none=True)
    if query.job is None:
        parameters = merge_fields(Parameters(), stated)
        return parameters, Origin(changes=query.changes, time=_one_time(parameters), stack=parameters.stack)
    record = async_jobs.view(query.job, caller).record
    known = {key: value for key, value in record.request.parameters.items() if key in SELECTION}
    answer = record.answer
    diameter = None if answer is None or answer.diameter is None else answer.diameter.partition(";")[0]
    parameters = merge_fields(Parameters(), {**known, **stated})
    model = record.request.model if answer is None else answer.model
    return parameters, Origin(model, diameter, query.changes, _one_time(parameters), parameters.stack, query.job)


def _one_time(parameters: Parameters) -> int | None:
    """Return the time point that is stated. Raises BadParameter for several."""
    time = parameters.selection.time
    if isinstance(time, TimeRange):
        raise BadParameter("time: labels are those of one time point; say which, as in time=3.", parameter="time")
    return time


def _find_stack(request: Request, parameters: Parameters, caller: str | None) -> StoredStack:
    if parameters.stack is None:
        raise BadParameter(
            "stack: send a form with the stack, 'file', and the labels, 'labels'; or keep the stack with POST /stacks"
            " first, and say here which one it is.",
            parameter="stack",
        )
    return get_stacks(request).find(parameters.stack, caller)


async def _report_one(request: Request, runtime: Runtime, annotation: Annotation) -> AnnotationReport:
    annotations, caller, everyone = get_annotations(request), get_caller(request), _is_admin(request, runtime)

    def report() -> AnnotationReport:
        kept = annotations.newest(caller, everyone=everyone)
        overlaps = find_overlaps([other for other in kept if other.digest == annotation.digest])
        # It may be deleted meanwhile.
        return AnnotationReport(**describe_annotation(annotation, overlaps.get(annotation.id, ())))

    return await run_in_thread(report)


def _stem(annotation: Annotation) -> str:
    stem = plain_name(annotation.name)
    for suffix in (".tif", ".tiff", ".ome"):
        stem = stem.removesuffix(suffix)
    return stem or annotation.id


def _send(path: Folder, name: str) -> FileResponse:
    headers = {"Cache-Control": "no-store", "Content-Disposition": describe_attachment(name)}
    return FileResponse(path, media_type="image/tiff", headers=headers)
