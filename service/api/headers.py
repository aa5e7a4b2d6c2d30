"""Headers of a request as the server hands them over: looked up where they are, without an object around them."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

# Names in lower case, as ASGI has them, and values.
Raw = Iterable[tuple[bytes, bytes]]


def stated(scope: Scope, name: bytes) -> str:
    """The first header of a request by this name, in lower case; "" without one."""
    return found(scope["headers"], name)


def found(headers: Raw, name: bytes) -> str:
    """The same among these."""
    for known, value in headers:
        if known == name:
            return value.decode("latin-1")
    return ""
