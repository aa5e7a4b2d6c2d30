"""Receive a posted file on disk, counting bytes while they arrive; raw bodies and multipart forms alike."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from service.errors import BadParameter, Cancelled, OutOfStorage, TooLarge, UnsupportedMedia

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

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
BLOCK_BYTES = 4 * 2**20
FIELD_BYTES = 4096
FIELDS = 32


class Upload:
    """A file on its way to disk, with the name and the form fields that came along."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.name = ""
        self.fields: dict[str, str] = {}
        self.received = 0
        self._limit = limit_bytes
        self._pending = bytearray()

    def take(self, data: bytes) -> None:
        """Add bytes of the file. Raises TooLarge."""
        self.received += len(data)
        if self.received > self._limit:
            raise too_large(self._limit)
        self._pending += data

    async def flush(self, file: BinaryIO, least: int = 1) -> None:
        """Write what is pending, in a thread, if it is at least so many bytes. Raises OutOfStorage."""
        if len(self._pending) >= least:
            block, self._pending = self._pending, bytearray()
            with_space = asyncio.to_thread(file.write, block)
            try:
                await with_space
            except OSError as error:
                raise translated(error) from error


def too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The upload exceeds the limit of {limit_bytes:,} bytes; crop it, or compress it as TIFF deflate.")


def translated(error: OSError) -> Exception:
    """A full disk is nobody's fault; anything else is a fault of ours and stays as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfStorage("The disk for uploads is full; try again later.")
    return error


async def receive(request: Request, folder: Path, limit_bytes: int) -> Upload:
    """Write the posted file into `folder`.

    Raises UnsupportedMedia, TooLarge, BadParameter for a broken or empty body, OutOfStorage, and Cancelled when the
    client goes away before it has sent everything.
    """
    upload = Upload(folder / "upload.tif", limit_bytes)
    content_type, options = parse_options_header(request.headers.get("content-type", ""))
    kind = content_type.decode("latin-1").lower()
    _check_length(request, limit_bytes)
    if kind == "multipart/form-data":
        feed = _multipart(upload, options.get(b"boundary"))
    elif kind in RAW_TYPES:
        feed = upload.take
        upload.name = _plain_name(request.headers.get("x-filename", ""))
    else:
        raise UnsupportedMedia(f"A body of type {kind} is not read; send the TIFF itself as image/tiff.")
    with upload.path.open("wb", buffering=0) as file:
        async with _connected():
            async for chunk in request.stream():
                feed(chunk)
                await upload.flush(file, BLOCK_BYTES)
        feed(b"")
        await upload.flush(file)
    if upload.received == 0:
        raise BadParameter("The request carries no file: send the TIFF as the body, or as the form field 'file'.")
    return upload


@asynccontextmanager
async def _connected() -> AsyncIterator[None]:
    try:
        yield
    except ClientDisconnect:
        raise Cancelled("the client went away while sending") from None


def _check_length(request: Request, limit_bytes: int) -> None:
    """Refuse before the body is read where its length is stated; a multipart form is allowed its frame."""
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit_bytes + FIELDS * FIELD_BYTES:
        raise too_large(limit_bytes)


def _multipart(upload: Upload, boundary: bytes | None) -> Callable[[bytes], None]:
    if not boundary:
        raise BadParameter("The multipart form states no boundary.")
    form = _Form(upload)
    parser = MultipartParser(boundary, form.callbacks())

    def feed(chunk: bytes) -> None:
        try:
            if chunk:
                parser.write(chunk)
            else:
                parser.finalize()
                form.check_complete()
        except MultipartParseError as error:
            raise BadParameter(f"The multipart form is broken: {error}") from error

    return feed


class _Form:
    """Sorts the parts of a form: `file` goes to disk while it arrives, everything else is a short text."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._header, self._value = bytearray(), bytearray()
        self._name = ""
        self._text = bytearray()
        self._files = 0
        self._ended = False

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def check_complete(self) -> None:
        if not self._ended:
            raise BadParameter("The multipart form is cut short: its closing boundary is missing.")

    def _begin(self) -> None:
        self._name = ""
        self._text = bytearray()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == "file":
                self._files += 1
                self._upload.name = _plain_name(options.get(b"filename", b"").decode("utf-8", "replace"))
        self._header.clear()
        self._value.clear()
        if self._files > 1:
            raise BadParameter("The form carries more than one file; post one stack per request.")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._upload.take(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > FIELD_BYTES:
            raise BadParameter(f"The form field {self._name[:40]!r} is too long; the stack goes into the field 'file'.")

    def _end(self) -> None:
        if self._name != "file":
            self._upload.fields[self._name] = self._text.decode("utf-8", "replace")
            if len(self._upload.fields) > FIELDS:
                raise BadParameter(f"The form has more than {FIELDS} fields.")

    def _finish(self) -> None:
        self._ended = True


def _plain_name(name: str) -> str:
    """The last part of a file name that a client sent, for messages and for naming the answer; never opened."""
    return "".join(c for c in PurePath(name.replace("\\", "/")).name if c.isprintable())[:200]
