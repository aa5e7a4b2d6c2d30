"""What happens around every request: a number, a line in the log, headers for browsers, an ear for who still sends."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import uuid
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.headers import RawHeaders, find_header, get_header
from service.core import logs

log = logging.getLogger("service.access")

LINGER_SECONDS = 20.0
# What a client may call its request: nothing that could forge a line of a log, or fill it.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
STAGE = re.compile(r"(\w+);dur=([0-9.]+)")

# What a browser may load for a page, and for any other answer. Swagger UI has pictures and styles in its own text.
PAGE = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
NOTHING = "default-src 'none'; frame-ancestors 'none'"
# The headers of `SafeHeaders` for all but pages.
SAFE = {
    "Content-Security-Policy": NOTHING,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
SAFE_FOR_PAGES = SAFE | {"Content-Security-Policy": PAGE}


def _raw(headers: dict[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.lower().encode(), value.encode()) for name, value in headers.items())


_SAFE, _SAFE_FOR_PAGES = _raw(SAFE), _raw(SAFE_FOR_PAGES)


class RequestLog:
    """Gives every request a number, unless it brings a sane one, and one line in the log when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = number_of(get_header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = number
        began, status = time.perf_counter(), 500
        told: list[tuple[bytes, bytes]] = []

        async def note(message: Message) -> None:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = told = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        token = logs.request_id.set(number)
        try:
            await self._app(scope, receive, note)
        finally:
            _tell(scope, number, status, time.perf_counter() - began, told)
            logs.request_id.reset(token)


def number_of(proposed: str) -> str:
    """The number of a request: what the client calls it where that can be trusted in a log, else a new one."""
    if REQUEST_ID.fullmatch(proposed):
        return proposed
    # Which nobody has to be unable to guess, so it needs no call of the system.
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _tell(scope: Scope, number: str, status: int, seconds: float, told: RawHeaders) -> None:
    route = getattr(scope.get("route"), "path", "unknown")
    state = scope["state"]
    caller, problem = state.get("caller", "nobody"), state.get("problem")
    if "app" in scope and hasattr(scope["app"].state, "runtime"):
        scope["app"].state.runtime.metrics.count_request(route, status, caller=caller, problem=problem)
    model, objects = find_header(told, b"x-stackseg-model") or None, find_header(told, b"x-stackseg-objects") or None
    path = UNPRINTABLE.sub("?", scope["path"])
    level = logging.DEBUG if "/health" in route else logging.INFO
    extras = " ".join(extra for extra in (caller, problem, model, objects) if extra is not None)
    members: dict[str, Any] = {
        "request_id": number,
        "caller": caller,
        "method": scope["method"],
        "path": path,
        "route": route,
        "status": status,
        "seconds": round(seconds, 3),
        "problem": problem,
        "model": model,
        "objects": int(objects) if objects else None,
        "stages": stages_of(find_header(told, b"server-timing")),
    }
    said = {name: value for name, value in members.items() if value is not None}
    arguments = (scope["method"], path, status, seconds, number, extras)
    log.log(level, "%s %s %d %.3fs %s %s", *arguments, extra=logs.fields(**said))


def stages_of(timing: str) -> dict[str, float] | None:
    """Milliseconds by stage, from a Server-Timing header; None without one."""
    stages = STAGE.findall(timing)
    return {name: float(duration) for name, duration in stages} or None


class SafeHeaders:
    """Headers that keep browsers from guessing what an answer is, framing it, or telling others where it came from."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                # The page of the documentation loads what is beside it; no other answer has anything to load.
                page = find_header(headers, b"content-type").startswith("text/html")
                said = {name for name, _ in headers}
                more = _SAFE_FOR_PAGES if page else _SAFE
                message["headers"] = [*headers, *(header for header in more if header[0] not in said)]
            await send(message)

        await self._app(scope, receive, add)


class DrainBody:
    """Receives the rest of a body that was refused, for a while, before the refusal is sent.

    Otherwise the connection would be reset under a client that is still sending, and many clients, Python's own among
    them, then report the broken connection instead of the answer. Clients that asked first (Expect: 100-continue), and
    were not yet told to go on, are answered at once. Where a body is not received to its end, the connection ends.
    """

    def __init__(self, app: ASGIApp, seconds: float = LINGER_SECONDS) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = complete = False

        async def listen() -> Message:
            nonlocal begun, complete
            begun = True
            message = await receive()
            complete = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not complete:
                if begun or not get_header(scope, b"expect"):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._seconds):
                            while not complete:
                                await listen()
                if not complete:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, listen, answer)
