"""Access log: one line for each HTTP request, as text or JSON."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.messages.headers import RawHeaders, choose_request_id, find_header, get_header
from service.core import telemetry

log = logging.getLogger("service.access")

UNPRINTABLE_PATTERN = re.compile(r"[^\x20-\x7e]")
# Characters of IP addresses. A trusted proxy may forward any text as the address of its client.
NO_ADDRESS_PATTERN = re.compile(r"[^\w.:%-]", re.ASCII)
MAX_ADDRESS_CHARS = 64
# Maximum length of a URL path in the access log. Longer paths are truncated.
MAX_PATH_CHARS = 256
STAGE_PATTERN = re.compile(r"(\w+);dur=([0-9.]+)")


class RequestLog:
    """Middleware that assigns an id to every request, and writes one line to the access log when the request ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = choose_request_id(get_header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        start_time, status = time.perf_counter(), 500
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
            # `closed_status` is set if the connection sent the response itself, or if the client disconnected before
            # the response started.
            status = scope["state"].get("closed_status", status)
            _log_request(scope, request_id, status, time.perf_counter() - start_time, headers)
            telemetry.request_id.reset(token)


def _log_request(scope: Scope, request_id: str, status: int, duration_seconds: float, headers: RawHeaders) -> None:
    """Write the access log line for a request, and count the request in the metrics."""
    route = getattr(scope.get("route"), "path", "unknown")
    state = scope["state"]
    caller, problem = state.get("caller", "nobody"), state.get("problem")
    _count_request(scope, route, status, caller, problem)
    model, objects = (find_header(headers, name) or None for name in (b"x-stackseg-model", b"x-stackseg-objects"))
    path = UNPRINTABLE_PATTERN.sub("?", scope["path"][:MAX_PATH_CHARS])
    level = logging.DEBUG if "/health" in route else logging.INFO
    details = " ".join(detail for detail in (caller, problem, model, objects) if detail is not None)
    address = _get_client_address(scope)
    members: dict[str, Any] = {
        "request_id": request_id,
        "client": address,
        "caller": caller,
        "method": scope["method"],
        "path": path,
        "route": route,
        "status": status,
        "seconds": round(duration_seconds, 3),
        "problem": problem,
        "model": model,
        "objects": int(objects) if objects else None,
        "stages": parse_server_timing(find_header(headers, b"server-timing")),
    }
    known_members = {name: value for name, value in members.items() if value is not None}
    arguments = (scope["method"], path, status, duration_seconds, request_id, address or "-", details)
    log.log(level, "%s %s %d %.3fs %s %s %s", *arguments, extra=telemetry.make_log_fields(**known_members))


def _get_client_address(scope: Scope) -> str | None:
    """Return the address of the client with unexpected characters replaced, or None if the server does not know it."""
    client = scope.get("client")
    return NO_ADDRESS_PATTERN.sub("?", client[0][:MAX_ADDRESS_CHARS]) if client else None


def _count_request(scope: Scope, route: str, status: int, caller: str, problem: str | None) -> None:
    """Count a request in the metrics if it has reached the application."""
    if "app" in scope and hasattr(scope["app"].state, "runtime"):
        scope["app"].state.runtime.metrics.count_request(route, status, caller=caller, problem=problem)


def parse_server_timing(timing: str) -> dict[str, float] | None:
    """Parse a Server-Timing header into milliseconds by stage. Return None if it has no stages."""
    stages = STAGE_PATTERN.findall(timing)
    return {name: float(duration) for name, duration in stages} or None
