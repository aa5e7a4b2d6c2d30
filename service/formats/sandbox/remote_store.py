"""Zarr stores that lie elsewhere: on S3, Google and Azure by obstore (the extra `remote`), and on web servers.

Credentials come from the environment alone. Nothing outside of the URL that a store was opened with is asked for, and
redirects of web servers are not followed, which could lead anywhere. Those of object storage are: obstore has no option
against it, but does not leave https for them, and sends credentials to no other host. What comes is parsed in a
child process of `sandbox.reader`.
"""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, Self
from urllib.parse import quote, unquote, urlsplit

from service.core.errors import BadFile, BadParameter, Cancelled, StackSegError, StorageUnavailable, TooLarge
from service.core.types import Cancelling, never
from service.formats.zarr.store import Part, place_part, split_key

# For one object, and for a server to say anything at all.
OBJECT_SECONDS, SILENT_SECONDS = 60.0, 10.0
# How often it is asked whether the caller still waits for an answer.
POLL_SECONDS = 0.2
# Objects that one reader asks for at the same time.
_AT_ONCE = 16
# Of all that is asked for at a time and held in memory, such as one large chunk.
_MOST_BYTES = 2**29
_READ_BYTES = 2**18
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
# Schemes of obstore, and variables of the environment one of which says who asks. Without them nobody in particular
# does: the libraries would look for credentials at addresses of the host's network.
_CLOUDS: Mapping[str, tuple[str, ...]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"),
    "az": (
        *(f"AZURE_STORAGE_{key}_KEY" for key in ("ACCOUNT", "ACCESS", "MASTER")),
        *(f"AZURE_STORAGE_{name}" for name in ("SAS_", "TOKEN", "CLIENT_", "USE_EMULATOR")),
        *(f"AZURE_{name}" for name in ("CLIENT_", "FEDERATED_TOKEN_FILE", "MSI_ENDPOINT", "IDENTITY_ENDPOINT")),
    ),
}
SCHEMES = (*_CLOUDS, *_CONNECTIONS)

_log = logging.getLogger(__name__)


class _Backend(Protocol):
    """Objects below a prefix; safe in several threads."""

    def get(self, part: Part) -> bytes | None:
        """Return a part of an object, None where there is none. Raises BadFile, StorageUnavailable."""

    def close(self) -> None:
        """Give up what is being read, as far as that is possible."""


def is_url(place: str) -> bool:
    """Return whether a place is written as a URL."""
    return "://" in place


def check_url(url: str) -> str:
    """Return the URL of a store or of a prefix, without a slash at its end. Raises BadParameter for one of no use."""
    try:
        parts = urlsplit(url)
        is_plain = not (parts.query or parts.fragment or parts.username or parts.password or "@" in parts.netloc)
        is_known = parts.scheme in SCHEMES and parts.hostname is not None
        _ = parts.port
    except ValueError:
        is_plain = is_known = False
    if not is_known or not is_plain:
        raise BadParameter(
            f"The URL of a store is s3://BUCKET/PATH, or one of {', '.join(SCHEMES[1:])}, without credentials, a query"
            " or a fragment; credentials belong into the environment."
        )
    return url.rstrip("/")


