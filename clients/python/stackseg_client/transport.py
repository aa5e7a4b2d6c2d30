"""What both clients share about HTTP: settings of the connections, and the translation of errors."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from stackseg_client.errors import ConnectionFailed, InvalidResponse, parse_problem
from stackseg_client.operations import Operation
from stackseg_client.result_files import SavePath

HttpClient = TypeVar("HttpClient")

CONNECT_SECONDS = 10.0
# Time without progress after which a connection is considered lost. Small volumes take milliseconds, but the queue of
# the server may be long.
DEFAULT_TIMEOUT_SECONDS = 3600.0
# The server sends a comment at least every 15 seconds while a client follows a job.
EVENT_TIMEOUT_SECONDS = 60.0
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXY_ADVICE = "If the server is reached without a proxy, set the variable NO_PROXY, or pass trust_env=False."


def open_connections(
    make_client: Callable[..., HttpClient],
    url: str,
    key: str | None,
    timeout: float,
    ca_file: SavePath | None,
    *,
    trust_env: bool,
) -> HttpClient:
    """Return `httpx2.Client` or `httpx2.AsyncClient` for a server.

    Raises ValueError for an invalid URL, key or file of certificates, or an unusable proxy of the environment, and
    OSError if the certificates cannot be read.
    """
    base_url = _parse_url(url)
    options: dict[str, Any] = {
        "base_url": base_url,
        "headers": {"User-Agent": "stackseg-client"} | _authorize(key, has_user=bool(base_url.userinfo)),
        "timeout": httpx2.Timeout(timeout, connect=CONNECT_SECONDS),
        "trust_env": trust_env,
    }
    if ca_file is not None:
        options["verify"] = _trust(Path(ca_file).expanduser().resolve(strict=True))
    if not trust_env:
        return make_client(**options)
    with _name_environment():
        return make_client(**options)


class Connections:
    """The connections of a synchronous client. A forked process opens its own, because sockets cannot be shared.

    The arguments are those of `open_connections`, whose errors are raised.
    """

    def __init__(self, url: str, *arguments: Any, trust_env: bool) -> None:
        self._url, self._process = url, os.getpid()
        self._open = partial(open_connections, httpx2.Client, url, *arguments, trust_env=trust_env)
        self._http = self._open()

    @contextmanager
    def stream(self, **request: Any) -> Iterator[httpx2.Response]:
        """Send a request, and yield a successful response. Raises ConnectionFailed, InvalidResponse or ProblemError."""
        if self._process != os.getpid():
            self._http, self._process = self._open(), os.getpid()
        with translate_errors(self._url), self._http.stream(**request) as response:
            if response.status_code >= 300:
                raise parse_problem(response.status_code, response.headers, response.read())
            yield response

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def _parse_url(url: str) -> httpx2.URL:
    example = "Use for example http://localhost:8000."
    url = url.strip()
    if not url.lower().startswith(("http://", "https://")) or not {"?", "#"}.isdisjoint(url):
        raise ValueError(f"{url!r} is not the URL of a server. {example}")
    try:
        return httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url!r} is not a URL: {error}. {example}") from error


def _authorize(key: str | None, *, has_user: bool) -> dict[str, str]:
    """Return the header with an API key.

    has_user  whether the URL names a user, which httpx2 sends to the proxy of the server in the header Authorization
    """
    # Keys that were read from a file often end with a line break.
    key = (key or "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("The API key contains spaces or special characters. Copy it again, without other text.")
    if not key:
        return {}
    return {"X-API-Key": key} if has_user else {"Authorization": f"Bearer {key}"}


@contextmanager
def _name_environment() -> Iterator[None]:
    """Name the proxies or certificates of the environment in the errors that they cause."""
    try:
        yield
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        if not getproxies():
            raise
        raise ValueError(f"A proxy of the environment cannot be used: {error} {_PROXY_ADVICE}") from error
    except OSError as error:
        named = ", ".join(f"{name}={os.environ[name]}" for name in _CERTIFICATE_VARIABLES if name in os.environ)
        if not named:
            raise
        raise OSError(f"The certificates that the environment names ({named}) cannot be read: {error}") from error


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
    """Translate the errors of httpx2 to those of this package, which do not contain the password of a URL."""
    url = re.sub(r"//[^/@]*@", "//", url)
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise ConnectionFailed(f"{url} cannot be reached: {error}. {_advise(url, str(error))}") from error
    except httpx2.ProxyError as error:
        raise ConnectionFailed(f"{url} cannot be reached: {error}. {_PROXY_ADVICE}") from error
    except httpx2.TimeoutException as error:
        raise ConnectionFailed(
            f"The connection to {url} was lost: {type(error).__name__}, no progress within timeout= seconds. Increase"
            " timeout, or submit a job.",
            is_sent=True,
        ) from error
    except httpx2.TransportError as error:
        reason = f"{type(error).__name__} {error}".strip()
        raise ConnectionFailed(f"The connection to {url} was lost: {reason}.", is_sent=True) from error
    except httpx2.DecodingError as error:
        raise InvalidResponse(f"The response of {url} is damaged: {error}") from error


def _trust(ca_file: Path) -> ssl.SSLContext:
    """Return a context that accepts the certificates in a PEM file, in addition to those of the operating system."""
    if ca_file.is_dir():
        raise IsADirectoryError(f"{ca_file} is a folder. Specify the PEM file of the certificate.")
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca_file)
    except ssl.SSLError as error:
        raise ValueError(f"{ca_file} contains no certificate in the PEM format: {error}") from error
    return context


def _advise(url: str, reason: str) -> str:
    """Return what to do if a connection cannot be opened."""
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return "Pass the file of the server's certificate, or of the authority that has signed it, as ca_file=."
    if "[SSL" in reason:
        return "Does the server use HTTPS? If not, its URL begins with http://."
    proxy = _find_proxy(url)
    if proxy is not None:
        return f"Is the server running? The environment names the proxy {proxy} for it. {_PROXY_ADVICE}"
    return "Is the server running?"


def _find_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, without its password."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme.lower(), proxies.get("all"))
    if proxy is None or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy.rpartition("@")[2]
