"""Download files over HTTP for the command line, with limits, resumption after interruptions, and SHA-256.

The operator runs the command, so it may reach any host that the operator can reach. The HTTP service does not use this
module.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit

from service.core.errors import BadParameter, StorageUnavailable, UnsupportedPackage

CHUNK_BYTES = 2**20
DEFAULT_MAX_BYTES = 8 * 2**30
# Time limit for connecting and for each read.
TIMEOUT_SECONDS = 30.0
# Maximum number of consecutive attempts that receive no data.
MAX_FRUITLESS_ATTEMPTS = 4
MAX_REDIRECTS = 5
PAUSE_SECONDS = 0.5
_RETRIED_STATUSES = frozenset([408, 429, 500, 502, 503, 504])
_REDIRECT_STATUSES = frozenset([301, 302, 303, 307, 308])

ProgressCallback = Callable[[int, int], None]
"""Function that is called with the number of received bytes, and the size of the file (0: unknown)."""


def is_url(text: str) -> bool:
    """Return whether a text begins with the scheme of a web address."""
    return re.match(r"https?://", text, re.IGNORECASE) is not None


def get_file_name(url: str) -> str:
    """Return a file name for the contents of a URL, such as `unet.zip`."""
    parts = [unquote(part) for part in urlsplit(url).path.split("/") if part not in {"", "content"}]
    name = re.sub(r"[^\w.-]+", "-", parts[-1] if parts else "").lstrip(".")
    return name[-100:] or "model"


def is_loopback(url: str) -> bool:
    """Return whether the host of a URL is this computer."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Report redirects as errors, so that `Downloader` can check their targets."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _make_opener() -> urllib.request.OpenerDirector:
    # Other handlers of `build_opener` support schemes such as file: and ftp:.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        _NoRedirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


@dataclass
class _Transfer:
    """A file that is being received.

    validator  strong ETag or modification time of the received part; None if the transfer cannot be resumed
    """

    url: str
    path: Path
    received: int = 0
    total: int = 0
    validator: str | None = None


