"""A route that calls its endpoint without FastAPI's dispatch, for `POST /segment`.

FastAPI matches a route twice, resolves dependencies and keeps an exit stack for them. For a small stack that takes as
long as receiving and answering it. This file can be deleted: `segment` then becomes a route of a plain `APIRouter`, and
`app.py` loses `DirectDispatch`; only speed changes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(APIRoute):
    """A documented route whose endpoint takes the `Request` alone and returns a `Response`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint itself, without FastAPI's handling of dependencies and results around it."""
        return self.endpoint


class DirectDispatch:
    """ASGI middleware that calls the endpoint of a `DirectRoute` at once, and passes all other requests on."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        direct = [route for route in routes if isinstance(route, DirectRoute)]
        self._routes = {(method, route.path): route for route in direct for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
