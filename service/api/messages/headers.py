"""Headers of requests and responses, read directly from ASGI's list of byte pairs without a wrapper object."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterable

from starlette.types import Scope

# Pairs of name and value. Names are in lower case, as ASGI requires.
RawHeaders = Iterable[tuple[bytes, bytes]]

# Request ids that clients may choose. The pattern prevents forged or very long log lines.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Name of all callers if no API keys are configured.
ANONYMOUS = "anonymous"

# Headers of all responses except HTML pages.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def get_header(scope: Scope, name: bytes) -> str:
    """Return the first request header with this lower-case name, or "" if there is none."""
    return find_header(scope["headers"], name)


def find_header(headers: RawHeaders, name: bytes) -> str:
    """Return the first header with this lower-case name, or "" if there is none."""
    for header, value in headers:
        if header == name:
            return value.decode("latin-1")
    return ""


def choose_request_id(proposed: str) -> str:
    """Return the request id that the client proposes if it is safe to log, else a new one."""
    if REQUEST_ID.fullmatch(proposed):
        return proposed
    # The id may be guessable. Avoiding secure random numbers saves a system call.
    return str(uuid.UUID(int=random.getrandbits(128), version=4))
