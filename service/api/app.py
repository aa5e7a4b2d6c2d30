"""Assemble the FastAPI application: routes, middleware, exception handlers and lifespan."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.access.access_log import RequestLog
from service.api.access.authentication import HEALTH_PATH, ApiKeyAuth
from service.api.access.cross_site import CrossSiteProtection
from service.api.access.middleware import DrainBody, EndIncompleteResponses, SecurityHeaders
from service.api.access.path_prefix import RestorePathPrefix, StripPathPrefix
from service.api.access.trusted_hosts import (
    CORS_METHODS,
    CORS_REQUEST_HEADERS,
    CORS_RESPONSE_HEADERS,
    TrustedHosts,
)
from service.api.agents import route as agents
from service.api.dependencies import check_query
from service.api.kserve import route as kserve
from service.api.messages.error_responses import (
    EXCEPTION_HANDLERS,
    KEY_SCHEMES,
    UNEXPECTED_HANDLER,
    Problem,
    describe_problem_responses,
    handle_error,
)
from service.api.routes import (
    corrections,
    docs,
    jobs,
    models,
    page,
    planes,
    projects,
    segment,
    stacks,
    status,
    trainings,
)
from service.core.config import Settings
from service.core.errors import ConfigError
from service.core.files.bundled import get_software_version
from service.serving.build import DEFAULT_FACTORIES, ServiceFactories, build
from service.serving.storage.threads import start_file_threads

if TYPE_CHECKING:
    from service.api.agents.server import AgentServer

_ROUTERS = (
    segment.router,
    jobs.router,
    stacks.router,
    planes.router,
    corrections.router,
    trainings.router,
    projects.router,
    models.router,
    status.router,
    agents.router,
    kserve.router,
)
# Routes that ignore unknown parameters. Probes, scrapers, links and caches add parameters of their own.
_OPEN_ROUTERS = (status.monitoring_router, docs.router, page.router)


class Application(FastAPI):
    """FastAPI application with an OpenAPI document that describes errors as problem documents (RFC 9457)."""

    @cached_property
    def openapi_json(self) -> bytes:
        """The OpenAPI document as JSON.

        It is cached because building it takes milliseconds and any client may request it.
        """
        return json.dumps(self.openapi(), ensure_ascii=False).encode()

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, including the schema of problem documents and any API key requirements."""
        document = super().openapi()
        document["components"]["schemas"][Problem.__name__] = Problem.model_json_schema()
        for methods in document["paths"].values():
            for operation in methods.values():
                # Use the first sentence of the docstring. FastAPI's default is the capitalized name of the function.
                operation["summary"] = operation["description"].partition("\n")[0].partition(".")[0]
        if self.state.runtime.settings.access.keys:
            document["components"]["securitySchemes"] = KEY_SCHEMES
            document["security"] = [{name: []} for name in KEY_SCHEMES]
            for path, methods in document["paths"].items():
                if HEALTH_PATH.fullmatch(path):
                    methods["get"]["security"] = []
        return document

    def build_middleware_stack(self) -> ASGIApp:
        """Wrap FastAPI's middleware in the middleware of the service.

        Responses to unexpected errors, which FastAPI's middleware sends, then pass through the service's middleware.
        """
        settings = self.state.runtime.settings
        access = settings.access
        fastapi_stack = super().build_middleware_stack()
        stack: ASGIApp = ApiKeyAuth(RestorePathPrefix(fastapi_stack), access, handle_error)
        if access.origins:
            stack = CORSMiddleware(
                stack, access.origins, CORS_METHODS, CORS_REQUEST_HEADERS, expose_headers=CORS_RESPONSE_HEADERS
            )
        stack = CrossSiteProtection(stack, access, handle_error)
        stack = TrustedHosts(stack, access, settings.server.host, handle_error)
        http_stack = StripPathPrefix(
            RequestLog(EndIncompleteResponses(SecurityHeaders(DrainBody(stack)))), settings.server.root_path
        )

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            # The middleware of the service handles only HTTP requests. Lifespan events bypass it.
            await (http_stack if scope["type"] == "http" else fastapi_stack)(scope, receive, send)

        return dispatch


def create_app(settings: Settings, factories: ServiceFactories = DEFAULT_FACTORIES) -> FastAPI:
    """Create the service as an ASGI application, whose lifespan starts and stops the service. Raises ConfigError."""
    app = Application(
        title="StackSeg",
        version=get_software_version(),
        summary="Segments 3D microscopy stacks. Send a TIFF file, and receive labels as an OME-TIFF file with the same"
        " voxel grid and voxel size.",
        # `service.api.routes.docs` serves these pages.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        responses=describe_problem_responses(),
    )
    app.state.agent_server = _make_agent_server(settings)
    service = build(settings, factories)
    app.state.runtime, app.state.async_jobs = service.runtime, service.async_jobs
    app.state.annotations, app.state.trainings = service.annotations, service.trainings
    app.state.projects = service.projects
    # `app.routes` does not list the routes of included routers individually.
    app.state.endpoints = []
    for routers, dependencies in ((_ROUTERS, [Depends(check_query)]), (_OPEN_ROUTERS, [])):
        endpoints = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        head_router = _make_head_router(endpoints)
        for router in (*routers, head_router):
            app.include_router(router, dependencies=dependencies)
        app.state.endpoints += [*endpoints, *head_router.routes]
    for error_type, handler in EXCEPTION_HANDLERS.items():
        app.add_exception_handler(error_type, handler)
    app.add_exception_handler(Exception, UNEXPECTED_HANDLER)
    return app


def _make_agent_server(settings: Settings) -> AgentServer | None:
    """Return the server of the tools for agents, or None if it is disabled. Raises ConfigError if the extra is missing.

    Its library is imported only if it is enabled, because the import takes a second.
    """
    if not settings.server.mcp:
        return None
    try:
        server: AgentServer = import_module("service.api.agents.server").AgentServer()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"server.mcp is true, but the extra mcp is not installed, or not completely ({error}). Install it with pip"
            " install 'stackseg[mcp]', or set server.mcp to false."
        ) from error
    return server


def _make_head_router(endpoints: Iterable[APIRoute]) -> APIRouter:
    """Return routes that answer HEAD wherever the endpoints answer GET, by calling the same functions (RFC 9110, 9.1).

    The server removes the content of the responses. Monitors, `wget --spider` and download managers use such requests.
    """
    router = APIRouter()
    for endpoint in endpoints:
        if "GET" in (endpoint.methods or ()):
            router.add_api_route(
                endpoint.path,
                endpoint.endpoint,
                methods=["HEAD"],
                response_model=endpoint.response_model,
                response_class=endpoint.response_class,
                include_in_schema=False,
            )
    return router


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state = app.state
    start_file_threads()
    async with AsyncExitStack() as exit_stack:
        state.runtime.start()
        state.annotations.clean_up()
        exit_stack.push_async_callback(asyncio.to_thread, state.runtime.stop)
        state.async_jobs.start(state.runtime)
        exit_stack.push_async_callback(asyncio.to_thread, state.async_jobs.stop)
        state.trainings.start()
        exit_stack.push_async_callback(asyncio.to_thread, state.trainings.stop)
        if state.agent_server is not None:
            await exit_stack.enter_async_context(state.agent_server.run())
        yield
