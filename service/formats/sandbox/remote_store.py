"""Remote Zarr stores on web servers, and on S3, Google Cloud and Azure through obstore (the `remote` extra).

Credentials come only from the environment. Only objects below the URL of the store are requested. Redirects from web
servers are not followed, because they could lead to any host. Redirects from object storage are followed, because
obstore cannot disable them. However, obstore does not follow redirects to plain HTTP and does not send credentials to
other hosts. The contents are parsed in a child process of `sandbox.reader`.
"""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, Self
from urllib.parse import quote, unquote, urlsplit

from service.core.errors import BadFile, BadParameter, Cancelled, StackSegError, StorageUnavailable, TooLarge
from service.core.types import CancellationCheck, never_cancelled
from service.formats.sandbox.limited_response import OBJECT_TIMEOUT_SECONDS, RESPONSE_TIMEOUT_SECONDS, LimitedResponse
from service.formats.zarr.store import FileRange, resolve_range, split_key

# Interval between checks for cancellation.
POLL_SECONDS = 0.2
# Maximum number of objects that are requested from a store concurrently.
_MAX_CONCURRENT_REQUESTS = 16
# Maximum total size of the ranges that are fetched together and held in memory, for example one large chunk.
_MAX_FETCH_BYTES = 2**29
_RECEIVE_CHUNK_BYTES = 2**18
_CONNECTION_TYPES = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
# Schemes that obstore supports, and prefixes of environment variables that indicate the presence of credentials. If no
# such variable is set, requests are anonymous, because the libraries would otherwise search for credentials at
# addresses in the host's network.
_CREDENTIAL_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"),
    "az": (
        *(f"AZURE_STORAGE_{key}_KEY" for key in ("ACCOUNT", "ACCESS", "MASTER")),
        *(f"AZURE_STORAGE_{name}" for name in ("SAS_", "TOKEN", "CLIENT_", "USE_EMULATOR")),
        *(f"AZURE_{name}" for name in ("CLIENT_", "FEDERATED_TOKEN_FILE", "MSI_ENDPOINT", "IDENTITY_ENDPOINT")),
    ),
}
SCHEMES = (*_CREDENTIAL_VARIABLES, *_CONNECTION_TYPES)

_log = logging.getLogger(__name__)


class _Backend(Protocol):
    """Thread-safe access to the objects below a prefix."""

    def get(self, file_range: FileRange) -> bytes | None:
        """Return a range of an object, or None if the object does not exist. Raises BadFile, StorageUnavailable."""

    def close(self) -> None:
        """Cancel running requests if possible."""


def is_url(location: str) -> bool:
    """Return whether a location is a URL."""
    return "://" in location


def check_url(url: str) -> str:
    """Return the URL of a store or a prefix without trailing slashes. Raises BadParameter if it is not supported."""
    try:
        url_parts = urlsplit(url)
        is_plain = not (
            url_parts.query or url_parts.fragment or url_parts.username or url_parts.password or "@" in url_parts.netloc
        )
        # Some servers treat a backslash like a slash, which would lead outside the store.
        is_plain = is_plain and "\\" not in unquote(url)
        is_supported = url_parts.scheme in SCHEMES and url_parts.hostname is not None
        _ = url_parts.port
    except ValueError:
        is_plain = is_supported = False
    if not is_supported or not is_plain:
        raise BadParameter(
            "The URL of the store is not valid. Use s3://BUCKET/PATH or a URL with one of the schemes"
            f" {', '.join(SCHEMES[1:])}, without credentials, a query or a fragment. Set credentials in the environment"
            " of the service."
        )
    return url.rstrip("/")


# Suffixes of formats that are read only from files.
_FILE_SUFFIXES = (".tif", ".tiff", ".czi", ".nd2", ".lif", ".oib", ".ims", ".zip", ".ozx")


