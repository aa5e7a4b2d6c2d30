"""Receive the file in a request's body, or open the host file that the request names."""

from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import Request

from service.api.dependencies import get_caller, get_client, get_runtime, get_stacks
from service.api.http.media_types import STACK_PART, STACKS, BodyKinds
from service.api.http.uploads import Upload, is_multipart, receive
from service.api.http.waiting import time_limit
from service.api.requests.admission import admit_form
from service.core.errors import BadParameter
from service.core.telemetry import Stages
from service.core.types import Description
from service.formats.sandbox.remote_store import RemoteStore
from service.serving.jobs.jobs import AsyncJobs
from service.serving.jobs.store import INPUT
from service.serving.parameters import Query, SegmentationRequest
from service.serving.runtime import Runtime
from service.serving.storage.disk import path_exists, translate_disk_faults
from service.serving.storage.host_files import HostFiles, RemoteSource, Source
from service.serving.storage.scratch import ScratchFolder
from service.serving.storage.stack_store import StackStore, StoredStack
from service.serving.storage.threads import HOST_FILE_THREADS, run_in_thread

# Name of a stack that a form has beside another file.
BESIDE = "stack.tif"


@asynccontextmanager
async def work_folder(scratch: ScratchFolder) -> AsyncIterator[Path]:
    """Name a folder for one request, made by the first who needs it, and delete it with its content at the end.

    A full disk raises OutOfStorage, another fault of it StorageUnavailable.
    """
    folder = scratch.next_request_folder()
    try:
        with translate_disk_faults():
            yield folder
    finally:
        # A small request stays in memory and makes no folder.
        if path_exists(folder):
            await run_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


@asynccontextmanager
async def incoming_folder(async_jobs: AsyncJobs) -> AsyncIterator[Path]:
    """Make a folder for a job's file, and delete it at the end unless an accepted job has taken it over.

    A full disk raises OutOfStorage, another fault of it StorageUnavailable.
    """
    with translate_disk_faults():
        folder = async_jobs.make_incoming()
        try:
            yield folder
        finally:
            await run_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


class ReceivedFile:
    """A file that came with a request or is named by it; lives as long as `receive_file`, or its resources.

    received   parameters, those of a form included, caller, folder and path of the file
    name       of the file
    shared     whether it is a file of the host, which others may change
    space      what the request holds on disk, and for whom
    stages     seconds of the request so far
    stack      the stack that a form has beside the file, None without one
    resources  folder and file, released at the end of `receive_file` unless they were taken from here
    """

    def __init__(
        self,
        received: SegmentationRequest,
        named: Source | RemoteSource,
        upload: Upload,
        stages: Stages,
        resources: AsyncExitStack,
    ) -> None:
        self.received, self.name, self.space, self.stages = received, named.name, upload.space, stages
        self.resources, self._upload, self._named = resources, upload, named
        self.stack: Upload | None = None
        self.shared = received.query.input is not None

    def complete(self) -> str | None:
        """Write what is not on disk yet, before the files are read; blocks, so call it in a thread.

        Return the digest of the file, None for a file that others may change.
        """
        self._upload.complete()
        if self.stack is not None:
            self.stack.complete()
        return None if self.shared else self._upload.digest

    @property
    def source(self) -> Path | bytearray | RemoteStore:
        """The path or the content of the complete file, or the store that was named."""
        return self._named.path if self.shared else self._upload.source

    def drop_content(self) -> None:
        """Forget the content of a file in memory once it was read; its volume keeps what it needs of it."""
        self._upload.drop_content()


