"""Trusted host names, as protection against DNS rebinding, and the methods and headers that CORS allows."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.access.authentication import HEALTH_PATH, ErrorHandler
from service.api.messages.headers import get_header
from service.core.errors import MisdirectedRequest
from service.core.sections.serving import Access

# Methods and headers that web pages from other origins may send, and response headers that these pages may read.
CORS_METHODS = ("GET", "POST", "DELETE")
CORS_REQUEST_HEADERS = (
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "If-None-Match",
    "Prefer",
    "X-API-Key",
    "X-Filename",
    "X-Request-ID",
)
CORS_RESPONSE_HEADERS = (
    "Content-Disposition", "ETag", "Location", "Retry-After", "Server-Timing", "X-Cache", "X-Request-ID",
    "X-StackSeg-Confidence", "X-StackSeg-Diameter", "X-StackSeg-Dtype", "X-StackSeg-Model", "X-StackSeg-Note",
    "X-StackSeg-Objects", "X-StackSeg-Shape", "X-StackSeg-Skipped", "X-StackSeg-Volume", "X-StackSeg-Voxel-Size",
    "X-StackSeg-Warning",
)  # fmt: skip


class TrustedHosts:
    """Middleware that refuses requests for host names that are not configured, as protection against DNS rebinding."""

    def __init__(self, app: ASGIApp, access: Access, handle_error: ErrorHandler) -> None:
        self._app, self._handle_error = app, handle_error
        self._hosts = tuple(host.lower() for host in access.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._hosts or HEALTH_PATH.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        host = parse_host(get_header(scope, b"host"))
        if any(matches_host(host, pattern) for pattern in self._hosts):
            await self._app(scope, receive, send)
            return
        error = MisdirectedRequest(
            "The service does not accept requests for this host name. Use the URL that the operator of the service"
            " gave you, or ask the operator to add this host name to `access.hosts`."
        )
        await self._handle_error(Request(scope), error)(scope, receive, send)


def parse_host(header: str) -> str:
    """Return the host name in a Host header in lower case, without the port and the brackets of IPv6 addresses."""
    host = header.strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")


def matches_host(host: str, pattern: str) -> bool:
    """Return whether a host name matches a pattern: the same name, or `*.DOMAIN` for all subdomains of a domain."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern
