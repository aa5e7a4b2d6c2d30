"""What both clients share about HTTP: settings of the connections, and the translation of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from stackseg_client.errors import ConnectionFailed, InvalidResponse
from stackseg_client.operations import Operation

CONNECT_SECONDS = 10.0
# Time without progress after which a connection is considered lost. Small volumes take milliseconds, but the queue of
# the server may be long.
DEFAULT_TIMEOUT_SECONDS = 3600.0
# The server sends a comment at least every 15 seconds while a client follows a job.
EVENT_TIMEOUT_SECONDS = 60.0


def make_options(url: str, key: str | None, timeout: float, *, trust_env: bool) -> dict[str, Any]:
    """Return the arguments of `httpx2.Client` and `httpx2.AsyncClient`. Raises ValueError for an invalid URL."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the URL of a server. Use for example http://localhost:8000.")
    headers = {"User-Agent": "stackseg-client"} | ({"Authorization": f"Bearer {key}"} if key else {})
    timeouts = httpx2.Timeout(timeout, connect=CONNECT_SECONDS)
    return {"base_url": url, "headers": headers, "timeout": timeouts, "trust_env": trust_env}


def make_request(operation: Operation[Any], content: Any) -> dict[str, Any]:
    """Return the arguments of `stream()` for an operation with this content."""
    return {
        "method": operation.method,
        "url": operation.path,
        "params": operation.parameters,
        "headers": operation.headers,
        "content": content,
    }


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Translate the errors of httpx2 to those of this package."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise ConnectionFailed(f"{url} cannot be reached: {error}. Is the server running?") from error
    except httpx2.TransportError as error:
        reason = f"{type(error).__name__} {error}".strip()
        raise ConnectionFailed(f"The connection to {url} was lost: {reason}.", is_sent=True) from error
    except httpx2.DecodingError as error:
        raise InvalidResponse(f"The response of {url} is damaged: {error}") from error
