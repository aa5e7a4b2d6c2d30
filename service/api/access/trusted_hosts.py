"""Trusted host names, as protection against DNS rebinding, and the methods and headers that CORS allows."""

from __future__ import annotations

import logging
from ipaddress import ip_address

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.access.authentication import HEALTH_PATH, ErrorHandler, is_loopback
from service.api.messages.headers import get_header
from service.core.errors import MisdirectedRequest
from service.core.sections.serving import Access

log = logging.getLogger(__name__)

# Methods and headers that web pages from other origins may send, and response headers that these pages may read.
CORS_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
CORS_REQUEST_HEADERS = (
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "Idempotency-Key",
    "If-Match",
    "If-None-Match",
    "If-Range",
    "Mcp-Method",
    "Mcp-Name",
    "MCP-Protocol-Version",
    "Prefer",
    "Range",
    "X-API-Key",
    "X-Filename",
    "X-Request-ID",
)
CORS_RESPONSE_HEADERS = (
    "Accept-Ranges", "Content-Disposition", "Content-Range", "ETag", "Location", "Retry-After", "Server-Timing",
    "X-Cache", "X-Request-ID",
    "X-StackSeg-Confidence", "X-StackSeg-Diameter", "X-StackSeg-Dtype", "X-StackSeg-Model", "X-StackSeg-Note",
    "X-StackSeg-Objects", "X-StackSeg-Shape", "X-StackSeg-Skipped", "X-StackSeg-Volume", "X-StackSeg-Voxel-Size",
    "X-StackSeg-Warning",
)  # fmt: skip


class TrustedHosts:
    """Middleware that refuses requests for host names that are not trusted, as protection against DNS rebinding.

    In DNS rebinding, an attacker makes the host name of a web page resolve to the address of the service, so that the
    browser considers the page and the service to have the same origin. The attacker controls none of the trusted names:

    - the names in `access.hosts`;
    - if `server.host` is 0.0.0.0 or ::, all IP addresses, which browsers do not look up;
    - if no API keys are configured, `server.host`, and the names and addresses of the loopback interface.

    If API keys are configured and `access.hosts` is empty, every name is accepted, because an attacker's page does not
    have an API key.
    """

    def __init__(self, app: ASGIApp, access: Access, server_host: str, handle_error: ErrorHandler) -> None:
        self._app, self._handle_error = app, handle_error
        self._hosts = tuple(host.lower() for host in access.hosts)
        self._has_keys, self._server_host = bool(access.keys), server_host.lower()
        self._listens_on_all_addresses = is_address(server_host) and ip_address(server_host).is_unspecified
        if self._has_keys and not self._hosts:
            log.warning(
                "access.hosts is empty, so requests for any host name are accepted. To protect users against DNS"
                " rebinding, list the host names of the service in access.hosts."
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if HEALTH_PATH.fullmatch(scope["path"]) or self._is_trusted(parse_host(get_header(scope, b"host"))):
            await self._app(scope, receive, send)
            return
        error = MisdirectedRequest(
            "The service does not accept requests for this host name. Use the URL that the operator of the service"
            " gave you, or ask the operator to add this host name to `access.hosts`."
        )
        await self._handle_error(Request(scope), error)(scope, receive, send)

    def _is_trusted(self, host: str) -> bool:
        if any(matches_host(host, pattern) for pattern in self._hosts):
            return True
        if self._listens_on_all_addresses and is_address(host):
            return True
        if self._has_keys:
            return not self._hosts
        return is_loopback_name(host) or host == self._server_host


def parse_host(header: str) -> str:
    """Return the host name in a Host header in lower case, without the port and the brackets of IPv6 addresses."""
    host = header.strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")


def matches_host(host: str, pattern: str) -> bool:
    """Return whether a host name matches a pattern: the same name, or `*.DOMAIN` for all subdomains of a domain."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def is_loopback_name(host: str) -> bool:
    """Return whether a host name or address in lower case always refers to the loopback interface (RFC 6761)."""
    return host == "localhost" or host.endswith(".localhost") or is_loopback(host)


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
