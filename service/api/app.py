"""Assemble the service: lifespan, routes, and the one table from error class to status code."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from importlib.metadata import version
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp

from service.api.admission import DirectDispatch
from service.api.auth import HEALTH, METHODS, READ, SENT, Guard, Hosts
from service.api.http_protocol import Connection
from service.api.middleware import DrainBody, RequestLog, SafeHeaders
from service.api.routes import docs, hardware, health, inspect, jobs, models, segment
from service.api.schemas import PROBLEM_TYPE, Problem, problem_members
from service.core import errors
from service.core.config import Settings
from service.core.errors import ConfigError
from service.serving.async_jobs import AsyncJobs
from service.serving.parameters import explain
from service.serving.runtime import Runtime

log = logging.getLogger(__name__)

# Looked up along the class's __mro__: a class without a row of its own has its parent's status.
STATUS: dict[type[errors.StackSegError], int] = {
    errors.StackSegError: 500,
    errors.RequestError: 400,
    errors.BadFile: 422,
    errors.AmbiguousAxes: 422,
    errors.BadParameter: 422,
    errors.UnsupportedMedia: 415,
    errors.TooLarge: 413,
    errors.UnknownModel: 404,
    errors.Unauthorized: 401,
    errors.Misdirected: 421,
    errors.RateLimited: 429,
    errors.UnknownJob: 404,
    errors.NotFinished: 409,
    errors.OutputExists: 409,
    errors.ResultGone: 410,
    errors.CapacityError: 503,
    errors.OutOfMemory: 507,
    errors.OutOfStorage: 507,
    errors.TimedOut: 504,
    errors.ModelError: 500,
    # Nobody reads this answer; the number is what proxies log for a client that hung up.
    errors.Cancelled: 499,
}

# From glibc's malloc.h.
_M_ARENA_MAX = -8

# So many new objects before Python looks for cycles among them: a request makes thousands, and hardly any.
YOUNG_OBJECTS = 50_000

# While the service stops: how long nothing may come of an upload, and how often that is looked at.
STALLED_SECONDS = 5.0
LOOK_SECONDS = 0.5

_ENDPOINTS = (segment, jobs, inspect, models, health, hardware, docs)

Handler = Callable[[Request, Exception], Response]


# How the OpenAPI document speaks of API keys.
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


class Application(FastAPI):
    """FastAPI documents errors as JSON of its own; ours are problem documents of one schema."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the schema of the problem documents, and API keys where they are asked for."""
        document = super().openapi()
        document["components"]["schemas"][Problem.__name__] = Problem.model_json_schema()
        for methods in document["paths"].values():
            for operation in methods.values():
                # Else the name of the function, with capitals.
                operation["summary"] = operation["description"].partition("\n")[0].partition(".")[0]
        if self.state.runtime.settings.access.keys:
            document["components"]["securitySchemes"] = _KEYS
            document["security"] = [{name: []} for name in _KEYS]
            for path, methods in document["paths"].items():
                if HEALTH.fullmatch(path):
                    methods["get"]["security"] = []
        return document

    def build_middleware_stack(self) -> ASGIApp:
        """Everything around the routes, the outermost last: the answer to an unforeseen error passes through it too."""
        access = self.state.runtime.settings.access
        stack: ASGIApp = Guard(super().build_middleware_stack(), access, _answer_error)
        if access.origins:
            stack = CORSMiddleware(stack, access.origins, METHODS, SENT, expose_headers=READ)
        stack = Hosts(stack, access, _answer_error)
        return RequestLog(SafeHeaders(DrainBody(stack)))


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; its runtime starts and stops with the lifespan. Raises ConfigError."""
    app = Application(
        title="StackSeg",
        version=version("stackseg"),
        summary="Segment 3D microscopy stacks: a TIFF in, a label OME-TIFF with the same axes and voxel size out.",
        docs_url=None,  # see service.api.routes.docs
        redoc_url=None,
        lifespan=_lifespan,
        responses=_problem_responses(),
    )
    app.state.runtime = Runtime(settings)
    app.state.async_jobs = AsyncJobs(settings)
    for module in _ENDPOINTS:
        app.include_router(module.router)
    app.add_middleware(DirectDispatch, routes=_routes())
    # Once more, as around the framework's own routes.
    app.add_middleware(ExceptionMiddleware, handlers=_HANDLERS)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _answer_unexpected)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    async_jobs: AsyncJobs = app.state.async_jobs
    runtime.start()
    try:
        async_jobs.start(runtime)
        try:
            yield
        finally:
            await asyncio.to_thread(async_jobs.stop)
    finally:
        await asyncio.to_thread(runtime.stop)


class Server(uvicorn.Server):
    """A uvicorn server that stops being ready as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, stalled_seconds: float = STALLED_SECONDS) -> None:
        super().__init__(config)
        self._runtime, self._stalled_seconds = runtime, stalled_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: finish what was begun within the time to drain, accept nothing new."""
        self._runtime.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is idle, wait for answers that are owed, and for bodies as long as they arrive."""
        for server in self.servers:
            server.close()
        # Since Python 3.12 they would be waited for until clients that began no more than TLS have ended that.
        self.servers = []
        giving_up = asyncio.create_task(self._give_up_uploads())
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()

    async def _give_up_uploads(self) -> None:
        """Those that stall, all once the time to drain is over, and what was accepted at the last moment."""
        over = time.monotonic() + self._runtime.settings.server.drain_seconds
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.give_up(self._stalled_seconds if time.monotonic() < over else 0)


