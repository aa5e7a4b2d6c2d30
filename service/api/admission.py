"""What `/segment` and `/inspect` share: admission, a folder per request, time and the client's patience."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.headers import stated
from service.api.threads import NAMED_FILES, in_thread
from service.api.uploads import Upload, is_multipart, receive
from service.core.errors import BadParameter, Cancelled, TimedOut
from service.core.timing import Stages
from service.inference.estimate import Estimator
from service.models.repository import ModelSpec
from service.serving.async_jobs import AsyncJobs
from service.serving.job_store import INPUT
from service.serving.parameters import Query, explain
from service.serving.results import ReceivedRequest, check_places
from service.serving.runtime import Runtime, is_there, storage

T = TypeVar("T")

# Of so many addresses the parameters are remembered.
ADDRESSES = 64


def _fields() -> dict[str, Any]:
    """The parameters of a query as fields of a form, where none can be null."""
    properties = Query.model_json_schema()["properties"]
    return {name: {**it["anyOf"][0], "description": it["description"]} for name, it in properties.items()}


def _parameters() -> list[dict[str, Any]]:
    """The same as parameters of an address."""
    properties = Query.model_json_schema()["properties"]
    schemas = {name: {key: value for key, value in it.items() if key != "default"} for name, it in properties.items()}
    return [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": schema["description"]}
        for name, schema in schemas.items()
    ]


# Of a request with a stack, in the OpenAPI document. The framework would document parameters of a model by itself, but
# then also take each out of the address at every request, which takes it longer than all that follows until the body.
REQUEST: dict[str, Any] = {
    "parameters": _parameters(),
    "requestBody": {
        "description": "The stack, unless input names one on the service's host.",
        "required": False,
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "string", "format": "binary"}, **_fields()},
                    "additionalProperties": False,
                }
            },
        },
    },
}


class Direct(APIRoute):
    """An endpoint that takes the request as it is: what the framework would hand over takes it longer to find."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        return self.endpoint


class DirectDispatch:
    """Requests for `Direct` endpoints go there at once, all others to the framework.

    That looks for a route twice, and holds what dependencies may leave behind; a small stack waits for it as long as
    for what is done with its body.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        direct = [route for route in routes if isinstance(route, Direct)]
        self._ways = {(method, route.path): route for route in direct for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._ways.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


async def runtime_of(request: Request) -> Runtime:
    """What answers the request."""
    runtime: Runtime = request.app.state.runtime
    return runtime


RuntimeDependency = Annotated[Runtime, Depends(runtime_of)]


async def async_jobs_of(request: Request) -> AsyncJobs:
    """What keeps the request's job."""
    async_jobs: AsyncJobs = request.app.state.async_jobs
    return async_jobs


AsyncJobsDependency = Annotated[AsyncJobs, Depends(async_jobs_of)]

RESPOND_ASYNC = "respond-async"

PREFER = {
    "name": "prefer",
    "in": "header",
    "required": False,
    "schema": {"anyOf": [{"type": "string"}, {"type": "null"}], "examples": [RESPOND_ASYNC]},
    "description": f"{RESPOND_ASYNC}: answer with a job instead of waiting (RFC 7240).",
}


def wants_a_job(request: Request) -> bool:
    """Whether the client would rather come back for its answer."""
    prefer = stated(request.scope, b"prefer")
    return RESPOND_ASYNC in (wish.partition(";")[0].strip().lower() for wish in prefer.split(","))


def caller_of(request: Request) -> str | None:
    """Whose request this is, where callers are told apart; what is kept for one caller is hidden from others."""
    caller: str | None = request.scope.get("state", {}).get("caller")
    return caller


class Admission(NamedTuple):
    """Parameters, and the model, if it can give what they ask for; None while a form may bring more of them."""

    query: Query
    spec: ModelSpec | None

    def model(self, runtime: Runtime, query: Query) -> ModelSpec:
        """That of these parameters, all of which have come by now. Raises what `check_output` raises."""
        return self.spec if self.spec is not None and query is self.query else check_output(runtime, query)


async def admission(request: Request, runtime: Runtime) -> Admission:
    """As `admitted`."""
    query = _asked(request.scope["query_string"])
    runtime.admit()
    if is_multipart(request):
        return Admission(query, None)
    spec = check_output(runtime, query)
    await _check_places(request, runtime, query)
    return Admission(query, spec)


async def admitted(request: Request, runtime: RuntimeDependency) -> Query:
    """The parameters, if the request stands a chance: whatever is wrong already is said before the body is received."""
    return (await admission(request, runtime)).query


@lru_cache(maxsize=ADDRESSES)
def _asked(address: bytes) -> Query:
    """The parameters in the part of an address behind the question mark. Raises BadParameter."""
    return _validated(_once(QueryParams(address).multi_items()))


def _once(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names and values of parameters. Raises BadParameter for one that is given twice."""
    given: dict[str, str] = {}
    for name, value in items:
        if name in given:
            raise BadParameter(f"The parameter {name} is given twice.")
        given[name] = value
    return given


def _validated(given: Mapping[str, Any]) -> Query:
    """Raises BadParameter."""
    try:
        return Query.model_validate(given)
    except ValidationError as error:
        raise BadParameter(explain(error.errors())) from error


async def _check_places(request: Request, runtime: Runtime, query: Query) -> None:
    """In a thread: the folders may lie on a server that is slow to answer."""
    if query.input is not None or query.output_to is not None or query.overwrite is not None:
        await in_thread(partial(check_places, runtime, query, caller_of(request)), NAMED_FILES)


def check_output(runtime: Runtime, query: Query) -> ModelSpec:
    """The model, if it can give what is asked for. Raises UnknownModel, NotReady, BadParameter."""
    spec = runtime.spec(query.model)
    kind = Estimator(spec, runtime.settings).output(query.options)
    if query.measurements is not None and kind != "labels":
        raise BadParameter(f"measurements: only labels have objects to measure, and the answer would be {kind}.")
    return spec


AdmittedQuery = Annotated[Query, Depends(admitted)]


class WorkFolder(AbstractAsyncContextManager[Path]):
    """A folder for one request, to be made by whoever needs it, deleted with everything in it at the end.

    A full disk raises OutOfStorage.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._folder = runtime.new_folder()

    async def __aenter__(self) -> Path:
        return self._folder

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # Small requests stay in memory.
        if is_there(self._folder):
            await in_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))
        if isinstance(error, OSError):
            with storage():
                raise error


@asynccontextmanager
async def incoming_folder(async_jobs: AsyncJobs) -> AsyncIterator[Path]:
    """A folder for a job's file, deleted at the end unless the job was accepted and took it over."""
    with storage():
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
            if place is None and runtime.reads_memory:
                upload.keep_in_memory()
            if is_multipart(request):
                query = with_fields(query, upload.fields)
                await _check_places(request, runtime, query)
            caller = caller_of(request)
            if (place_of := _named(query, upload)) is None:
                yield Posted(ReceivedRequest(query, upload.path, folder, caller), upload.name, upload, stack)
                return
            opening = runtime.references.open_input(place_of, caller)
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
    return _validated({**fields, **given})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
