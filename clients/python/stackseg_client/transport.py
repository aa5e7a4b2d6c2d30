"""What both clients share about HTTP: settings of the connections, and the translation of errors."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from stackseg_client.errors import ConnectionFailed, InvalidResponse
from stackseg_client.operations import Operation
from stackseg_client.results import SavePath

CONNECT_SECONDS = 10.0
# Time without progress after which a connection is considered lost. Small volumes take milliseconds, but the queue of
# the server may be long.
DEFAULT_TIMEOUT_SECONDS = 3600.0
# The server sends a comment at least every 15 seconds while a client follows a job.
EVENT_TIMEOUT_SECONDS = 60.0


def make_options(
    url: str, key: str | None, timeout: float, ca_file: SavePath | None, *, trust_env: bool
) -> dict[str, Any]:
    """Return the arguments of `httpx2.Client` and `httpx2.AsyncClient`.

    Raises ValueError for an invalid URL, key or file of certificates, and OSError if the file cannot be read.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the URL of a server. Use for example http://localhost:8000.")
    # Keys that were read from a file often end with a line break.
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("The API key contains spaces or special characters. Copy it again, without other text.")
    headers = {"User-Agent": "stackseg-client"} | ({"Authorization": f"Bearer {key}"} if key else {})
    timeouts = httpx2.Timeout(timeout, connect=CONNECT_SECONDS)
    options: dict[str, Any] = {"base_url": url, "headers": headers, "timeout": timeouts, "trust_env": trust_env}
    if ca_file is not None:
        options["verify"] = _trust(Path(ca_file).expanduser().resolve(strict=True))
    return options


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
        raise ConnectionFailed(f"{url} cannot be reached: {error}. {_advise(str(error))}") from error
    except httpx2.TransportError as error:
        reason = f"{type(error).__name__} {error}".strip()
        raise ConnectionFailed(f"The connection to {url} was lost: {reason}.", is_sent=True) from error
    except httpx2.DecodingError as error:
        raise InvalidResponse(f"The response of {url} is damaged: {error}") from error


def _trust(ca_file: Path) -> ssl.SSLContext:
    """Return a context that accepts the certificates in a PEM file, in addition to those of the operating system."""
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca_file)
    except ssl.SSLError as error:
        raise ValueError(f"{ca_file} contains no certificate in the PEM format: {error}") from error
    return context


def _advise(reason: str) -> str:
    """Return what to do if a connection cannot be opened."""
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return "Pass the file of the server's certificate, or of the authority that has signed it, as ca_file=."
    if "[SSL" in reason:
        return "Does the server use HTTPS? If not, its URL begins with http://."
    return "Is the server running?"
