"""Receive the file in a request's body, or open the file or stack that the request selects, and segment it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from fastapi import Request

from service.api.dependencies import get_caller, get_quota_name, get_runtime, get_stacks
from service.api.http.body_formats import STACK_BODY, STACK_FIELD, BodyFormat
from service.api.http.uploads import Upload, is_multipart, receive_upload
from service.api.http.waiting import run_while_connected, time_limit
from service.api.requests.admission import Admission, admit_form, select_model
from service.core.errors import BadParameter, Cancelled, NotReady
from service.core.telemetry import Stages
from service.core.types import Description
from service.formats.sandbox.remote_store import RemoteStore
from service.serving.jobs.job_manager import JobManager
from service.serving.jobs.store import INPUT_NAME
from service.serving.parameters import Query, SegmentationRequest
from service.serving.runtime import Runtime
from service.serving.segmentation import SegmentationTask, StackResult
from service.serving.storage.disk import path_exists, translate_disk_errors
from service.serving.storage.host_files import HostFiles, RemoteSource, Source
from service.serving.storage.scratch import ScratchFolder
from service.serving.storage.stack_store import StackStore, StoredStack
from service.serving.storage.threads import run_in_thread

# File name for the stack in a form that also contains labels.
FORM_STACK_NAME = "stack.tif"


@asynccontextmanager
async def work_folder(scratch: ScratchFolder) -> AsyncIterator[Path]:
    """Reserve the name of a folder for one request, and delete the folder at the end. Callers create it when necessary.

    Raises OutOfStorage if the disk is full, and StorageUnavailable for other disk errors.
    """
    folder = scratch.get_next_request_folder()
    try:
        with translate_disk_errors():
            yield folder
    finally:
        # A small request stays in memory and creates no folder.
        if path_exists(folder):
            await run_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


@asynccontextmanager
async def incoming_folder(async_jobs: JobManager) -> AsyncIterator[Path]:
    """Create a folder for the file of a job. Delete the folder at the end, unless an accepted job has taken it over.

    Raises OutOfStorage if the disk is full, and StorageUnavailable for other disk errors.
    """
    with translate_disk_errors():
        folder = async_jobs.make_incoming_folder()
        try:
            yield folder
        finally:
            await run_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


class ReceivedFile:
    """File that a request uploads or selects. It is valid until its `resources` are closed.

    request       parameters (including form fields), caller, folder, and path of the file
    name          name of the file
    is_host_file  whether the file is on the host, where other programs may change it
    space         disk quota of the request
    stages        durations of the completed stages of the request
    stack         stack that a form contains in addition to this file; None if there is no such stack
    resources     folder and file, released at the end of `receive_file` unless the caller takes them over
    """

    def __init__(
        self,
        request: SegmentationRequest,
        source: Source | RemoteSource,
        upload: Upload,
        stages: Stages,
        resources: AsyncExitStack,
    ) -> None:
        self.request, self.name, self.space, self.stages = request, source.name, upload.space, stages
        self.resources, self._upload, self._source = resources, upload, source
        self.stack: Upload | None = None
        self._is_complete = False
        self.is_host_file = request.query.input is not None

    def complete(self) -> str | None:
        """Finish writing the uploaded files. Call this method in a thread before reading the files. Blocks.

        Return the digest of the file, or None for a host file, which may change. Further calls only return the digest.
        """
        if not self._is_complete:
            self._is_complete = True
            self._upload.complete()
            if self.stack is not None:
                self.stack.complete()
        return None if self.is_host_file else self._upload.digest

    @property
    def source(self) -> Path | bytearray | RemoteStore:
        """Path or content of the complete file, or the remote store that the request selects."""
        return self._source.path if self.is_host_file else self._upload.source

    def drop_content(self) -> None:
        """Release the content of a file in memory after it has been read. The volume keeps a reference if necessary."""
        self._upload.drop_content()


@asynccontextmanager
async def receive_file(
    request: Request,
    query: Query,
    folder: AbstractAsyncContextManager[Path] | None = None,
    *,
    body_format: BodyFormat = STACK_BODY,
    allow_folders: bool = False,
) -> AsyncIterator[ReceivedFile]:
    """Receive the uploaded file, or open the host file or stored stack that the request selects.

    The time limit for requests applies to the entire block. The file can be read after a call to
    `ReceivedFile.complete`.

    folder         destination of the file; if None, small files stay in memory, and large files are written to a
                   `work_folder`
    body_format    accepted formats of the body; a form with labels may also contain their stack (requires `folder`)
    allow_folders  whether the request may select a folder on the host

    Raises the same errors as `receive_upload`, `admit_form` and `HostFiles.open_input`, UnknownStack if the stored
    stack does not exist, and TimedOut if the time limit is exceeded.
    """
    stages, runtime = Stages(), await get_runtime(request)
    limits = runtime.settings.limits
    async with AsyncExitStack() as resources:
        folder_path = await resources.enter_async_context(folder or work_folder(runtime.scratch))
        async with time_limit(limits.request_seconds, runtime.devices.explain_missing_workers):
            space = resources.enter_context(runtime.scratch_space.make_reservation(get_quota_name(request)))
            upload = Upload(folder_path / INPUT_NAME, limits.upload_bytes, space)
            resources.callback(upload.close)
            form_stack = Upload(folder_path / FORM_STACK_NAME, limits.upload_bytes, space)
            resources.callback(form_stack.close)
            with stages.measure("receive"):
                await receive_upload(
                    request,
                    upload,
                    body_format,
                    {} if body_format.form_field == STACK_FIELD else {STACK_FIELD: form_stack},
                )
            if folder is None:
                upload.keep_in_memory()
            query = await _merge_form_fields(request, runtime, query, upload, body_format)
            caller = get_caller(request)
            open_host_file = partial(
                _open_host_file, runtime.host_files, resources, caller, allow_folders=allow_folders
            )
            source = await _choose_source(request, query, upload, body_format, open_host_file)
            file_path = source.path if isinstance(source, Source) else upload.path
            name = "" if query.input is None else source.name
            segmentation_request = SegmentationRequest(query, file_path, folder_path, caller, name=name)
            file = ReceivedFile(segmentation_request, source, upload, stages, resources)
            file.stack = form_stack if form_stack.received_bytes else None
            yield file


class ResourceOwner(Protocol):
    """A response that closes `resources` after it has been sent."""

    resources: AsyncExitStack


R = TypeVar("R", bound=ResourceOwner)


async def segment_stack(
    request: Request, runtime: Runtime, admission: Admission, build_response: Callable[[StackResult], Awaitable[R]]
) -> R:
    """Receive the file of a request, segment it, and return the response that `build_response` makes from the result.

    The response then owns the folder of the request. Raises the errors of `receive_file`, `select_model` and
    `SegmentationTask.run`, NotReady if the service stops, and Cancelled if the client disconnects.
    """
    query, spec = admission

    async def respond(task: SegmentationTask) -> R:
        try:
            stack_result = await task.run()
        except Cancelled:
            raise NotReady(
                "The service stopped before the request was completed. Send the request again in a moment."
            ) from None
        return await build_response(stack_result)

    async with receive_file(request, query) as stack:
        spec = spec or select_model(runtime, stack.request.query)
        task = SegmentationTask(runtime, stack, spec, stack.stages)
        response = await run_while_connected(request, respond(task))
        response.resources.push_async_callback(stack.resources.pop_all().aclose)
        return response


async def inspect_file(runtime: Runtime, file: ReceivedFile) -> Description:
    """Complete a file, and inspect it in a reader thread. Raises the same errors as `Reader.inspect`."""
    cancelled = threading.Event()

    def complete_and_inspect() -> Description:
        file.complete()
        selection = file.request.query.selection
        reader = runtime.reader.for_client(file.space.client)
        return reader.inspect(file.source, selection, is_shared=file.is_host_file, cancelled=cancelled.is_set)

    return await run_in_thread(complete_and_inspect, runtime.read_threads.for_client(file.space.client), cancelled)


async def _merge_form_fields(
    request: Request, runtime: Runtime, query: Query, upload: Upload, body_format: BodyFormat
) -> Query:
    """Merge the parameters with the fields of a form. Raises BadParameter for fields in a form with labels."""
    if body_format.form_field != STACK_FIELD:
        if upload.fields:
            raise BadParameter("This form may contain only files. Put the parameters in the URL.")
        return query
    return await admit_form(request, runtime, query, upload.fields) if is_multipart(request) else query


async def _choose_source(
    request: Request,
    query: Query,
    upload: Upload,
    body_format: BodyFormat,
    open_host_file: Callable[[str], Source | RemoteSource],
) -> Source | RemoteSource:
    """Return the uploaded file, the stored stack that replaces it, or the host file from `open_host_file`."""
    if (stack_id := _get_stack_id(query, upload)) is not None:
        stored_stack = await run_in_thread(
            partial(_adopt_stored_stack, upload, get_stacks(request), stack_id, get_caller(request))
        )
        upload.set_name(stored_stack.name)
    if (input_path := _get_host_path(query, upload, body_format)) is not None:
        runtime: Runtime = request.app.state.runtime
        threads = runtime.host_threads.for_client(get_quota_name(request))
        return await run_in_thread(partial(open_host_file, input_path), threads)
    return Source(upload.path, upload.name)


def _open_host_file(
    host_files: HostFiles, resources: AsyncExitStack, caller: str | None, input_path: str, *, allow_folders: bool
) -> Source | RemoteSource:
    """Open a host file, a remote store or, if `allow_folders` is set, a host folder. Raises BadParameter."""
    if allow_folders and host_files.is_folder(input_path, caller):
        return resources.enter_context(host_files.open_folder(input_path, caller))
    return resources.enter_context(host_files.open_input(input_path, caller))


def _adopt_stored_stack(upload: Upload, stacks: StackStore, stack_id: str, caller: str | None) -> StoredStack:
    """Link the upload to a stored stack, which may then be evicted while the request waits. Raises UnknownStack."""
    stored_stack = stacks.find(stack_id, caller)
    upload.adopt(stored_stack.path, stored_stack.digest)
    return stored_stack


def _get_stack_id(query: Query, upload: Upload) -> str | None:
    """Return the id of the stored stack that replaces the body, or None if there is none. Raises BadParameter."""
    if query.stack is not None and (upload.received_bytes or query.input is not None):
        raise BadParameter(
            "stack: the request selects an uploaded stack, but also contains or selects another file. Use only one.",
            parameter="stack",
        )
    return query.stack


def _get_host_path(query: Query, upload: Upload, body_format: BodyFormat) -> str | None:
    """Return the path of the host file that replaces the body, or None if there is none. Raises BadParameter."""
    if query.input is None and query.stack is None and not upload.received_bytes:
        raise BadParameter(
            f"The request has no file, or an empty one. Send {body_format.file_description} as the body, or in the"
            f" form field {body_format.form_field!r}."
        )
    if query.input is not None and upload.received_bytes:
        raise BadParameter(
            "input: the request contains a file, but it also selects a file on the host. Use only one of them.",
            parameter="input",
        )
    return query.input
