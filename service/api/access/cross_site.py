"""Protection against cross-site request forgery: web pages from other origins may not change anything."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.access.authentication import ErrorHandler
from service.api.access.trusted_hosts import parse_host
from service.api.messages.headers import get_header
from service.core.errors import CrossSiteRequest
from service.core.sections.serving import Access

# Methods that change nothing. Browsers let pages from other origins send them, but do not let them read the response.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Values of Sec-Fetch-Site for requests from the web UI of the service itself, and from the user (the address bar).
OWN_SITES = frozenset({"same-origin", "none"})
DEFAULT_PORTS = {"http": 80, "https": 443}


class CrossSiteProtection:
    """Middleware that refuses requests with unsafe methods from web pages of other origins, unless they are configured.

    A browser also sends requests from a page that a user has opened on the same computer, in the background and without
    asking. Such requests are recognized by headers that pages cannot change (W3C Fetch Metadata and RFC 6454):

    - `Sec-Fetch-Site`, which browsers send to HTTPS and loopback addresses, tells whether the page has the origin of
      the service;
    - otherwise, `Origin` must name the host and the port in the Host header, or a host in `access.hosts` at the default
      port, for a proxy that changes the Host header.

    Programs send neither header.
    """

    def __init__(self, app: ASGIApp, access: Access, handle_error: ErrorHandler) -> None:
        self._app, self._handle_error = app, handle_error
        self._origins = frozenset(access.origins)
        self._hosts = frozenset(host.lower() for host in access.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in SAFE_METHODS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = CrossSiteRequest(
            "The service does not accept this request from a web page of another origin. Use the web UI of the service"
            " itself, or ask the operator of the service to add the origin of the page to `access.origins`."
        )
        await self._handle_error(Request(scope), error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        site, origin = get_header(scope, b"sec-fetch-site"), get_header(scope, b"origin")
        if not site and not origin:
            return True
        if origin and ("*" in self._origins or origin in self._origins):
            return True
        return site in OWN_SITES if site else self._is_own_origin(origin, get_header(scope, b"host"))

    def _is_own_origin(self, origin: str, host_header: str) -> bool:
        try:
            page = urlsplit(origin)
            default_port = DEFAULT_PORTS[page.scheme]
            page_host, page_port = page.hostname or "", page.port or default_port
            host_port = urlsplit(f"//{host_header}").port or default_port
        except (ValueError, KeyError):
            return False
        if (page_host, page_port) == (parse_host(host_header), host_port):
            return True
        return page_host in self._hosts and page_port == default_port
