"""Headers of requests and answers, read from ASGI's list of byte pairs without building an object around it."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

# Names, in lower case as ASGI requires, and values.
RawHeaders = Iterable[tuple[bytes, bytes]]


def get_header(scope: Scope, name: bytes) -> str:
    """Return the first header of a request by this name, given in lower case; "" without one."""
    return find_header(scope["headers"], name)


def find_header(headers: RawHeaders, name: bytes) -> str:
    """Return the first of these headers by this name, given in lower case; "" without one."""
    for known, value in headers:
        if known == name:
            return value.decode("latin-1")
    return ""
