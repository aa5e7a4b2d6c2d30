"""Heads that the application shall not see, and answers that a connection gives without it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from service.api.messages.headers import SECURITY_HEADERS
from service.api.messages.problems import PROBLEM_TYPE, problem_document

# Limit of a request line with headers, and of chunk headers and trailers.
MAX_HEAD_BYTES = 2**16
# Headers of a request, each of which is an object that all middleware looks at.
MAX_HEADERS = 100
# Parameters in the address of a request, which FastAPI parses before any route does.
MAX_PARAMETERS = 100
# Digits of a Content-Length: leading zeros could be as many as fit into a head.
MAX_LENGTH_DIGITS = 19

Headers = Sequence[tuple[bytes, bytes]]


class Refused(ValueError):
    """Request head that the application shall not see; the message goes to the client."""


def check_head(version: str, method: bytes, url: bytes, headers: Headers) -> None:
    """Raise Refused for a head that is too large, or that of another protocol than this service speaks."""
    if version not in {"1.0", "1.1"}:
        raise Refused("This service speaks HTTP/1.1 and HTTP/1.0.")
    if method == b"CONNECT":
        raise Refused("This service is no proxy.")
    if len(headers) > MAX_HEADERS:
        raise Refused(f"The request has more than {MAX_HEADERS} headers.")
    if url.count(b"&") >= MAX_PARAMETERS:
        raise Refused(f"The address has more than {MAX_PARAMETERS} parameters.")
    if len(url) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise Refused("The head of the request is too long.")


def check_headers(version: str, headers: Headers) -> None:
    """Raise Refused for headers whose meaning another server might read differently."""
    modern, hosts = version == "1.1", len(_find_all(headers, b"host"))
    if hosts > 1 or (not hosts and modern):
        # RFC 9112, 3.2: a proxy before this service might go by another host than the service does.
        raise Refused("The request must name one host.")
    if any(len(value) > MAX_LENGTH_DIGITS for value in _find_all(headers, b"content-length")):
        raise Refused(f"A Content-Length has {MAX_LENGTH_DIGITS} digits at most.")
    codings = [value.lower() for value in _find_all(headers, b"transfer-encoding")]
    if codings and (codings != [b"chunked"] or not modern):
        # The content of the chunks would be taken for the file. RFC 9112, 6.1: HTTP/1.0 has no chunks.
        raise Refused("A body comes as it is or, in HTTP/1.1, in chunks: no other Transfer-Encoding is read.")


def _find_all(headers: Headers, name: bytes) -> list[bytes]:
    return [value for known, value in headers if known == name]


class Refusal(NamedTuple):
    """The last answer on a connection: a problem document as the application sends it, with `more` headers."""

    status: HTTPStatus
    slug: str
    reason: str
    more: Mapping[str, str] = {}

    def encode(self, request_id: str, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the bytes of the answer to the request with this id."""
        content = json.dumps(problem_document(self.slug, self.status, self.reason, request_id)).encode()
        headers = {
            **SECURITY_HEADERS,
            **self.more,
            "Content-Type": PROBLEM_TYPE,
            "X-Request-ID": request_id,
            "Connection": "close",
        }
        lines = [f"HTTP/1.1 {self.status} {self.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"{name.decode()}: {value.decode()}" for name, value in default_headers]
        return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content
