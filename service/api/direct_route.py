"""A route without FastAPI's dependencies, for the one endpoint where these take as long as the work."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send


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
