"""/annotations: store stacks with corrected labels, for training."""

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
from service.api.http.media_types import LABELS_BODY
from service.api.http.uploads import is_multipart, sanitize_file_name
from service.api.http.waiting import run_while_connected
from service.api.messages.learning import (
    ANNOTATION_FILE_RESPONSES,
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
from service.serving.jobs.jobs import JobManager
from service.serving.learning.annotation import Annotation, LabelProvenance, find_overlaps
from service.serving.learning.corrections import Correction, store_correction
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime
from service.serving.storage.stack_store import StoredStack
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["learning"])

AnnotationId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of the annotated stack.")]
_JSON = TypeAdapter(dict[str, Any])
# Parameters of a job that select the part of the stack that it segments.
SELECTION_PARAMETERS = ("stack", "channel", "time", "axes", "voxel_size")


@router.post("/annotations", status_code=201, openapi_extra=CORRECTION_BODY)
async def keep(
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    response: Response,
    query: Annotated[CorrectionQuery, Query()],
) -> AnnotationReport:
    """Store a stack with corrected labels, for training.

    Send the labels as the body and select a stack uploaded with `POST /stacks`, or send a form with the labels and the
    stack. If `job` is given, the stack is read with the parameters of this job. The annotated stack is stored until it
    is deleted.
    """
    caller, annotations = get_caller(request), get_annotations(request)
    runtime.check_admission(caller)
    await run_in_thread(partial(annotations.check_space, caller))
    parameters, provenance = await run_in_thread(partial(_read_provenance, async_jobs, query, caller))
    find_stack = partial(_find_stack, request, parameters, caller)
    # A form may contain the stack, and the request must not select another one then. That of the job may be deleted.
    stored = None if query.stack is None and is_multipart(request) else await run_in_thread(find_stack)
    async with receive_file(request, Parameters(), incoming_folder(async_jobs), body_format=LABELS_BODY) as file:
        if file.stack is not None and stored is not None:
            raise BadParameter(
                "stack: the form contains a stack, and the request also selects an uploaded one. Send only one.",
                parameter="stack",
            )
        stack = file.stack or stored
        if stack is None:
            stack = await run_in_thread(find_stack)
        cancelled = threading.Event()

        def store() -> Annotation:
            file.complete()
            name, received = sanitize_file_name(query.name) or stack.name, file.request
            members = parameters.selection, query.region, name, received.caller, provenance, received.folder
            correction = Correction(stack.path, file.source, *members)
            return store_correction(runtime.reader, annotations, correction, file.space, cancelled.is_set)

        threads = runtime.decode_threads.for_client(file.space.client)
        annotation = await run_while_connected(request, run_in_thread(store, threads, cancelled))
    response.headers["Location"] = f"/annotations/{annotation.id}"
    return await _report_one(request, runtime, annotation)


@router.get("/annotations", response_model=AnnotationList)
async def list_annotations(request: Request, runtime: RuntimeDependency) -> Response:
    """List the caller's annotated stacks, newest first.

    Admins see the annotated stacks of all API keys.
    """
    annotations, caller, everyone = get_annotations(request), get_caller(request), _is_admin(request, runtime)

    def report() -> bytes:
        found = annotations.list_newest(caller, is_admin=everyone)
        overlaps = find_overlaps(found)
        # Serialize one dictionary at a time. With thousands of annotated stacks, creating pydantic models is slow, and
        # so is the garbage collection of many dictionaries that exist at the same time.
        parts = [_JSON.dump_json(describe_annotation(annotation, overlaps[annotation.id])) for annotation in found]
        return b'{"annotations":[' + b",".join(parts) + b"]}"

    return Response(await run_in_thread(report), media_type="application/json")


@router.get("/annotations/{annotation}")
async def show(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> AnnotationReport:
    """Get an annotated stack."""
    return await _report_one(request, runtime, await _find(request, runtime, annotation))


@router.get("/annotations/{annotation}/image", response_class=FileResponse, responses=ANNOTATION_FILE_RESPONSES)
async def image(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """Download the image of an annotated stack.

    It has only the channel and the time point that were segmented.
    """
    found = await _find(request, runtime, annotation)
    return _send(found.image, f"{_stem(found)}.ome.tif")


@router.get("/annotations/{annotation}/labels", response_class=FileResponse, responses=ANNOTATION_FILE_RESPONSES)
async def labels(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """Download the corrected labels of an annotated stack."""
    found = await _find(request, runtime, annotation)
    return _send(found.labels, f"{_stem(found)}_labels.ome.tif")


@router.delete("/annotations/{annotation}", status_code=204)
async def delete(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> None:
    """Delete an annotated stack.

    Models that were trained on it are kept.
    """
    everyone = _is_admin(request, runtime)
    await run_in_thread(partial(get_annotations(request).delete, annotation, get_caller(request), is_admin=everyone))


def _is_admin(request: Request, runtime: Runtime) -> bool:
    return is_admin(request, runtime.settings.access)


async def _find(request: Request, runtime: Runtime, annotation: str) -> Annotation:
    everyone = _is_admin(request, runtime)
    find = partial(get_annotations(request).find, annotation, get_caller(request), is_admin=everyone)
    return await run_in_thread(find)


def _read_provenance(
    async_jobs: JobManager, query: CorrectionQuery, caller: str | None
) -> tuple[Parameters, LabelProvenance]:
    """Return the parameters for reading the stack and the provenance of the labels. Raises UnknownJob, BadParameter."""
    overrides = query.model_dump(include=set(SELECTION_PARAMETERS), exclude_none=True)
    if query.job is None:
        parameters = merge_fields(Parameters(), overrides)
        return parameters, LabelProvenance(
            changes=query.changes, time=_single_time_point(parameters), stack=parameters.stack
        )
    record = async_jobs.view(query.job, caller).record
    inherited = {key: value for key, value in record.request.parameters.items() if key in SELECTION_PARAMETERS}
    answer = record.answer
    diameter = None if answer is None or answer.diameter is None else answer.diameter.partition(";")[0]
    parameters = merge_fields(Parameters(), {**inherited, **overrides})
    model = record.request.model if answer is None else answer.model
    return parameters, LabelProvenance(
        model, diameter, query.changes, _single_time_point(parameters), parameters.stack, query.job
    )


def _single_time_point(parameters: Parameters) -> int | None:
    """Return the selected time point. Raises BadParameter if several are selected."""
    time = parameters.selection.time
    if isinstance(time, TimeRange):
        raise BadParameter(
            "time: corrected labels must belong to one time point. Specify which one, for example time=3.",
            parameter="time",
        )
    return time


def _find_stack(request: Request, parameters: Parameters, caller: str | None) -> StoredStack:
    if parameters.stack is None:
        raise BadParameter(
            "stack: the stack of these labels is missing. Send a form with the stack in the field 'file' and the labels"
            " in the field 'labels', or upload the stack with POST /stacks and set stack to its id.",
            parameter="stack",
        )
    return get_stacks(request).find(parameters.stack, caller)


async def _report_one(request: Request, runtime: Runtime, annotation: Annotation) -> AnnotationReport:
    annotations, caller, everyone = get_annotations(request), get_caller(request), _is_admin(request, runtime)

    def report() -> AnnotationReport:
        found = annotations.list_newest(caller, is_admin=everyone)
        overlaps = find_overlaps([other for other in found if other.digest == annotation.digest])
        # The annotation may have been deleted in the meantime.
        return AnnotationReport(**describe_annotation(annotation, overlaps.get(annotation.id, ())))

    return await run_in_thread(report)


def _stem(annotation: Annotation) -> str:
    stem = sanitize_file_name(annotation.name)
    for suffix in (".tif", ".tiff", ".ome"):
        stem = stem.removesuffix(suffix)
    return stem or annotation.id


def _send(path: Folder, name: str) -> FileResponse:
    headers = {"Cache-Control": "no-store", "Content-Disposition": describe_attachment(name)}
    return FileResponse(path, media_type="image/tiff", headers=headers)
