"""Receive a posted file on disk, counting bytes while they arrive; raw bodies and multipart forms alike."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path, PurePath
from typing import BinaryIO, Protocol

from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from service.errors import Cancelled, TooLarge, UnsupportedMedia
from service.routes.forms import FORM_BYTES, Form
from service.routes.threads import in_thread

MULTIPART = "multipart/form-data"
RAW_TYPES = frozenset(
    {
        "",
        "image/tiff",
        "image/tif",
        "image/x-tiff",
        "image/ome-tiff",
        "application/octet-stream",
        # What curl sends for --data-binary when no header is given.
        "application/x-www-form-urlencoded",
    }
)
# Large enough that handing a block to a thread costs nothing, small enough that memory does not matter.
BLOCK_BYTES = 2 * 2**20


class Upload:
    """A file on its way to disk, with the name and the form fields that came along."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.name = ""
        self.fields: dict[str, str] = {}
        self.received = 0
        self._hash = hashlib.sha256()
        self._limit = limit_bytes
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0

    def take(self, data: bytes | memoryview) -> None:
        """Add bytes of the file, which must not change afterwards. Raises TooLarge."""
        self.received += len(data)
        if self.received > self._limit:
            raise too_large(self._limit)
        self._pending.append(data)
        self._pending_bytes += len(data)

    async def flush(self, file: BinaryIO, least: int = 1) -> None:
        """Write what is pending, in a thread, if it is at least so many bytes."""
        if self._pending_bytes >= least:
            blocks, self._pending, self._pending_bytes = self._pending, [], 0
            await in_thread(partial(self._write, file, blocks))

    @property
    def digest(self) -> str:
        """SHA-256 of what was written."""
        return self._hash.hexdigest()

    def _write(self, file: BinaryIO, blocks: list[bytes | memoryview]) -> None:
        for block in blocks:
            self._hash.update(block)
        file.writelines(blocks)


class Feed(Protocol):
    """What the body goes through on its way into an `Upload`."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""

    def finish(self) -> None:
        """The body has ended."""


class Raw:
    """A body that is the file."""

    def __init__(self, upload: Upload) -> None:
        self.feed = upload.take

    def finish(self) -> None:
        """Nothing follows the file."""


def is_multipart(request: Request) -> bool:
    return _media_type(request) == MULTIPART


async def receive(request: Request, folder: Path, limit_bytes: int) -> Upload:
    """Write the posted file into `folder`; an empty body makes an empty one.

    Raises UnsupportedMedia, TooLarge, BadParameter for a broken form, and Cancelled when the client goes away before it
    has sent everything.
    """
    upload = Upload(folder / "upload.tif", limit_bytes)
    body = _feed_for(request, upload)
    _check_length(request, limit_bytes)
    with upload.path.open("wb") as file:
        try:
            async for chunk in request.stream():
                body.feed(chunk)
                await upload.flush(file, BLOCK_BYTES)
        except ClientDisconnect:
            raise Cancelled("The client went away while sending.") from None
        body.finish()
        await upload.flush(file)
    return upload


def too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The upload exceeds the limit of {limit_bytes:,} bytes; crop it, or compress it as TIFF deflate.")


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _feed_for(request: Request, upload: Upload) -> Feed:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"Content-Encoding {encoding} is not read; send the TIFF itself, compressed or not.")
    kind = _media_type(request)
    if kind == MULTIPART:
        _, options = parse_options_header(request.headers["content-type"])
        form = Form(options.get(b"boundary", b""), upload.take, upload.fields)
        form.named = lambda name: setattr(upload, "name", plain_name(name))
        return form
    if kind in RAW_TYPES:
        upload.name = plain_name(request.headers.get("x-filename", ""))
        return Raw(upload)
    raise UnsupportedMedia(f"A body of type {kind} is not read; send the TIFF itself with Content-Type: image/tiff.")


def _check_length(request: Request, limit_bytes: int) -> None:
    """Refuse before the body is read where its length is stated; a form is allowed its frame and its fields."""
    stated = request.headers.get("content-length", "")
    allowed = limit_bytes + (FORM_BYTES if is_multipart(request) else 0)
    if stated.isdecimal() and int(stated) > allowed:
        raise too_large(limit_bytes)


def plain_name(name: str) -> str:
    """The last part of a file name that a client sent, for naming the answer; never opened."""
    return "".join(c for c in PurePath(name.replace("\\", "/")).name if c.isprintable())[:200]
