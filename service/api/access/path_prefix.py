"""Path prefix below which a reverse proxy serves the service, from the header X-Forwarded-Prefix or the settings."""

from __future__ import annotations

import os
import re
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from service.core.sections.serving import PATH_PREFIX_PATTERN

# Environment variable with the addresses of proxies whose headers are trusted, which uvicorn and gunicorn use as well.
TRUSTED_PROXIES_VARIABLE = "FORWARDED_ALLOW_IPS"
# By default, only proxies on the same host are trusted. Otherwise, a client could choose its own address.
LOOPBACK_ADDRESSES = "127.0.0.1,::1"


class ForwardedHeaders(ProxyHeadersMiddleware):
    """Middleware that applies the headers X-Forwarded-For, -Proto and -Prefix of trusted proxies.

    The prefix is added to the path of the request, as ASGI requires for `root_path`. A prefix that is not a plain path
    is ignored.
    """

    def __init__(self, app: ASGIApp) -> None:
        # The type of uvicorn's ASGI applications is stricter than that of Starlette's.
        application: Any = app
        super().__init__(application, os.environ.get(TRUSTED_PROXIES_VARIABLE, LOOPBACK_ADDRESSES))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Apply the headers, and call the application."""
        # uvicorn's middleware replaces the address of the proxy with that of its client.
        client = scope.get("client")
        if scope["type"] == "http" and client is not None and client[0] in self.trusted_hosts:
            values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-prefix"]
            prefix = "".join(part.strip().rstrip("/") for part in ",".join(values).split(","))
            if re.fullmatch(PATH_PREFIX_PATTERN, prefix):
                scope["root_path"], scope["path"] = prefix, prefix + scope["path"]
        await super().__call__(scope, receive, send)


class StripPathPrefix:
    """Middleware that removes the path prefix of a request, so that access checks only need to know the bare paths.

    If no prefix was forwarded, `root_path` is used. The proxy may or may not have removed it from the path.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root_path = scope["root_path"] = scope.get("root_path") or self._root_path
        if scope["path"] == root_path or scope["path"].startswith(f"{root_path}/"):
            scope["path"] = scope["path"].removeprefix(root_path)
        await self._app(scope, receive, send)


class RestorePathPrefix:
    """Middleware that adds the path prefix again. FastAPI needs it for redirects to paths with or without a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = scope["root_path"] + scope["path"]
        await self._app(scope, receive, send)
