"""Who gets in: the host that a request names, the API key that it shows, and how often that key may be used."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.api_keys import ANONYMOUS, Keys, RateLimit
from service.api.headers import RawHeaders, find_header, get_header
from service.core.config import Access
from service.core.errors import Misdirected, RateLimited, Unauthorized

# Open without a key and under any name: what probes ask for, which know neither.
HEALTH = re.compile(r"(/v[12])?/health(/live|/ready)?")
# Open without a key: it says nothing that the project does not publish, and browsers cannot send a key for a page.
DOCUMENTATION = re.compile(r"/(docs(/[a-z.]+)?|openapi\.json)?")

# For browsers: what a page on another origin may send, and read of an answer.
METHODS = ("GET", "POST", "DELETE")
SENT = ("Authorization", "Content-Type", "If-None-Match", "Prefer", "X-API-Key", "X-Filename", "X-Request-ID")
READ = (
    "Content-Disposition", "ETag", "Location", "Retry-After", "Server-Timing", "X-Cache", "X-Request-ID",
    "X-StackSeg-Model", "X-StackSeg-Note", "X-StackSeg-Objects", "X-StackSeg-Voxel-Size",
)  # fmt: skip

Answer = Callable[[Request, Exception], Response]


class Hosts:
    """Refuses requests for a host that is not among the configured ones, which keeps DNS rebinding out."""

    def __init__(self, app: ASGIApp, access: Access, answer: Answer) -> None:
        self._app, self._answer = app, answer
        self._hosts = tuple(host.lower() for host in access.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._hosts or HEALTH.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        host = host_of(get_header(scope, b"host"))
        if any(matches(host, pattern) for pattern in self._hosts):
            await self._app(scope, receive, send)
            return
        error = Misdirected("The service does not answer for this host name; its operator may add it to access.hosts.")
        await self._answer(Request(scope), error)(scope, receive, send)


class Guard:
    """Lets in who shows a known key and has not used it too much; `scope["state"]["caller"]` then has its name."""

    def __init__(self, app: ASGIApp, access: Access, answer: Answer) -> None:
        self._app, self._answer = app, answer
        self._keys = Keys(access.keys)
        limits = access.requests_per_minute, access.requests_at_once
        self._allowances = {name: RateLimit(*limits) for name in (*access.keys, ANONYMOUS)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            try:
                self._admit(scope, held)
            except (Unauthorized, RateLimited) as error:
                await self._answer(Request(scope), error)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, held: ExitStack) -> None:
        state = scope.setdefault("state", {})
        if HEALTH.fullmatch(scope["path"]) or DOCUMENTATION.fullmatch(scope["path"]):
            state["caller"] = ANONYMOUS
            return
        caller = state["caller"] = self._keys.caller(shown_key(scope["headers"]))
        rate_limit = self._allowances[caller]
        if scope["method"] == "POST":
            held.enter_context(rate_limit.hold())
        rate_limit.spend()


def shown_key(headers: RawHeaders) -> str | None:
    """The key in `Authorization: Bearer KEY`, else in `X-API-Key: KEY`."""
    scheme, _, key = find_header(headers, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else find_header(headers, b"x-api-key") or None


def host_of(header: str) -> str:
    """The host of a Host header, without its port, in lower case; an IPv6 address without its brackets."""
    host = header.strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")


def matches(host: str, pattern: str) -> bool:
    """Whether a host is the one of a pattern, or below `*.` of one."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern
