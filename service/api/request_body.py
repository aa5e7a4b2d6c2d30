"""The body of a request received into a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fastapi import Request

from service.api.admission import T, caller_of, check_files, validated
from service.api.threads import NAMED_FILES, in_thread
from service.api.uploads import Upload, is_multipart, receive
from service.core.errors import BadParameter, Cancelled, TimedOut
from service.core.timing import Stages
from service.serving.async_jobs import AsyncJobs
from service.serving.job_store import INPUT
from service.serving.parameters import Query
from service.serving.results import ReceivedRequest
from service.serving.runtime import Runtime
from service.serving.scratch import disk_full_as_out_of_storage, path_exists


class WorkFolder(AbstractAsyncContextManager[Path]):
    """A folder for one request, to be made by whoever needs it, deleted with everything in it at the end.

    A full disk raises OutOfStorage.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._folder = runtime.scratch.next_request_folder()

    async def __aenter__(self) -> Path:
        return self._folder

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # Small requests stay in memory.
        if path_exists(self._folder):
            await in_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))
        if isinstance(error, OSError):
            with disk_full_as_out_of_storage():
                raise error


@asynccontextmanager
async def incoming_folder(async_jobs: AsyncJobs) -> AsyncIterator[Path]:
    """A folder for a job's file, deleted at the end unless the job was accepted and took it over."""
    with disk_full_as_out_of_storage():
        folder = async_jobs.make_incoming()
        try:
            yield folder
        finally:
            await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


class Posted:
    """A request whose file has come, or is there already. What it holds goes at the end of `posted`, unless it is kept.

    name    of the file
    upload  what was sent, if only an empty body
    shared  whether others may change the file, which was not sent, but named
    """

    def __init__(
        self, received: ReceivedRequest, name: str, upload: Upload, held: AsyncExitStack, *, shared: bool = False
    ) -> None:
        self.received, self.name, self.shared = received, name, shared
        self._upload, self._held = upload, held

    @property
    def query(self) -> Query:
        """The parameters, those of a form included."""
        return self.received.query

    def land(self) -> str | None:
        """In a thread, before the file is read: write what was not written while it came.

        Gives the digest of its bytes, None for a file that others may change.
        """
        self._upload.land()
        return None if self.shared else self._upload.digest

    @property
    def source(self) -> Path | bytearray:
        """The file, once it has landed, or all that would be in it."""
        return self.received.source if self.shared else self._upload.source

    def let_go(self) -> None:
        """Of a file in memory that was read: it stays for as long as its volume does."""
        self._upload.let_go()

    def keep(self) -> AsyncExitStack:
        """The folder stays, with all that is in it, until the returned stack is closed."""
        return self._held.pop_all()


@asynccontextmanager
async def posted(
    request: Request,
    runtime: Runtime,
    query: Query,
    stages: Stages,
    place: AbstractAsyncContextManager[Path] | None = None,
) -> AsyncIterator[Posted]:
    """Receive the file, or open the one that is named, and limit the time of the block.

    A file goes to the folder `place`; without one it stays in memory where it is small, and its folder is a
    `WorkFolder`. It is there once it has landed. Raises what `receive` and `References` raise.
    """
    limits = runtime.settings.limits
    async with AsyncExitStack() as stack:
        folder = await stack.enter_async_context(place or WorkFolder(runtime))
        async with TimeLimit(limits.request_seconds):
            upload = Upload(folder / INPUT, limits.upload_bytes)
            stack.callback(upload.close)
            with stages.measure("receive"):
                await receive(request, upload)
            if place is None and runtime.reader.opens:
                upload.keep_in_memory()
            if is_multipart(request):
                query = with_fields(query, upload.fields)
                await check_files(request, runtime, query)
            caller = caller_of(request)
            if (place_of := _named(query, upload)) is None:
                yield Posted(ReceivedRequest(query, upload.path, folder, caller), upload.name, upload, stack)
                return
            opening = runtime.host_files.open_input(place_of, caller)
            source = await in_thread(partial(stack.enter_context, opening), NAMED_FILES)
            yield Posted(ReceivedRequest(query, source.path, folder, caller), source.name, upload, stack, shared=True)


def _named(query: Query, upload: Upload) -> str | None:
    """The place that stands for a body; None for a request with a body. Raises BadParameter for both or neither."""
    if query.input is None and not upload.received:
        raise BadParameter("The request carries no file: send the TIFF as the body, or as the form field 'file'.")
    if query.input is not None and upload.received:
        raise BadParameter("The request carries a file and names another with input; leave one of them out.")
    return query.input


class TimeLimit(AbstractAsyncContextManager[None]):
    """Cancels the block after `seconds`, which then raises TimedOut."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._timeout = seconds, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            kind = TimeoutError
        if kind is not None and issubclass(kind, TimeoutError):
            message = f"The request was not finished within {self._seconds:g} s; send a smaller part of the volume."
            raise TimedOut(message) from None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; it is cancelled, and Cancelled raised, when the client hangs up.

    To be called once the body was received. Never returns before `work` has ended.
    """
    task, listening = asyncio.current_task(), asyncio.ensure_future(_disconnected(request))
    assert task is not None  # noqa: S101 - that of this coroutine
    over = given_up = False

    def give_up(_listening: asyncio.Future[None]) -> None:
        # Called a while after the client was heard to hang up: the work may have ended since.
        nonlocal given_up
        if not over:
            given_up = task.cancel()

    listening.add_done_callback(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if not given_up or task.uncancel() > 0:
            raise
    finally:
        over = True
        listening.cancel()
    raise Cancelled("The client hung up.")


def with_fields(query: Query, fields: dict[str, str]) -> Query:
    """The parameters of the query string together with those of a form. Raises BadParameter."""
    if not fields:
        return query
    given = query.model_dump(exclude_unset=True)
    if twice := sorted(given.keys() & fields.keys()):
        raise BadParameter(f"The parameter {twice[0]} is given twice, in the address and in the form.")
    return validated({**fields, **given})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
