"""Receive uploaded files, as raw bodies or in multipart forms, and write them to disk while they arrive."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from blake3 import blake3
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.types import Message

from service.api.http.media_types import MULTIPART, STACK_BODY, BodyFormat
from service.api.http.multipart import MAX_FORM_BYTES, FormParser
from service.api.messages.headers import get_header
from service.core.errors import Cancelled, TooLarge, UnsupportedMedia
from service.serving.storage.memory_budget import MemoryBudget
from service.serving.storage.scratch import SpaceReservation
from service.serving.storage.threads import run_in_thread

# Errors of hard links across file systems, or on file systems without hard links.
HARD_LINK_ERRORS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})
# Large enough to make the cost of passing a block to a thread negligible, small enough not to matter for memory.
BLOCK_BYTES = 2 * 2**20
# Memory limit of this process for upload data that is not on disk.
UPLOAD_MEMORY_BYTES = 64 * 2**20
UPLOAD_MEMORY = MemoryBudget(UPLOAD_MEMORY_BYTES)


class Upload:
    """A file that is being received, to disk or, if it is small, to memory; with its name and the fields of its form.

    path   destination of the file, unless it is kept in memory
    space  disk quota in which the expected or received bytes are reserved, even if they stay in memory
    """

    def __init__(
        self, path: Path, limit_bytes: int, space: SpaceReservation, budget: MemoryBudget = UPLOAD_MEMORY
    ) -> None:
        self.path = path
        self.name = ""
        self.fields: dict[str, str] = {}
        self.received = 0
        self.limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self.space, self._reserved_space = space, 0
        self._budget = budget
        # Bytes reserved in the memory budget for pending blocks and for a file that is kept in memory.
        self._reserved = 0
        self._in_memory = False
        # Digest of the file passed to `adopt`.
        self._adopted_digest: str | None = None
        self._content: bytearray | None = None
        self._hash = blake3()
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._writing: asyncio.Task[BinaryIO] | None = None

    def set_name(self, name: str) -> None:
        """Set the file name that the client sent."""
        self.name = sanitize_file_name(name)

    def reserve_space(self, nbytes: int) -> None:
        """Reserve disk space for a file of `nbytes` bytes. Raises the errors of `SpaceReservation.reserve`."""
        self.space.reserve(nbytes - self._reserved_space)
        self._reserved_space = nbytes

    def add_data(self, data: bytes | memoryview) -> None:
        """Add bytes, which must not change afterwards, to the file. Raises TooLarge, RateLimited and OutOfStorage."""
        self.received += len(data)
        if self.received > self.limit_bytes:
            raise too_large_error(self.limit_bytes)
        if self.received > self._reserved_space:
            self.reserve_space(self.received + BLOCK_BYTES)
        self._pending.append(data)
        self._pending_bytes += len(data)

    async def flush(self, nbytes: int) -> None:
        """Write pending bytes in a thread if necessary. Call this after the next `nbytes` of the body were parsed.

        A full block is written while more data arrives. If the memory budget is exhausted, everything is written before
        this method returns.
        """
        fits = self._budget.reserve(nbytes)
        self._reserved += nbytes if fits else 0
        if self._pending_bytes < BLOCK_BYTES and (fits or not self._pending):
            return
        # One write at a time keeps blocks in order, and a disk slower than the network does not fill the memory.
        await self.wait_written()
        reserved, self._reserved = self._reserved, 0
        self._writing = asyncio.create_task(run_in_thread(partial(self._write, self._take_pending())))
        # Not in the task itself: a task that is cancelled before it starts runs none of its code.
        self._writing.add_done_callback(lambda _: self._budget.release(reserved))
        if not fits:
            await self.wait_written()

    async def wait_written(self) -> None:
        """Wait for a running write to finish. Raises OSError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def keep_in_memory(self) -> None:
        """Keep the received file in memory, unless a part of it has already been written to disk."""
        if self._file is None:
            self._in_memory = True
            self._release(keep_bytes=self.received)

    def adopt(self, file: Path, digest: str) -> None:
        """Use a stored file of this service as the upload; the request body must be empty. Blocks.

        The stored file may be deleted afterwards. Raises FileNotFoundError if it no longer exists.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        _link_file(file, self.path)
        self._adopted_digest, self._in_memory = digest, False

    def complete(self) -> None:
        """Write or join the pending blocks in the calling thread. The file can be read only afterwards."""
        blocks = self._take_pending()
        if self._adopted_digest is not None:
            self._release()
        elif self._in_memory:
            self._content = bytearray().join(blocks)
            self._hash.update(self._content)
        else:
            self._write(blocks).close()
            self._release()

    @property
    def source(self) -> Path | bytearray:
        """The complete file: its content if it is kept in memory (until `drop_content`), else its path."""
        return self.path if self._content is None else self._content

    def drop_content(self) -> None:
        """Release the content of a file in memory, or close the file on disk."""
        self._content = None
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        """Release the content and all pending bytes, and return their memory to the budget."""
        self.drop_content()
        self._take_pending()
        self._release()

    @property
    def digest(self) -> str:
        """BLAKE3 digest of the complete file. BLAKE3 is as secure as SHA-256 and takes a quarter of the time."""
        return self._hash.hexdigest() if self._adopted_digest is None else self._adopted_digest

    def _release(self, keep_bytes: int = 0) -> None:
        """Return reserved memory to the budget, including that of form boundaries and fields, except `keep_bytes`."""
        self._budget.release(self._reserved - keep_bytes)
        self._reserved = keep_bytes

    def _take_pending(self) -> list[bytes | memoryview]:
        blocks, self._pending, self._pending_bytes = self._pending, [], 0
        return blocks

    def _write(self, blocks: list[bytes | memoryview]) -> BinaryIO:
        if self._file is None:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = self.path.open("wb")
        for block in blocks:
            self._hash.update(block)
        self._file.writelines(blocks)
        return self._file


def _link_file(file: Path, name: Path) -> None:
    """Link a file under a second name: a hard link if possible, else a symbolic link. Raises OSError."""
    try:
        name.hardlink_to(file)
    except OSError as error:
        if error.errno not in HARD_LINK_ERRORS:
            raise
        name.symlink_to(file)


def is_multipart(request: Request) -> bool:
    """Return whether the body is a multipart form."""
    return _media_type(request) == MULTIPART


async def receive(
    request: Request,
    upload: Upload,
    body_format: BodyFormat = STACK_BODY,
    extra_files: Mapping[str, Upload] | None = None,
) -> None:
    """Receive a file and write all but its end as it arrives. An empty body results in an empty file.

    upload       receiver of the file
    body_format  accepted formats of the body
    extra_files  receivers of further files of a form, by form field

    Raises UnsupportedMedia, TooLarge, BadParameter for an invalid form, RateLimited or OutOfStorage if there is not
    enough space, and Cancelled if the client disconnects before it has sent everything.
    """
    uploads = {**(extra_files or {}), body_format.form_field: upload}
    form = _make_form_parser(request, uploads, body_format)
    files = list(uploads.values()) if form is not None else [upload]
    length = _content_length(request, upload.limit_bytes * len(files))
    # The sizes of the individual files of a form are unknown until they arrive.
    upload.reserve_space(length if len(files) == 1 else 0)
    try:
        await _receive_chunks(request, upload.add_data if form is None else form.feed, files)
    finally:
        for file in files:
            await file.wait_written()
    if form is not None:
        form.finish()


async def _receive_chunks(request: Request, feed: Callable[[bytes], None], files: Sequence[Upload]) -> None:
    """Pass the chunks of a body to `feed`, which adds their data to the files, and write full blocks."""
    more = True
    while more:
        # Unlike `request.stream`, hold no reference to a chunk while waiting for the next one. Otherwise, a stalled
        # upload would keep the chunk in memory.
        received = [file.received for file in files]
        nbytes, more = _feed(feed, await request.receive())
        for file, before in zip(files, received, strict=True):
            # A chunk may contain the end of one file and the beginning of another.
            if file.received > before:
                await file.flush(nbytes)


def _feed(feed: Callable[[bytes], None], message: Message) -> tuple[int, bool]:
    """Pass the chunk of a message to `feed`. Return its size and whether more will follow. Raises Cancelled."""
    if message["type"] == "http.disconnect":
        raise Cancelled("The client disconnected during the upload.")
    chunk = message.get("body", b"")
    feed(chunk)
    return len(chunk), message.get("more_body", False)


def too_large_error(limit_bytes: int) -> TooLarge:
    """Return the error for a file of more than `limit_bytes`."""
    return TooLarge(
        f"The file is too large: this service accepts at most {limit_bytes:,} bytes. Crop the stack, or save it as a"
        " compressed TIFF (deflate)."
    )


def _media_type(request: Request) -> str:
    return get_header(request.scope, b"content-type").partition(";")[0].strip().lower()


def _make_form_parser(request: Request, uploads: Mapping[str, Upload], body_format: BodyFormat) -> FormParser | None:
    """Return a parser if the body is a form, or None if it is a raw file.

    Raises UnsupportedMedia for any other body, and BadParameter for a form with an invalid boundary.
    """
    encoding = get_header(request.scope, b"content-encoding").lower() or "identity"
    if encoding not in body_format.encodings:
        raise UnsupportedMedia(
            f"Content-Encoding {encoding} is not supported. Send {body_format.name} without Content-Encoding."
        )
    media_type = _media_type(request)
    if media_type == MULTIPART:
        _, options = parse_options_header(request.headers["content-type"])
        return FormParser(options.get(b"boundary", b""), uploads, uploads[body_format.form_field].fields)
    if media_type in body_format.media_types:
        uploads[body_format.form_field].set_name(_decode_name(get_header(request.scope, b"x-filename")))
        return None
    raise UnsupportedMedia(
        f"Content-Type {media_type} is not supported. Send {body_format.name} with Content-Type: image/tiff."
    )


def _content_length(request: Request, limit_bytes: int) -> int:
    """Return the Content-Length of the body; 0 without one.

    Raises TooLarge if it exceeds the limit, which is higher for a form, to allow for boundaries and fields.
    """
    header = get_header(request.scope, b"content-length")
    length = int(header) if header.isdecimal() else 0
    if length > limit_bytes + (MAX_FORM_BYTES if is_multipart(request) else 0):
        raise too_large_error(limit_bytes)
    return length


def _decode_name(header: str) -> str:
    """Decode a file name from a header that was read as Latin-1. It may be UTF-8, as sent by curl, or percent-encoded.

    Scripts in browsers and most HTTP libraries can send only Latin-1 characters and must percent-encode all others.
    """
    name = unquote_to_bytes(header.encode("latin-1"))
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def sanitize_file_name(name: str) -> str:
    """Return the last component of a client's file name. It is only used to name the result and is never opened."""
    return "".join(c for c in PurePath(name.replace("\\", "/")).name if c.isprintable())[:200]
