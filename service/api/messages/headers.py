"""Headers of requests and answers, read from ASGI's list of byte pairs without building an object around it."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterable

from starlette.types import Scope

# Names, in lower case as ASGI requires, and values.
RawHeaders = Iterable[tuple[bytes, bytes]]

# Ids that a client may give its request: none can forge a line of the log, or fill it.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Name of every caller where no API keys are configured.
ANONYMOUS = "anonymous"

# For all answers but pages.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def get_header(scope: Scope, name: bytes) -> str:
    """Return the first header of a request by this name, given in lower case; "" without one."""
    return find_header(scope["headers"], name)


def find_header(headers: RawHeaders, name: bytes) -> str:
    """Return the first of these headers by this name, given in lower case; "" without one."""
    for known, value in headers:
        if known == name:
            return value.decode("latin-1")
    return ""


def choose_request_id(proposed: str) -> str:
    """Return the id that the client proposes where it is harmless in a log, else a new one."""
    if REQUEST_ID.fullmatch(proposed):
        return proposed
    # It need not be hard to guess, which saves a system call.
    return str(uuid.UUID(int=random.getrandbits(128), version=4))
