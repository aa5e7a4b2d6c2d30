"""What happens around every request: a number, a line in the log, and an ear for clients that are still sending."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("service.access")

LINGER_SECONDS = 20.0


class RequestLog:
    """Gives every request a number, and one line in the log when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = number
        began, status, told = time.perf_counter(), 500, {}

        async def note(message: Message) -> None:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
                told = {name: value.decode("latin-1") for name, value in message["headers"]}
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self._tell(scope, number, status, time.perf_counter() - began, told)

    @staticmethod
    def _tell(scope: Scope, number: str, status: int, seconds: float, told: dict[bytes, str]) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        if "app" in scope and hasattr(scope["app"].state, "runtime"):
            scope["app"].state.runtime.metrics.count_request(route, status)
        extras = [told[name] for name in (b"x-stackseg-model", b"x-stackseg-objects") if name in told]
        path = re.sub(r"[^\x20-\x7e]", "?", scope["path"])
        level = logging.DEBUG if "/health" in route else logging.INFO
        log.log(level, "%s %s %d %.3fs %s %s", scope["method"], path, status, seconds, number, " ".join(extras))


class Lingering:
    """Receives the rest of a body that was refused, for a while, before the refusal is sent.

    Otherwise the connection would be reset under a client that is still sending, and many clients, Python's own among
    them, then report the broken connection instead of the answer. Clients that asked first (Expect: 100-continue) are
    told at once.
    """

    def __init__(self, app: ASGIApp, seconds: float = LINGER_SECONDS) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "expect" in Headers(scope=scope):
            await self._app(scope, receive, send)
            return
        complete = False

        async def listen() -> Message:
            nonlocal complete
            message = await receive()
            complete = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not complete:
                try:
                    async with asyncio.timeout(self._seconds):
                        while not complete:
                            await listen()
                except TimeoutError:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, listen, answer)
