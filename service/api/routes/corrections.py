"""/annotations: stacks with corrected labels, stored for training."""

from __future__ import annotations

import threading
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import TypeAdapter
from starlette.responses import FileResponse

from service.api.access.authentication import has_admin_rights
from service.api.dependencies import (
    RuntimeDependency,
    get_annotations,
    get_caller,
    get_stacks,
    get_trainings,
)
from service.api.http.body_formats import LABELS_BODY
from service.api.http.uploads import Upload, is_multipart, sanitize_file_name
from service.api.http.waiting import run_while_connected
from service.api.messages.headers import make_url_path
from service.api.messages.learning import (
    ANNOTATION_BODY,
    ANNOTATION_FILE_RESPONSES,
    ID_PATTERN,
    AnnotationList,
    AnnotationQuery,
    AnnotationReport,
    describe_annotation,
)
from service.api.messages.result_headers import describe_attachment
from service.api.requests.admission import merge_fields
from service.api.requests.body import ReceivedFile, incoming_folder, receive_file
from service.api.requests.downloads import OpenFileResponse
from service.api.requests.jobs import AsyncJobsDependency
from service.core.errors import BadParameter
from service.core.quantities import TimeRange
from service.core.types import Selection
from service.serving.jobs.job_manager import JobManager
from service.serving.learning.annotation import IMAGE_FILE, LABELS_FILE, Annotation, LabelProvenance, find_overlaps
from service.serving.learning.corrections import Correction, store_correction
from service.serving.parameters import Query as Parameters
from service.serving.runtime import Runtime
from service.serving.storage.stack_store import StoredStack
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["learning"])

AnnotationId = Annotated[str, PathParameter(pattern=ID_PATTERN, description="The id of the annotated stack.")]
_JSON_OBJECT_ADAPTER = TypeAdapter(dict[str, Any])
# Parameters of a job that select the stack, and the part of the stack that the job segments.
SELECTION_PARAMETERS = ("stack", "channel", "time", "axes", "voxel_size", "scene", "allow_incomplete")


@router.post("/annotations", status_code=201, openapi_extra=ANNOTATION_BODY)
async def store_annotation(
    request: Request,
    runtime: RuntimeDependency,
    async_jobs: AsyncJobsDependency,
    response: Response,
    query: Annotated[AnnotationQuery, Query()],
) -> AnnotationReport:
    """Store a stack with corrected labels, for training.

    Send the labels as the body and select a stack uploaded with `POST /stacks`, or send a form with the labels and the
    stack. If `job` is set, the stack is read with the parameters of this job. The annotated stack is stored until you
    delete it.
    """
    caller, annotations = get_caller(request), get_annotations(request)
    runtime.check_admission(caller)
    await run_in_thread(partial(annotations.check_space, caller))
    parameters, provenance = await run_in_thread(partial(_read_provenance, async_jobs, query, caller))
    find_stack = partial(_find_stack, request, parameters, caller)
    # A form may contain the stack, in which case the request must not select another stack. If the form contains no
    # stack, the selected stack is looked up after the form has been received.
    stored_stack = None if query.stack is None and is_multipart(request) else await run_in_thread(find_stack)
    async with receive_file(request, Parameters(), incoming_folder(async_jobs), body_format=LABELS_BODY) as file:
        if file.stack is not None and stored_stack is not None:
            raise BadParameter(
                "stack: the form contains a stack, but the request also selects an uploaded stack. Use only one.",
                parameter="stack",
            )
        stack = file.stack or stored_stack
        if stack is None:
            stack = await run_in_thread(find_stack)
        cancelled = threading.Event()

        def store() -> Annotation:
            file.complete()
            correction = _build_correction(query, parameters.selection, provenance, stack, file)
            return store_correction(runtime.reader, annotations, correction, file.space, cancelled.is_set)

        threads = runtime.decode_threads.for_client(file.space.client)
        annotation = await run_while_connected(request, run_in_thread(store, threads, cancelled))
    response.headers["Location"] = make_url_path(request.scope, f"/annotations/{annotation.id}")
    return await _report_annotation(request, runtime, annotation)


@router.get("/annotations", response_model=AnnotationList)
async def list_annotations(request: Request, runtime: RuntimeDependency) -> Response:
    """List the caller's annotated stacks, newest first.

    For admins, the list contains the annotated stacks of all API keys.
    """
    annotations, caller, is_admin = get_annotations(request), get_caller(request), _has_admin_rights(request, runtime)

    def report() -> bytes:
        visible_annotations = annotations.list_newest_first(caller, is_admin=is_admin)
        overlaps = find_overlaps(visible_annotations)
        # Serialize one dictionary at a time. For thousands of annotated stacks, creating pydantic models would be slow,
        # and garbage collection would be slow while many dictionaries exist.
        reports = [
            _JSON_OBJECT_ADAPTER.dump_json(describe_annotation(annotation, overlaps[annotation.id]))
            for annotation in visible_annotations
        ]
        return b'{"annotations":[' + b",".join(reports) + b"]}"

    return Response(await run_in_thread(report), media_type="application/json")


