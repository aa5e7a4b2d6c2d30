"""The service as a Ray Serve application: `serve run service.api.ray_serve:app config=gpu replicas=2 gpus=1`.

This application is for users who run all their services with Ray Serve. docs/cluster.md compares it with
`stackseg serve`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.app import create_app
from service.core.config import Settings, read_settings
from service.core.quantities import parse_float, parse_integer
from service.serving.runtime import Runtime

# Paths of resources that exist in only one replica, although the next request may go to another replica.
REPLICA_LOCAL_PATHS = ("/jobs", "/stacks", "/annotations", "/trainings")
# Path of a resource that is read-only if there are several replicas, because a change would affect only one of them.
READ_ONLY_PATH = "/models"
# Interval between checks for loaded models at startup and for running work at shutdown.
POLL_SECONDS = 0.2

# The runtime of the replica in this process, once its application has been built.
_runtimes: list[Runtime] = []


def app(arguments: Mapping[str, str]) -> Any:
    """Return the Ray Serve application. Raises ConfigError.

    arguments  `config`: configuration file or preset (default: `default`), `replicas`: number of replicas (default: 1),
               `gpus`: number of GPUs per replica (default: 0)
    """
    settings = read_settings(Path(arguments.get("config", "default")))
    replica_count = parse_integer(arguments.get("replicas", "1"))

    def build() -> FastAPI:
        return build_app(settings, replica_count)

    deployment = serve.deployment(
        name="stackseg",
        num_replicas=replica_count,
        ray_actor_options={"num_gpus": parse_float(arguments.get("gpus", "0"))},
        # Let the queue of the service refuse excess requests, with 503 and Retry-After.
        max_ongoing_requests=settings.limits.waiting + settings.limits.at_once,
        graceful_shutdown_timeout_s=settings.server.drain_seconds + 15,
    )
    return deployment(serve.ingress(build)(Replica)).bind()


class Replica:
    """Replica with a health check for Ray Serve."""

    def check_health(self) -> None:
        """Raise RuntimeError if the device or the default model cannot be used, so that Ray replaces the replica."""
        reasons = [
            reason for runtime in _runtimes for reason in runtime.list_unready_reasons() if not runtime.is_draining
        ]
        if reasons:
            raise RuntimeError(" ".join(reasons))


def build_app(settings: Settings, replica_count: int) -> FastAPI:
    """Create the application of a replica.

    If there are several replicas, the application refuses requests for replica-local resources.
    """
    application = create_app(settings)
    runtime: Runtime = application.state.runtime
    if replica_count > 1:
        application.add_middleware(ReplicaLocalRequestFilter)
    application.router.lifespan_context = wrap_lifespan(application.router.lifespan_context, runtime)
    _runtimes.append(runtime)
    return application


class ReplicaLocalRequestFilter:
    """Middleware that refuses requests for replica-local resources, and ignores `Prefer: respond-async`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The path includes the route prefix of the application, if any.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(REPLICA_LOCAL_PATHS) or (
            path.startswith(READ_ONLY_PATH) and scope["method"] not in {"GET", "HEAD"}
        ):
            message = (
                "Jobs, stored stacks, annotated stacks, training runs and changes to models require a service with a"
                " single replica.\n"
            )
            response = PlainTextResponse(message, status_code=501)
            await response(scope, receive, send)
        else:
            headers = [(name, value) for name, value in scope["headers"] if name != b"prefer"]
            await self._app({**scope, "headers": headers}, receive, send)


def wrap_lifespan(lifespan: Any, runtime: Runtime) -> Any:
    """Wrap a lifespan so that it waits for models at startup and for running work at shutdown.

    The shutdown cannot be handled by a signal handler, because Ray Serve sends no signal.
    """

    @asynccontextmanager
    async def wrapped_lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            # If a model cannot be loaded, `check_health` fails.
            while any(device.scheduler.models.cache.pending_startup_models for device in runtime.devices.all):
                await asyncio.sleep(POLL_SECONDS)
            yield state
            runtime.drain()
            deadline = time.monotonic() + runtime.settings.server.drain_seconds
            while runtime.is_busy and time.monotonic() < deadline:
                await asyncio.sleep(POLL_SECONDS)

    return wrapped_lifespan
