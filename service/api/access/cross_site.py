"""Protection against cross-site request forgery (CSRF): web pages from other origins cannot change anything."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.access.authentication import ErrorHandler
from service.api.access.trusted_hosts import parse_host
from service.api.messages.headers import get_header
from service.core.errors import CrossSiteRequest
from service.core.sections.serving import Access

# Methods of requests that change nothing. Browsers allow pages from other origins to send such requests, but not to
# read the responses.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Values of Sec-Fetch-Site for requests from the service's own web UI, and for requests that the user starts directly,
# for example from the address bar.
ALLOWED_FETCH_SITES = frozenset({"same-origin", "none"})
DEFAULT_PORTS = {"http": 80, "https": 443}


class CrossSiteProtection:
    """Middleware that refuses requests with unsafe methods from web pages whose origin is not allowed.

    Any web page that a user opens can make the browser send requests to the service in the background, without asking
    the user. Such requests are recognized by headers that pages cannot change (W3C Fetch Metadata and RFC 6454):

    - `Sec-Fetch-Site`, which browsers send to HTTPS and loopback addresses, indicates whether the page has the same
      origin as the service.
    - If this header is missing, `Origin` must contain the host and the port of the Host header. Because a proxy may
      change the Host header, a host in `access.hosts` with the default port is accepted as well.

    Other clients send neither header, and their requests are accepted.
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
            "The service does not accept this request, because a web page from another origin sent it. Use the web UI"
            " of the service itself, or ask the operator of the service to add the origin of the page to"
            " `access.origins`."
        )
        await self._handle_error(Request(scope), error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        fetch_site, origin = get_header(scope, b"sec-fetch-site"), get_header(scope, b"origin")
        if not fetch_site and not origin:
            return True
        if origin and ("*" in self._origins or origin in self._origins):
            return True
        return (
            fetch_site in ALLOWED_FETCH_SITES if fetch_site else self._is_own_origin(origin, get_header(scope, b"host"))
        )

    def _is_own_origin(self, origin: str, host_header: str) -> bool:
        try:
            origin_url = urlsplit(origin)
            default_port = DEFAULT_PORTS[origin_url.scheme]
            page_host, page_port = origin_url.hostname or "", origin_url.port or default_port
            host_port = urlsplit(f"//{host_header}").port or default_port
        except (ValueError, KeyError):
            return False
        if (page_host, page_port) == (parse_host(host_header), host_port):
            return True
        return page_host in self._hosts and page_port == default_port
