"""ASGI middleware around every HTTP request: access log, security headers, and receiving the rest of a refused body."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.messages.headers import SECURITY_HEADERS, RawHeaders, choose_request_id, find_header, get_header
from service.core import telemetry

log = logging.getLogger("service.access")

DRAIN_SECONDS = 20.0
UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
# Of a path, in a line of the log.
MAX_PATH_LETTERS = 256
STAGE = re.compile(r"(\w+);dur=([0-9.]+)")

# Swagger UI has inline pictures and styles.
PAGE_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
PAGE_SECURITY_HEADERS = SECURITY_HEADERS | {"Content-Security-Policy": PAGE_POLICY}


def _encode(headers: dict[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.lower().encode(), value.encode()) for name, value in headers.items())


_RAW_HEADERS, _RAW_PAGE_HEADERS = _encode(SECURITY_HEADERS), _encode(PAGE_SECURITY_HEADERS)


class RequestLog:
    """Middleware that gives every request an id and writes one line to the log when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = choose_request_id(get_header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 500
        headers: list[tuple[bytes, bytes]] = []

        async def send_with_id(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = headers = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        token = telemetry.request_id.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            # What the connection itself has answered, or would have answered to a client that has hung up.
            status = scope["state"].get("closed_status", status)
            _log_request(scope, request_id, status, time.perf_counter() - began, headers)
            telemetry.request_id.reset(token)


def _log_request(scope: Scope, request_id: str, status: int, seconds: float, headers: RawHeaders) -> None:
    """Log the request and count it in the metrics."""
    route = getattr(scope.get("route"), "path", "unknown")
    state = scope["state"]
    caller, problem = state.get("caller", "nobody"), state.get("problem")
    _count_request(scope, route, status, caller, problem)
    model, objects = (find_header(headers, name) or None for name in (b"x-stackseg-model", b"x-stackseg-objects"))
    path = UNPRINTABLE.sub("?", scope["path"][:MAX_PATH_LETTERS])
    level = logging.DEBUG if "/health" in route else logging.INFO
    extras = " ".join(extra for extra in (caller, problem, model, objects) if extra is not None)
    members: dict[str, Any] = {
        "request_id": request_id,
        "caller": caller,
        "method": scope["method"],
        "path": path,
        "route": route,
        "status": status,
        "seconds": round(seconds, 3),
        "problem": problem,
        "model": model,
        "objects": int(objects) if objects else None,
        "stages": parse_server_timing(find_header(headers, b"server-timing")),
    }
    known = {name: value for name, value in members.items() if value is not None}
    arguments = (scope["method"], path, status, seconds, request_id, extras)
    log.log(level, "%s %s %d %.3fs %s %s", *arguments, extra=telemetry.fields(**known))


def _count_request(scope: Scope, route: str, status: int, caller: str, problem: str | None) -> None:
    """Count the request in the metrics, unless the application was never reached."""
    if "app" in scope and hasattr(scope["app"].state, "runtime"):
        scope["app"].state.runtime.metrics.count_request(route, status, caller=caller, problem=problem)


def parse_server_timing(timing: str) -> dict[str, float] | None:
    """Return milliseconds by stage from a Server-Timing header; None without one."""
    stages = STAGE.findall(timing)
    return {name: float(duration) for name, duration in stages} or None


class SecurityHeaders:
    """Middleware with headers that keep browsers from guessing media types, framing answers and sending referrers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                # The page of the documentation loads its own scripts and styles; no other answer loads anything.
                page = find_header(headers, b"content-type").startswith("text/html")
                present = {name for name, _ in headers}
                more = _RAW_PAGE_HEADERS if page else _RAW_HEADERS
                message["headers"] = [*headers, *(header for header in more if header[0] not in present)]
            await send(message)

        await self._app(scope, receive, add)


class DrainBody:
    """Middleware that receives the rest of a refused body, for a while, before the refusal is sent.

    Otherwise the connection would be reset under a client that is still sending, and many clients, Python's own among
    them, then report the broken connection instead of the answer. Clients that asked first (Expect: 100-continue), and
    were not yet told to go on, are answered at once. Where a body is not received to its end, the connection ends.
    """

    def __init__(self, app: ASGIApp, seconds: float = DRAIN_SECONDS) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = complete = False

        async def receive_message() -> Message:
            nonlocal begun, complete
            begun = True
            message = await receive()
            complete = not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not complete:
                if begun or not get_header(scope, b"expect"):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._seconds):
                            while not complete:
                                await receive_message()
                if not complete:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive_message, send_after_body)