@router.get("/annotations/{annotation}")
async def get_annotation(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> AnnotationReport:
    """Get the metadata of an annotated stack."""
    return await _report_annotation(request, runtime, await _find_annotation(request, runtime, annotation))


@router.get("/annotations/{annotation}/image", response_class=FileResponse, responses=ANNOTATION_FILE_RESPONSES)
async def download_image(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """Download the image of an annotated stack.

    The image contains only the channel and the time point that were segmented.
    """
    return await _build_file_response(request, runtime, annotation, IMAGE_FILE, "")


@router.get("/annotations/{annotation}/labels", response_class=FileResponse, responses=ANNOTATION_FILE_RESPONSES)
async def download_labels(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> FileResponse:
    """Download the corrected labels of an annotated stack."""
    return await _build_file_response(request, runtime, annotation, LABELS_FILE, "_labels")


@router.delete("/annotations/{annotation}", status_code=204)
async def delete_annotation(request: Request, runtime: RuntimeDependency, annotation: AnnotationId) -> None:
    """Delete an annotated stack.

    Unfinished training runs that use the annotated stack are marked as failed. Models that were trained on it
    are not deleted.
    """
    delete = partial(get_annotations(request).delete, annotation, get_caller(request))
    is_admin, trainings = _has_admin_rights(request, runtime), get_trainings(request)
    await run_in_thread(lambda: trainings.withdraw_annotation(delete(is_admin=is_admin)))


def _has_admin_rights(request: Request, runtime: Runtime) -> bool:
    return has_admin_rights(request, runtime.settings.access)


async def _find_annotation(request: Request, runtime: Runtime, annotation: str) -> Annotation:
    is_admin = _has_admin_rights(request, runtime)
    find = partial(get_annotations(request).find, annotation, get_caller(request), is_admin=is_admin)
    return await run_in_thread(find)


def _read_provenance(
    async_jobs: JobManager, query: AnnotationQuery, caller: str | None
) -> tuple[Parameters, LabelProvenance]:
    """Return the parameters for reading the stack, and the provenance of its labels.

    Raises UnknownJob and BadParameter.
    """
    overrides = query.model_dump(include=set(SELECTION_PARAMETERS), exclude_none=True)
    if query.job is None:
        parameters = merge_fields(Parameters(), overrides)
        return parameters, LabelProvenance(
            changes=query.changes, time=_get_single_time_point(parameters), stack=parameters.stack
        )
    record = async_jobs.view(query.job, caller).record
    job_parameters = {key: value for key, value in record.request.parameters.items() if key in SELECTION_PARAMETERS}
    metadata = record.result_metadata
    diameter = None if metadata is None or metadata.diameter is None else metadata.diameter.partition(";")[0]
    parameters = merge_fields(Parameters(), {**job_parameters, **overrides})
    model = record.request.model if metadata is None else metadata.model
    return parameters, LabelProvenance(
        model, diameter, query.changes, _get_single_time_point(parameters), parameters.stack, query.job
    )


def _build_correction(
    query: AnnotationQuery,
    selection: Selection,
    provenance: LabelProvenance,
    stack: StoredStack | Upload,
    file: ReceivedFile,
) -> Correction:
    return Correction(
        stack=stack.path,
        labels=file.source,
        selection=selection,
        region=query.region,
        ignored=query.ignore_label,
        is_partial=query.partial,
        name=sanitize_file_name(query.name) or stack.name,
        owner=file.request.caller,
        provenance=provenance,
        folder=file.request.folder,
    )


def _get_single_time_point(parameters: Parameters) -> int | None:
    """Return the selected time point. Raises BadParameter if several time points are selected."""
    time = parameters.selection.time
    if isinstance(time, TimeRange):
        raise BadParameter(
            "time: corrected labels must belong to one time point. Specify which time point, for example time=3.",
            parameter="time",
        )
    return time


def _find_stack(request: Request, parameters: Parameters, caller: str | None) -> StoredStack:
    if parameters.stack is None:
        raise BadParameter(
            "stack: the stack for these labels is missing. Send a form with the stack in the field 'file' and the"
            " labels in the field 'labels', or upload the stack with POST /stacks and set stack to its id.",
            parameter="stack",
        )
    return get_stacks(request).find(parameters.stack, caller)


async def _report_annotation(request: Request, runtime: Runtime, annotation: Annotation) -> AnnotationReport:
    annotations, caller, is_admin = get_annotations(request), get_caller(request), _has_admin_rights(request, runtime)

    def report() -> AnnotationReport:
        visible_annotations = annotations.list_newest_first(caller, is_admin=is_admin)
        overlaps = find_overlaps([other for other in visible_annotations if other.digest == annotation.digest])
        # The annotation may have been deleted in the meantime.
        return AnnotationReport(**describe_annotation(annotation, overlaps.get(annotation.id, ())))

    return await run_in_thread(report)


def _get_stem(annotation: Annotation) -> str:
    stem = sanitize_file_name(annotation.name)
    for suffix in (".tif", ".tiff", ".ome"):
        stem = stem.removesuffix(suffix)
    return stem or annotation.id


async def _build_file_response(
    request: Request, runtime: Runtime, annotation: str, file_name: str, suffix: str
) -> FileResponse:
    """Return the response with a file of an annotated stack. `suffix` is appended to the name of the stack."""
    record = await _find_annotation(request, runtime, annotation)
    file = await run_in_thread(partial(get_annotations(request).open_file, record, file_name))
    attachment = describe_attachment(f"{_get_stem(record)}{suffix}.ome.tif")
    return OpenFileResponse(file, "image/tiff", {"Cache-Control": "no-store", "Content-Disposition": attachment})
