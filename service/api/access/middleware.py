"""ASGI middleware for every HTTP request: security headers, bodies of refused requests, and incomplete responses."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.messages.headers import SECURITY_HEADERS, find_header, get_header
from service.core.errors import StackSegError, StorageUnavailable
from service.core.hardware.devices import translate_error

log = logging.getLogger(__name__)

# Time limit for receiving the rest of the body of a refused request.
DRAIN_SECONDS = 20.0

# Swagger UI uses inline images and styles.
PAGE_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
PAGE_SECURITY_HEADERS = SECURITY_HEADERS | {"Content-Security-Policy": PAGE_POLICY}


def _encode_headers(headers: dict[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.lower().encode(), value.encode()) for name, value in headers.items())


_RAW_SECURITY_HEADERS = _encode_headers(SECURITY_HEADERS)
_RAW_PAGE_SECURITY_HEADERS = _encode_headers(PAGE_SECURITY_HEADERS)


class SecurityHeaders:
    """Middleware that adds headers to prevent MIME sniffing, framing and referrer leaks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                # Only HTML pages may load scripts and styles. Other responses must not load anything.
                is_html_page = find_header(headers, b"content-type").startswith("text/html")
                existing_names = {name for name, _ in headers}
                security_headers = _RAW_PAGE_SECURITY_HEADERS if is_html_page else _RAW_SECURITY_HEADERS
                message["headers"] = [
                    *headers,
                    *(header for header in security_headers if header[0] not in existing_names),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class DrainBody:
    """Middleware that receives the rest of a request body, for a limited time, before it sends an error response.

    Without this middleware, the connection would be reset while the client is still sending. Many clients, including
    Python's http.client, would then report a broken connection instead of the error response. If the client has sent
    `Expect: 100-continue` and is still waiting to send its body, the response is sent immediately. If the body is not
    received completely, the connection is closed.
    """

    def __init__(self, app: ASGIApp, limit_seconds: float = DRAIN_SECONDS) -> None:
        self._app, self._limit_seconds = app, limit_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = is_complete = False

        async def receive_message() -> Message:
            nonlocal has_begun, is_complete
            has_begun = True
            message = await receive()
            is_complete = not message.get("more_body", False)
            return message

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not is_complete:
                if has_begun or not get_header(scope, b"expect"):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._limit_seconds):
                            while not is_complete:
                                await receive_message()
                if not is_complete:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive_message, send_after_body)


class EndIncompleteResponses:
    """Middleware that ends a response whose content becomes unavailable while it is sent, with one line in the log.

    The disk or the memory may fail, or the file may be deleted. The status has been sent, so the server can only close
    the connection: the client sees that Content-Length bytes, or the last chunk, are missing. Other errors are bugs,
    and are raised.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_message(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_message)
        except (StackSegError, OSError, MemoryError, RuntimeError) as error:
            cause: BaseException = error
            # Starlette raises RuntimeErrors from an error that can no longer be answered, one in each layer.
            while type(cause) is RuntimeError and cause.__cause__ is not None:
                cause = cause.__cause__
            cause = translate_error(cause)
            if not has_started or not isinstance(cause, StackSegError | OSError):
                raise
            scope["state"]["problem"] = getattr(cause, "slug", StorageUnavailable.slug)
            log.warning("the response is incomplete: %s: %s", type(cause).__name__, cause)
