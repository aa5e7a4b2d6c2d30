"""The service as an application of Ray Serve: `serve run service.api.ray_serve:app config=gpu replicas=2 gpus=1`.

It is for those who run everything by Ray Serve. docs/more-than-one-machine.md says what `stackseg serve` does better.
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
from service.serving.runtime import Runtime

# What a replica keeps to itself: the next request would ask another one for it.
OF_ONE_REPLICA = ("/jobs", "/stacks", "/annotations", "/trainings")
# What a replica would change for itself alone.
CHANGED_BY_ONE_REPLICA = "/models"
POLL_SECONDS = 0.2

# Of the replica that this process is.
_runtimes: list[Runtime] = []


def app(arguments: Mapping[str, str]) -> Any:
    """Return the application. Raises ConfigError.

    arguments  config: a file or a preset, default by default; replicas: their number, 1; gpus: of each replica, 0
    """
    settings = read_settings(Path(arguments.get("config", "default")))
    replicas = int(arguments.get("replicas", "1"))

    def build() -> FastAPI:
        return build_app(settings, replicas)

    deployment = serve.deployment(
        name="stackseg",
        num_replicas=replicas,
        ray_actor_options={"num_gpus": float(arguments.get("gpus", "0"))},
        # The service's own queue answers 503 with the time to wait.
        max_ongoing_requests=settings.limits.waiting + settings.limits.at_once,
        graceful_shutdown_timeout_s=settings.server.drain_seconds + 15,
    )
    return deployment(serve.ingress(build)(Replica)).bind()


class Replica:
    """Health of a replica, which Ray Serve asks for beside its application."""

    def check_health(self) -> None:
        """Raise RuntimeError where the device or the default model cannot be used: Ray then replaces the replica."""
        reasons = [reason for runtime in _runtimes for reason in runtime.unready_reasons() if not runtime.draining]
        if reasons:
            raise RuntimeError(" ".join(reasons))


def build_app(settings: Settings, replicas: int) -> FastAPI:
    """Make the application of a replica, without what it alone would know of where there are several."""
    made = create_app(settings)
    runtime: Runtime = made.state.runtime
    if replicas > 1:
        made.add_middleware(WithoutJobs)
    made.router.lifespan_context = until_ready_and_drained(made.router.lifespan_context, runtime)
    _runtimes.append(runtime)
    return made


class WithoutJobs:
    """Middleware that refuses what one replica alone would know of, and answers at once where a job is preferred."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Of an application with a route prefix, the path begins with it.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(OF_ONE_REPLICA) or (
            path.startswith(CHANGED_BY_ONE_REPLICA) and scope["method"] not in {"GET", "HEAD"}
        ):
            message = "Jobs, what is kept, and changes of models need a service with one replica.\n"
            answer = PlainTextResponse(message, status_code=501)
            await answer(scope, receive, send)
        else:
            headers = [(name, value) for name, value in scope["headers"] if name != b"prefer"]
            await self._app({**scope, "headers": headers}, receive, send)


def until_ready_and_drained(lifespan: Any, runtime: Runtime) -> Any:
    """Return a lifespan that begins once models are warm, and ends once nothing is computed: no signal comes here."""

    @asynccontextmanager
    async def whole(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            # A model that cannot be loaded fails `check_health`.
            while any(device.scheduler.models.cache.starting for device in runtime.devices.all):
                await asyncio.sleep(POLL_SECONDS)
            yield state
            runtime.drain()
            deadline = time.monotonic() + runtime.settings.server.drain_seconds
            while runtime.busy and time.monotonic() < deadline:
                await asyncio.sleep(POLL_SECONDS)

    return whole