@dataclass(frozen=True)
class Downloader:
    """Downloads files.

    max_bytes       limit for the size of one file
    allow_http      whether URLs and redirects may use HTTP without encryption; this computer always may
    pause_seconds   pause before the second attempt, which is doubled for each further one
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    allow_http: bool = False
    timeout_seconds: float = TIMEOUT_SECONDS
    pause_seconds: float = PAUSE_SECONDS

    def fetch(self, url: str, path: Path, sha256: str | None, progress: ProgressCallback) -> None:
        """Download a URL to a file. An interrupted transfer is resumed if the file on the server is still the same.

        Raises BadParameter for URLs that are not allowed, StorageUnavailable if the server fails, and
        UnsupportedPackage if the file is too large or its SHA-256 is not `sha256`.
        """
        self._check_url(url)
        transfer, attempts = _Transfer(url, path), 0
        while True:
            received_before = transfer.received
            try:
                self._receive(transfer, progress)
                break
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                elif isinstance(error, OSError) and error.filename is not None:
                    raise  # an error of the local disk
                attempts = 1 if transfer.received > received_before else attempts + 1
                if attempts >= MAX_FRUITLESS_ATTEMPTS or not _is_temporary(error):
                    raise StorageUnavailable(_describe_failure(url, error)) from error
            time.sleep(self.pause_seconds * 2 ** (attempts - 1))
        check_sha256(path, sha256, url)

    def _check_url(self, url: str, *, origin: str | None = None) -> None:
        """Raise BadParameter if a URL, or the target of a redirect from `origin`, is not allowed."""
        if not _is_valid_url(url):
            raise BadParameter(f"{url!r:.200} is not a valid URL. Use https://HOST/PATH without a user name.")
        if urlsplit(url).scheme == "https" or self.allow_http:
            return
        if is_loopback(url) and (origin is None or is_loopback(origin)):
            return
        source = "" if origin is None else f" (redirected from {origin})"
        raise BadParameter(
            f"{url}{source}: only https is allowed, because other hosts could change the file on its way. Pass"
            " --allow-http to download it anyway."
        )

    def _open(self, transfer: _Transfer) -> IO[bytes]:
        """Open the URL and follow redirects, each of which is checked."""
        url = transfer.url
        for _ in range(MAX_REDIRECTS + 1):
            opener = _make_opener()
            opener.addheaders = [("User-Agent", "stackseg"), ("Accept-Encoding", "identity")]
            if transfer.received and transfer.validator is not None:
                opener.addheaders += [("Range", f"bytes={transfer.received}-"), ("If-Range", transfer.validator)]
            try:
                stream: IO[bytes] = opener.open(url, timeout=self.timeout_seconds)
            except urllib.error.HTTPError as error:
                location = error.headers.get("Location")
                if error.code not in _REDIRECT_STATUSES or not location:
                    raise
                error.close()
                target = urljoin(url, location)
                self._check_url(target, origin=url)
                url = target
            else:
                return stream
        raise StorageUnavailable(f"{transfer.url} redirects more than {MAX_REDIRECTS} times.")

    def _receive(self, transfer: _Transfer, progress: ProgressCallback) -> None:
        with self._open(transfer) as stream:
            headers: Message = stream.headers  # type: ignore[attr-defined]
            is_resumed = _is_continuation(stream.status, headers, transfer)  # type: ignore[attr-defined]
            if not is_resumed:
                transfer.received = 0
            if headers.get("Content-Encoding", "identity") != "identity":
                raise UnsupportedPackage(f"{transfer.url}: the server compresses the file although that was refused.")
            length = headers.get("Content-Length", "")
            transfer.total = transfer.received + int(length) if length.isdecimal() else 0
            transfer.validator = _get_validator(headers)
            self._check_size(transfer.total, transfer.url)
            with transfer.path.open("ab" if is_resumed else "wb") as file:
                while chunk := stream.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
                    self._check_size(transfer.received + len(chunk), transfer.url)
                    file.write(chunk)
                    transfer.received += len(chunk)
                    progress(transfer.received, transfer.total)
        if transfer.received < transfer.total:
            raise http.client.IncompleteRead(b"", transfer.total - transfer.received)

    def _check_size(self, size: int, url: str) -> None:
        if size > self.max_bytes:
            raise UnsupportedPackage(
                f"{url}: the file has more than {self.max_bytes} bytes. Raise the limit with --max-bytes if you trust"
                " the source."
            )


def _get_validator(headers: Message) -> str | None:
    etag = headers.get("ETag")
    return etag if etag is not None and not etag.startswith("W/") else headers.get("Last-Modified")


def _is_continuation(status: int, headers: Message, transfer: _Transfer) -> bool:
    """Return whether a response continues the received part. Otherwise, it contains the whole file.

    Raises UnsupportedPackage if the server returns another part, or a part of another file.
    """
    if status != http.client.PARTIAL_CONTENT:
        return False
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
    is_expected = match is not None and int(match[1]) == transfer.received > 0
    is_same_size = match is not None and (not transfer.total or match[3] in {"*", str(transfer.total)})
    if not is_expected or not is_same_size or _get_validator(headers) not in {None, transfer.validator}:
        raise UnsupportedPackage(f"{transfer.url}: the file on the server changed during the download. Try again.")
    return True


def _is_valid_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_complete and "@" not in parts.netloc and re.search(r"[\x00-\x20\x7f]", url) is None


def _is_temporary(error: Exception) -> bool:
    return not isinstance(error, urllib.error.HTTPError) or error.code in _RETRIED_STATUSES


def _describe_failure(url: str, error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{url}: the server answered with status {error.code} ({error.reason})."
    if isinstance(error, http.client.IncompleteRead):
        return f"{url}: the connection was interrupted before the file was complete. Try again."
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return f"{url}: the download failed ({reason}). Check the address and the network, and try again."


def check_sha256(path: Path, expected: str | None, url: str) -> None:
    """Raise UnsupportedPackage if the SHA-256 of a file is not `expected`, unless that is None."""
    if expected is None:
        return
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected.lower():
        raise UnsupportedPackage(f"{url}: the SHA-256 of the file is {actual}, but {expected.lower()} was expected.")
