"""Request and response headers, read directly from ASGI's lists of (name, value) byte strings without a wrapper."""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from collections.abc import Iterable

from starlette.types import Scope

# Key in the request's state for the time (event loop clock) by which the client must have received the response.
SEND_DEADLINE_KEY = "send_deadline"
# Pairs of a name and a value. Names are in lower case, as ASGI requires.
RawHeaders = Iterable[tuple[bytes, bytes]]

# Pattern of request ids that clients may choose. It prevents forged or very long log lines.
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Name of all callers if no API keys are configured.
ANONYMOUS = "anonymous"

# Media type of a file of unknown type. The OpenAPI document lists it in addition to the specific types, because
# generated clients do not support most other types.
OCTET_STREAM = "application/octet-stream"
BINARY_CONTENT = {"schema": {"type": "string", "format": "binary"}}

# Security headers of all responses except HTML pages.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def get_header(scope: Scope, name: bytes) -> str:
    """Return the value of the first request header with this lower-case name, or "" if there is none."""
    return find_header(scope["headers"], name)


def get_list_header(scope: Scope, name: bytes) -> str:
    """Return the values of all request headers with this lower-case name as one list (RFC 9110, section 5.3)."""
    return ", ".join(value.decode("latin-1") for header_name, value in scope["headers"] if header_name == name)


def find_header(headers: RawHeaders, name: bytes) -> str:
    """Return the value of the first header with this lower-case name, or "" if there is none."""
    for header_name, value in headers:
        if header_name == name:
            return value.decode("latin-1")
    return ""


def make_url_path(scope: Scope, path: str) -> str:
    """Return the URL path of a resource for the client, including the path prefix of a reverse proxy."""
    return f"{scope.get('root_path', '')}{path}"


def choose_request_id(proposed_id: str) -> str:
    """Return the request id that the client proposes if it is safe to log, or else a new id."""
    if REQUEST_ID_PATTERN.fullmatch(proposed_id):
        return proposed_id
    # Request ids need not be unpredictable, and a non-cryptographic generator saves a system call.
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def set_send_timeout(scope: Scope, seconds: float) -> None:
    """Close the connection if the client has not received the response to this request within `seconds`."""
    scope.setdefault("state", {})[SEND_DEADLINE_KEY] = asyncio.get_running_loop().time() + seconds
