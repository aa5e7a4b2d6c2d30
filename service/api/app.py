"""The service assembled: routes, middleware, and what lives as long as the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from service.api.auth import HEALTH, METHODS, READ, SENT, Guard, Hosts
from service.api.direct_route import DirectDispatch
from service.api.middleware import DrainBody, RequestLog, SafeHeaders
from service.api.problems import (
    HANDLERS,
    KEY_SCHEMES,
    Problem,
    answer_error,
    answer_unexpected,
    problem_responses,
)
from service.api.routes import docs, hardware, health, inspect, jobs, models, segment
from service.core.config import Settings
from service.serving.async_jobs import AsyncJobs
from service.serving.runtime import Runtime

_ENDPOINTS = (segment, jobs, inspect, models, health, hardware, docs)


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
            document["components"]["securitySchemes"] = KEY_SCHEMES
            document["security"] = [{name: []} for name in KEY_SCHEMES]
            for path, methods in document["paths"].items():
                if HEALTH.fullmatch(path):
                    methods["get"]["security"] = []
        return document

    def build_middleware_stack(self) -> ASGIApp:
        """Everything around the routes, the outermost last: the answer to an unforeseen error passes through it too."""
        access = self.state.runtime.settings.access
        stack: ASGIApp = Guard(super().build_middleware_stack(), access, answer_error)
        if access.origins:
            stack = CORSMiddleware(stack, access.origins, METHODS, SENT, expose_headers=READ)
        stack = Hosts(stack, access, answer_error)
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
        responses=problem_responses(),
    )
    app.state.runtime = Runtime(settings)
    app.state.async_jobs = AsyncJobs(settings)
    # FastAPI does not list the routes of a router that it has taken in.
    app.state.endpoints = [
        route for module in _ENDPOINTS for route in module.router.routes if isinstance(route, APIRoute)
    ]
    for module in _ENDPOINTS:
        app.include_router(module.router)
    app.add_middleware(DirectDispatch, routes=app.state.endpoints)
    # Once more, as around the framework's own routes.
    app.add_middleware(ExceptionMiddleware, handlers=HANDLERS)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, answer_unexpected)
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
