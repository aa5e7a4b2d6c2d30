"""Checks of request heads, and error responses that a connection sends without calling the application."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from service.api.messages.error_responses import PROBLEM_MEDIA_TYPE, build_problem_document
from service.api.messages.headers import SECURITY_HEADERS

# Maximum size of the request line and all headers together, and of chunk headers and trailers.
MAX_HEAD_BYTES = 2**16
# Maximum number of headers. Every middleware searches the list of headers, so a long list would slow down all of them.
MAX_HEADERS = 100
# Maximum number of query parameters, which FastAPI parses before it calls a route.
MAX_PARAMETERS = 100
# Maximum number of digits in a Content-Length. Without a limit, leading zeros could fill the request head.
MAX_LENGTH_DIGITS = 19

Headers = Sequence[tuple[bytes, bytes]]


class HeadError(ValueError):
    """Error for a request head that must not reach the application. Its message is sent to the client."""


def check_head(version: str, method: bytes, url: bytes, headers: Headers) -> None:
    """Raise HeadError if a request head is too large, or uses an unsupported HTTP version or method."""
    if version not in {"1.0", "1.1"}:
        raise HeadError("This HTTP version is not supported. Use HTTP/1.1 or HTTP/1.0.")
    if method == b"CONNECT":
        raise HeadError("The method CONNECT is not supported, because this service is not a proxy.")
    if len(headers) > MAX_HEADERS:
        raise HeadError(f"The request has more than {MAX_HEADERS} headers.")
    if url.count(b"&") >= MAX_PARAMETERS:
        raise HeadError(f"The URL has more than {MAX_PARAMETERS} parameters.")
    if len(url) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise HeadError(f"The URL and the headers are longer than {MAX_HEAD_BYTES:,} bytes in total.")


def check_framing_headers(version: str, headers: Headers) -> None:
    """Raise HeadError for headers that a proxy in front of this service might interpret differently."""
    is_http_1_1, host_count = version == "1.1", len(_find_values(headers, b"host"))
    if host_count > 1 or (not host_count and is_http_1_1):
        # If there are several Host headers, a proxy might use a different one (RFC 9112, 3.2).
        raise HeadError("The request must have exactly one Host header, with one host.")
    if any(len(value) > MAX_LENGTH_DIGITS for value in _find_values(headers, b"content-length")):
        raise HeadError(f"Content-Length has more than {MAX_LENGTH_DIGITS} digits.")
    codings = [value.lower() for value in _find_values(headers, b"transfer-encoding")]
    if codings and (codings != [b"chunked"] or not is_http_1_1):
        # With another coding, the encoded bytes would be stored as the file. HTTP/1.0 has no chunks (RFC 9112, 6.1).
        raise HeadError(
            "This Transfer-Encoding is not supported. Send a Content-Length or, in HTTP/1.1, send the body in chunks."
        )


def _find_values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for header, value in headers if header == name]


class RefusalResponse(NamedTuple):
    """Last response on a connection: a problem document in the same format as those of the application.

    reason         detail of the problem document
    extra_headers  headers in addition to the standard ones
    """

    status: HTTPStatus
    slug: str
    reason: str
    extra_headers: Mapping[str, str] = {}

    def encode(self, request_id: str, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the bytes of the response to the request with this id."""
        content = json.dumps(build_problem_document(self.slug, self.status, self.reason, request_id)).encode()
        headers = {
            **SECURITY_HEADERS,
            **self.extra_headers,
            "Content-Type": PROBLEM_MEDIA_TYPE,
            "X-Request-ID": request_id,
            "Connection": "close",
        }
        lines = [f"HTTP/1.1 {self.status} {self.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"{name.decode()}: {value.decode()}" for name, value in default_headers]
        return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content