class RemoteStore:
    """Thread-safe implementation of `formats.zarr.store.Store` for a store at a URL.

    Raises BadParameter if the URL is not supported, or if the URL requires the `remote` extra and this extra is not
    installed.
    """

    def __init__(self, url: str) -> None:
        url = check_url(url)
        scheme = urlsplit(url).scheme
        self.name = unquote(url.rpartition("/")[2])
        if self.name.lower().endswith(_FILE_SUFFIXES):
            raise BadParameter(f"Only OME-Zarr images are read from URLs. Download {self.name}, and segment the file.")
        self._backend: _Backend = _ObjectStorage(url) if scheme in _CREDENTIAL_VARIABLES else _WebServer(url)
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS, "fetch")

    def read(self, ranges: Sequence[FileRange]) -> list[bytes | None]:
        """Read ranges of objects, or None for each missing object. Raises BadFile, StorageUnavailable."""
        return self.fetch(ranges, never_cancelled)

    def fetch(self, ranges: Sequence[FileRange], cancelled: CancellationCheck) -> list[bytes | None]:
        """Read ranges of objects concurrently. The result contains None for each missing object.

        Raises BadFile if a key leads outside the store or an object has the wrong length, TooLarge if the ranges exceed
        the memory limit, StorageUnavailable if the server fails or takes too long, and Cancelled if `cancelled` returns
        True.
        """
        if sum(max(file_range.size, 0) for file_range in ranges) > _MAX_FETCH_BYTES:
            raise TooLarge(
                "The chunks of the store are too large: one read requires more than 512 MiB. Save the image with"
                " smaller chunks."
            )
        for file_range in ranges:
            split_key(file_range.key)
        futures: list[Future[bytes | None]] = [
            self._threads.submit(self._backend.get, file_range) for file_range in ranges
        ]
        pending_futures: set[Future[bytes | None]] = set(futures)
        while pending_futures:
            done_futures, pending_futures = wait(pending_futures, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done_futures:
                future.result()
            if cancelled():
                raise Cancelled("The request was canceled while the Zarr store was being read.")
        return [future.result() for future in futures]

    def close(self) -> None:
        """Cancel running requests."""
        self._backend.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WebServer:
    """Files below an HTTP URL. Each thread has its own connection."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._thread_local = threading.local()
        self._connections = list[http.client.HTTPConnection]()
        self._is_closed = False

    def get(self, file_range: FileRange) -> bytes | None:
        """Return a range of a file, or None if the file does not exist. Raises BadFile, StorageUnavailable."""
        try:
            try:
                return self._get(file_range)
            except (http.client.RemoteDisconnected, ConnectionError):
                # The server may have closed an idle connection.
                return self._get(file_range)
        except TimeoutError:
            raise _make_unavailable_error(file_range.key, "the server takes too long to respond") from None
        except http.client.IncompleteRead:
            raise _make_truncated_error(file_range.key) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            # The error message may contain addresses, so only the name of the error type is shown.
            raise _make_unavailable_error(
                file_range.key, f"the connection failed with {type(error).__name__}"
            ) from error

    def close(self) -> None:
        """Close all connections, which cancels running requests."""
        self._is_closed = True
        for connection in self._connections:
            if (open_socket := connection.sock) is not None:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _get(self, file_range: FileRange) -> bytes | None:
        if self._is_closed:
            raise Cancelled("The request was canceled while the Zarr store was being read.")
        connection = self._get_connection()
        try:
            content = self._request(connection, file_range)
        except BaseException:
            connection.close()
            raise
        return content

    def _request(self, connection: http.client.HTTPConnection, file_range: FileRange) -> bytes | None:
        headers = {"Accept-Encoding": "identity", "User-Agent": "stackseg"}
        if file_range.start is not None:
            end = file_range.start + file_range.size - 1
            headers["Range"] = (
                f"bytes={file_range.start}" if file_range.start < 0 else f"bytes={file_range.start}-{end}"
            )
        connection.request("GET", f"{self._url.path}/{quote(file_range.key)}", headers=headers)
        response = connection.getresponse()
        if response.status == (200 if file_range.start is None else 206):
            return _receive(response, file_range)
        connection.close()
        if response.status in {404, 410}:
            return None
        raise _make_status_error(file_range.key, response.status)

    def _get_connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._thread_local, "connection"):
            host, port = self._url.hostname or "", self._url.port
            self._thread_local.connection = _CONNECTION_TYPES[self._url.scheme](
                host, port, timeout=RESPONSE_TIMEOUT_SECONDS
            )
            self._thread_local.connection.response_class = LimitedResponse
            self._connections.append(self._thread_local.connection)
        connection: http.client.HTTPConnection = self._thread_local.connection
        return connection


def _receive(response: http.client.HTTPResponse, file_range: FileRange) -> bytes:
    """Receive a response, limited to the size of the range."""
    blocks, size = list[bytes](), 0
    while block := response.read1(_RECEIVE_CHUNK_BYTES):
        blocks.append(block)
        size += len(block)
        if size > file_range.size:
            raise BadFile(f"{file_range.key[:80]} in the Zarr store is larger than {file_range.size} bytes.")
    if (file_range.start is not None and size != file_range.size) or response.length:
        raise _make_truncated_error(file_range.key)
    # Closing the response makes the connection available for the next request.
    response.close()
    return b"".join(blocks)


class _ObjectStorage:
    """Objects below an S3, Google Cloud or Azure URL."""

    def __init__(self, url: str) -> None:
        try:
            import obstore  # noqa: PLC0415 - optional
        except ImportError:
            raise BadParameter(
                "Stores on S3, Google Cloud and Azure require the `remote` extra: pip install 'stackseg[remote]'."
            ) from None
        open_url: Callable[..., Any] = obstore.store.from_url
        self._library, self._error_type = obstore, obstore.exceptions.BaseError
        variables = _CREDENTIAL_VARIABLES[urlsplit(url).scheme]
        has_credentials = any(name.startswith(variables) and value for name, value in os.environ.items())
        # Client options override the environment, including variables such as AWS_ALLOW_HTTP.
        allow_http = os.environ.get(variables[0].partition("_")[0] + "_ALLOW_HTTP", "").lower() == "true"
        client_options = {
            "timeout": f"{OBJECT_TIMEOUT_SECONDS:g}s",
            "connect_timeout": f"{RESPONSE_TIMEOUT_SECONDS:g}s",
            "allow_http": allow_http,
        }
        retry_config = {"max_retries": 2, "retry_timeout": timedelta(seconds=OBJECT_TIMEOUT_SECONDS)}
        signature_options: dict[str, Any] = {} if has_credentials else {"skip_signature": True}
        try:
            # obstore reads environment variables such as AWS_ENDPOINT.
            self._store: Any = open_url(
                url, client_options=client_options, retry_config=retry_config, **signature_options
            )
        except (self._error_type, ValueError) as error:
            reason = str(error).partition("\n")[0][:160]
            raise BadParameter(
                f"The store cannot be opened: {reason}. Check the environment variables of the service."
            ) from error

    def get(self, file_range: FileRange) -> bytes | None:
        """Return a range of an object, or None if the object does not exist. Raises BadFile, StorageUnavailable."""
        try:
            return self._get(file_range)
        except FileNotFoundError:
            return None
        except self._error_type as error:
            # The error message contains addresses, so it is not shown. It is only searched for the status code.
            error_name = type(error).__name__
            _log.debug("request to a store failed: %s", error_name)
            if error_name in {"PermissionDeniedError", "UnauthenticatedError"}:
                raise _make_status_error(file_range.key, 403) from None
            if "status code: 416" in str(error):
                raise _make_truncated_error(file_range.key) from None
            raise _make_unavailable_error(file_range.key, f"the request failed with {error_name}") from None

    def _get(self, file_range: FileRange) -> bytes | None:
        if file_range.start is None:
            response = self._library.get(self._store, file_range.key)
            resolve_range(file_range, response.meta["size"])
            return bytes(response.bytes())
        start = file_range.start
        if start < 0:
            # Azure does not support suffix ranges.
            start, _ = resolve_range(file_range, self._library.head(self._store, file_range.key)["size"])
        content = bytes(self._library.get_range(self._store, file_range.key, start=start, length=file_range.size))
        if len(content) != file_range.size:
            raise _make_truncated_error(file_range.key)
        return content

    def close(self) -> None:
        """Do nothing: running requests end when they reach their time limits."""


def _make_status_error(key: str, status: int) -> StackSegError:
    """Return the error for a response without an object."""
    if status in {401, 403, 407}:
        return BadFile(
            f"The store denies access to {key[:80]} (status {status}). Set credentials in the environment of the"
            " service."
        )
    if 300 <= status < 400:
        return BadFile(f"The store redirects {key[:80]} to another URL. Use the final URL of the store.")
    if status == 416:
        return _make_truncated_error(key)
    if status == 200:
        return BadFile(
            "The server does not support HTTP range requests, which sharded images require. Save the image without"
            " sharding."
        )
    return _make_unavailable_error(key, f"status {status}")


def _make_truncated_error(key: str) -> BadFile:
    return BadFile(f"{key[:80]} in the Zarr store is truncated. Copy or export the store again.")


def _make_unavailable_error(key: str, reason: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"The store of the image is not available at the moment ({key[:80]}: {reason}). Try again later."
    )