class RemoteStore:
    """The store at a URL; a `formats.zarr.store.Store` that may be asked from several threads.

    Raises BadParameter for a URL of no use, and for one that needs the extra `remote` where it is not installed.
    """

    def __init__(self, url: str) -> None:
        url = check_url(url)
        scheme = urlsplit(url).scheme
        self.name = unquote(url.rpartition("/")[2])
        self._backend: _Backend = _Cloud(url) if scheme in _CLOUDS else _WebServer(url)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "fetch")

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """Read parts of objects, None for each that is not there. Raises BadFile, StorageUnavailable."""
        return self.fetch(parts, never)

    def fetch(self, parts: Sequence[Part], cancelled: Cancelling) -> list[bytes | None]:
        """Read parts of objects, several at a time, and give up once nobody waits for them.

        Raises BadFile for keys that lead elsewhere and for what is not as long as it should be, TooLarge for more than
        is held in memory, StorageUnavailable where the server fails or takes too long, and Cancelled.
        """
        if sum(max(part.size, 0) for part in parts) > _MOST_BYTES:
            raise TooLarge("The store is to be read in parts of more than 512 MiB; write it with smaller chunks.")
        for part in parts:
            split_key(part.key)
        futures: list[Future[bytes | None]] = [self._threads.submit(self._backend.get, part) for part in parts]
        rest: set[Future[bytes | None]] = set(futures)
        while rest:
            done, rest = wait(rest, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if cancelled():
                raise Cancelled("given up while its store was read")
        return [future.result() for future in futures]

    def close(self) -> None:
        """Give up what is still being read."""
        self._backend.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WebServer:
    """Files below a URL of HTTP. Each thread has a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._local = threading.local()
        self._connections = list[http.client.HTTPConnection]()
        self._closed = False

    def get(self, part: Part) -> bytes | None:
        """Return a part of a file, None where there is none. Raises BadFile, StorageUnavailable."""
        try:
            try:
                return self._get(part)
            except (http.client.RemoteDisconnected, ConnectionError):
                # The server may have closed a connection that it kept for a while.
                return self._get(part)
        except TimeoutError:
            raise _unavailable(part.key, "the server takes too long") from None
        except http.client.IncompleteRead:
            raise _cut_short(part.key) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Their texts may tell of addresses.
            raise _unavailable(part.key, f"the connection failed, {type(error).__name__}") from error

    def close(self) -> None:
        """Close all connections, which ends what is being read from them."""
        self._closed = True
        for connection in self._connections:
            if (used := connection.sock) is not None:
                with suppress(OSError):
                    used.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _get(self, part: Part) -> bytes | None:
        if self._closed:
            raise Cancelled("given up while its store was read")
        connection = self._connection()
        try:
            content = self._ask(connection, part)
        except BaseException:
            connection.close()
            raise
        return content

    def _ask(self, connection: http.client.HTTPConnection, part: Part) -> bytes | None:
        headers = {"Accept-Encoding": "identity", "User-Agent": "stackseg"}
        if part.start is not None:
            end = part.start + part.size - 1
            headers["Range"] = f"bytes={part.start}" if part.start < 0 else f"bytes={part.start}-{end}"
        connection.request("GET", f"{self._url.path}/{quote(part.key)}", headers=headers)
        answer = connection.getresponse()
        if answer.status == (200 if part.start is None else 206):
            return _receive(answer, part)
        connection.close()
        if answer.status in {404, 410}:
            return None
        raise _explain(part.key, answer.status)

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._local, "connection"):
            host, port = self._url.hostname or "", self._url.port
            self._local.connection = _CONNECTIONS[self._url.scheme](host, port, timeout=SILENT_SECONDS)
            self._connections.append(self._local.connection)
        connection: http.client.HTTPConnection = self._local.connection
        return connection


def _receive(answer: http.client.HTTPResponse, part: Part) -> bytes:
    """Receive no more bytes than the part may have, for no longer than an object may take."""
    deadline, blocks, size = time.monotonic() + OBJECT_SECONDS, list[bytes](), 0
    while block := answer.read1(_READ_BYTES):
        blocks.append(block)
        size += len(block)
        if size > part.size:
            raise BadFile(f"{part.key[:80]} of the Zarr store takes more than {part.size} bytes.")
        if time.monotonic() > deadline:
            raise TimeoutError
    if (part.start is not None and size != part.size) or answer.length:
        raise _cut_short(part.key)
    # The connection is then free for another part.
    answer.close()
    return b"".join(blocks)


class _Cloud:
    """Objects below a URL of S3, Google or Azure."""

    def __init__(self, url: str) -> None:
        try:
            import obstore  # noqa: PLC0415 - optional
        except ImportError:
            raise BadParameter(
                "Stores of S3, Google and Azure need the extra: pip install 'stackseg[remote]'."
            ) from None
        open_url: Callable[..., Any] = obstore.store.from_url
        self._library, self._error = obstore, obstore.exceptions.BaseError
        variables = _CLOUDS[urlsplit(url).scheme]
        is_known = any(name.startswith(variables) and value for name, value in os.environ.items())
        # Options of the client replace all that the environment says of it, as AWS_ALLOW_HTTP does.
        http = os.environ.get(variables[0].partition("_")[0] + "_ALLOW_HTTP", "").lower() == "true"
        limits = {"timeout": f"{OBJECT_SECONDS:g}s", "connect_timeout": f"{SILENT_SECONDS:g}s", "allow_http": http}
        retries = {"max_retries": 2, "retry_timeout": timedelta(seconds=OBJECT_SECONDS)}
        options: dict[str, Any] = {} if is_known else {"skip_signature": True}
        try:
            # The library reads the variables of the environment, such as AWS_ENDPOINT.
            self._store: Any = open_url(url, client_options=limits, retry_config=retries, **options)
        except (self._error, ValueError) as error:
            reason = str(error).partition("\n")[0][:160]
            raise BadParameter(f"The store cannot be opened with the service's environment: {reason}") from error

    def get(self, part: Part) -> bytes | None:
        """Return a part of an object, None where there is none. Raises BadFile, StorageUnavailable."""
        try:
            return self._get(part)
        except FileNotFoundError:
            return None
        except self._error as error:
            # The library's text tells of addresses, and has the status in it.
            name = type(error).__name__
            _log.debug("a store failed: %s", name)
            if name in {"PermissionDeniedError", "UnauthenticatedError"}:
                raise _explain(part.key, 403) from None
            if "status code: 416" in str(error):
                raise _cut_short(part.key) from None
            raise _unavailable(part.key, f"the request failed, {name}") from None

    def _get(self, part: Part) -> bytes | None:
        if part.start is None:
            answer = self._library.get(self._store, part.key)
            place_part(part, answer.meta["size"])
            return bytes(answer.bytes())
        start = part.start
        if start < 0:
            # Azure gives no last bytes of an object without being told where they begin.
            start, _ = place_part(part, self._library.head(self._store, part.key)["size"])
        content = bytes(self._library.get_range(self._store, part.key, start=start, length=part.size))
        if len(content) != part.size:
            raise _cut_short(part.key)
        return content

    def close(self) -> None:
        """Leave what is being read to its time limit."""


def _explain(key: str, status: int) -> StackSegError:
    """Return the error for an answer that has no object."""
    if status in {401, 403, 407}:
        return BadFile(f"The store refuses {key[:80]} (status {status}): the service has no credentials for it.")
    if 300 <= status < 400:
        return BadFile(f"The store redirects {key[:80]}, which is not followed; name the address that it leads to.")
    if status == 416:
        return _cut_short(key)
    if status == 200:
        return BadFile("The server gives no parts of files (HTTP ranges), which shards need; write the image without.")
    return _unavailable(key, f"status {status}")


def _cut_short(key: str) -> BadFile:
    return BadFile(f"{key[:80]} of the Zarr store is cut short. Copy or export it again.")


def _unavailable(key: str, reason: str) -> StorageUnavailable:
    return StorageUnavailable(f"The store of the image cannot be read now ({key[:80]}: {reason}); try again later.")