@asynccontextmanager
async def receive_file(
    request: Request,
    query: Query,
    folder: AbstractAsyncContextManager[Path] | None = None,
    *,
    kinds: BodyKinds = STACKS,
    folders: bool = False,
) -> AsyncIterator[ReceivedFile]:
    """Receive the file, or open the one that is named, where `folders` are taken also a folder; limit the block's time.

    A form of other `kinds` than a stack may have the stack beside the file, which then needs a `folder`.
    The file goes to `folder`; without one it stays in memory where it is small, else goes to a `work_folder`. It can be
    read once it is complete. Raises what `receive`, `admit_form` and `HostFiles.open_input` raise, UnknownStack, and
    TimedOut.
    """
    stages, runtime = Stages(), await get_runtime(request)
    limits = runtime.settings.limits
    async with AsyncExitStack() as stack:
        path = await stack.enter_async_context(folder or work_folder(runtime.scratch))
        async with time_limit(limits.request_seconds, runtime.devices.missing_workers):
            space = stack.enter_context(runtime.scratch_space.hold(get_client(request)))
            upload = Upload(path / INPUT, limits.upload_bytes, space)
            stack.callback(upload.close)
            beside = Upload(path / BESIDE, limits.upload_bytes, space)
            stack.callback(beside.close)
            with stages.measure("receive"):
                await receive(request, upload, kinds, {} if kinds.part == STACK_PART else {STACK_PART: beside})
            if folder is None:
                upload.keep_in_memory()
            query = await _add_form(request, runtime, query, upload, kinds)
            caller = get_caller(request)
            open_host_file = partial(_open_host_file, runtime.host_files, stack, caller, folders=folders)
            source = await _choose_source(request, query, upload, kinds, open_host_file)
            own = source.path if isinstance(source, Source) else upload.path
            name = "" if query.input is None else source.name
            received = SegmentationRequest(query, own, path, caller, name=name)
            file = ReceivedFile(received, source, upload, stages, stack)
            file.stack = beside if beside.received else None
            yield file


async def inspect_file(runtime: Runtime, file: ReceivedFile) -> Description:
    """Complete the file and describe it, in a thread that reads. Raises what `Reader.inspect` raises."""
    cancelled = threading.Event()

    def complete_and_inspect() -> Description:
        file.complete()
        selection = file.received.query.selection
        return runtime.reader.inspect(file.source, selection, shared=file.shared, cancelled=cancelled.is_set)

    return await run_in_thread(complete_and_inspect, runtime.read_threads.of(file.space.client), cancelled)


async def _add_form(request: Request, runtime: Runtime, query: Query, upload: Upload, kinds: BodyKinds) -> Query:
    """Return the parameters with those of a form. Raises BadParameter for a form that must have none."""
    if kinds.part != STACK_PART:
        if upload.fields:
            raise BadParameter("State the parameters in the address; the form has files alone.")
        return query
    return await admit_form(request, runtime, query, upload.fields) if is_multipart(request) else query


async def _choose_source(
    request: Request,
    query: Query,
    upload: Upload,
    kinds: BodyKinds,
    open_host_file: Callable[[str], Source | RemoteSource],
) -> Source | RemoteSource:
    """Return the uploaded file, the kept stack that stands for it, or what `open_host_file` opens."""
    if (kept := _choose_stack(query, upload)) is not None:
        stored = await run_in_thread(partial(_adopt, upload, get_stacks(request), kept, get_caller(request)))
        upload.set_name(stored.name)
    if (place := _choose_host_file(query, upload, kinds)) is not None:
        return await run_in_thread(partial(open_host_file, place), HOST_FILE_THREADS)
    return Source(upload.path, upload.name)


def _open_host_file(
    host_files: HostFiles, stack: AsyncExitStack, caller: str | None, place: str, *, folders: bool
) -> Source | RemoteSource:
    """Open a file, a store elsewhere, or a folder where `folders` are taken. Raises BadParameter."""
    if folders and host_files.is_folder(place, caller):
        return stack.enter_context(host_files.open_folder(place, caller))
    return stack.enter_context(host_files.open_input(place, caller))


def _adopt(upload: Upload, stacks: StackStore, stack: str, caller: str | None) -> StoredStack:
    """Take the file of a kept stack, which may have to make room while the request waits. Raises UnknownStack."""
    stored = stacks.find(stack, caller)
    upload.adopt(stored.path, stored.digest)
    return stored


def _choose_stack(query: Query, upload: Upload) -> str | None:
    """Return the kept stack that stands for a body, None for a request without one. Raises BadParameter."""
    if query.stack is not None and (upload.received or query.input is not None):
        raise BadParameter(
            "stack: it stands for the file, and the request brings another one; leave one of them out.",
            parameter="stack",
        )
    return query.stack


def _choose_host_file(query: Query, upload: Upload, kinds: BodyKinds) -> str | None:
    """Return the host file that stands for a body, None for a request with a body. Raises BadParameter."""
    if query.input is None and query.stack is None and not upload.received:
        raise BadParameter(
            f"The request carries no file: send {kinds.name} as the body, or as the form field {kinds.part!r}."
        )
    if query.input is not None and upload.received:
        raise BadParameter(
            "The request carries a file and names another with input; leave one of them out.", parameter="input"
        )
    return query.input