def serve(settings: Settings, host: str, port: int) -> bool:
    """Serve until a signal ends it; prints the address. False if a thread would not end. Raises ConfigError."""
    _share_freed_memory()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    config = configured(
        app,
        ssl_keyfile=settings.server.ssl_keyfile,
        ssl_certfile=settings.server.ssl_certfile,
        # The runtime ends requests itself, with an answer; this is for those that then still hang.
        timeout_graceful_shutdown=round(settings.server.drain_seconds) + 5,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"server.ssl_keyfile and server.ssl_certfile cannot be used: {error}.") from error
    with listen(host, port) as listener:
        # uvicorn raises the signal once more when it has shut down, which would turn a clean end into a killed process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: None)
        sys.stdout.write(f"StackSeg listens on {address_of(listener, secure=config.is_ssl)}\n")
        sys.stdout.flush()
        Server(config, runtime).run(sockets=[listener])
    return runtime.ended


def configured(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """How the application is served; `more` as uvicorn has it."""
    return uvicorn.Config(
        app, http=Connection, ws="none", log_config=None, access_log=False, server_header=False, **more
    )


def _share_freed_memory() -> None:
    """Let all threads take from what any of them has freed.

    The C library otherwise keeps a pool for each of many threads, and the process grows for hours until all are full.
    """
    # Other C libraries have no such function, and no such pools.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"Cannot listen on {host}, port {port}: {error}.") from error


def address_of(listener: socket.socket, *, secure: bool = False) -> str:
    """The address to type into a browser."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def status_of(error: errors.StackSegError) -> int:
    """The HTTP status of an error: of its class, or of the nearest parent in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def problem(request: Request, status: int, slug: str, detail: str, **members: Any) -> JSONResponse:
    """An answer as RFC 9457 has it."""
    state = request.scope.setdefault("state", {})
    state["problem"] = slug
    number = state.get("request_id") or str(uuid.uuid4())
    return JSONResponse(problem_members(slug, status, detail, number) | members, status, media_type=PROBLEM_TYPE)


def _answer_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, errors.StackSegError):
        return _answer_unexpected(request, error)
    status = status_of(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    members = {"needed_bytes": error.needed_bytes} if isinstance(error, errors.OutOfMemory) else {}
    response = problem(request, status, error.slug, str(error), **members)
    if isinstance(error, errors.QueueFull | errors.NotReady | errors.RateLimited | errors.DeviceLost):
        response.headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, errors.Unauthorized):
        response.headers["WWW-Authenticate"] = 'Bearer realm="stackseg"'
    return response


def _answer_validation(request: Request, error: Exception) -> Response:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    return problem(request, 422, errors.BadParameter.slug, explain(faults))


def _answer_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase
    detail = f"{phrase}: {request.method} {request.url.path}. See /docs."
    answer = problem(request, status, phrase.lower().replace(" ", "-"), detail)
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    if status == HTTPStatus.METHOD_NOT_ALLOWED and (methods := _methods(request)):
        answer.headers["Allow"] = ", ".join(sorted(methods))
    return answer


def _methods(request: Request) -> set[str]:
    """Those of all our routes at the request's path; the framework names those of the first alone."""
    here = (route.methods or set() for route in _routes() if route.matches(request.scope)[0] is not Match.NONE)
    return set().union(*here)


def _routes() -> list[APIRoute]:
    """All of ours."""
    return [route for module in _ENDPOINTS for route in module.router.routes if isinstance(route, APIRoute)]


def _answer_unexpected(request: Request, _error: Exception) -> Response:
    detail = "Something went wrong in the service; its log tells more under the number in `instance`."
    response = problem(request, 500, "internal-error", detail)
    # Such an error passes on to the server, which then closes the connection: nobody should send a request into it.
    response.headers["Connection"] = "close"
    return response


_HANDLERS: dict[type[Exception], Handler] = {
    errors.StackSegError: _answer_error,
    RequestValidationError: _answer_validation,
    HTTPException: _answer_http,
}


def _problem_responses() -> dict[int | str, dict[str, Any]]:
    """Every error status with an example of each problem that leads to it, for the OpenAPI document."""
    kinds: dict[int, list[type[errors.StackSegError]]] = {}
    for kind in (*STATUS, *_WITHOUT_ROW):
        if kind not in _ABSTRACT:
            kinds.setdefault(next(STATUS[parent] for parent in kind.__mro__ if parent in STATUS), []).append(kind)
    return {
        status: {
            "description": "; ".join(kind.slug for kind in raised),
            "content": {
                PROBLEM_TYPE: {
                    "schema": {"$ref": f"#/components/schemas/{Problem.__name__}"},
                    "examples": {kind.slug: {"value": _example(kind, status)} for kind in raised},
                }
            },
        }
        for status, raised in sorted(kinds.items())
    }


# What is raised with the status of its parent.
_WITHOUT_ROW = (
    errors.QueueFull,
    errors.NotReady,
    errors.DeviceLost,
    errors.Interrupted,
    errors.BrokenModel,
    errors.NonFiniteScores,
    errors.InternalError,
)

# Parents that are never raised themselves, and the one that is never answered.
_ABSTRACT = (errors.StackSegError, errors.RequestError, errors.CapacityError, errors.ModelError, errors.Cancelled)


def _example(kind: type[errors.StackSegError], status: int) -> dict[str, Any]:
    meaning = (kind.__doc__ or "").partition("\n")[0]
    return problem_members(kind.slug, status, meaning, "6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11")
