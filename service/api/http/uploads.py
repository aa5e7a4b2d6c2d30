"""Uploads: files that are received as raw bodies or in multipart forms, and are written to disk as they arrive."""

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

from service.api.http.body_formats import MULTIPART, STACK_BODY, BodyFormat
from service.api.http.multipart import MAX_FORM_BYTES, FormParser
from service.api.messages.headers import get_header, get_list_header
from service.core.errors import Cancelled, TooLarge, UnsupportedMedia
from service.serving.storage.memory_budget import MemoryBudget
from service.serving.storage.scratch import SpaceReservation
from service.serving.storage.threads import run_in_thread

# Error codes of failed attempts to create a hard link, for example because the files are on different file systems.
HARD_LINK_ERRORS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})
# Size of the blocks that a thread writes: large enough to make the cost of switching threads negligible, but small
# enough not to use much memory.
BLOCK_BYTES = 2 * 2**20
# Maximum memory in this process for upload data that is not on disk.
UPLOAD_MEMORY_BYTES = 64 * 2**20
UPLOAD_MEMORY_BUDGET = MemoryBudget(UPLOAD_MEMORY_BYTES)


class Upload:
    """Upload of one file, which is stored on disk or, if it is small, in memory. `fields` contains other form fields.

    path         destination of the file, unless the file is kept in memory
    limit_bytes  maximum size of the file
    space        disk quota in which the expected or received bytes are reserved, even if the file is kept in memory
    budget       memory budget for bytes that are not on disk
    """

    def __init__(
        self, path: Path, limit_bytes: int, space: SpaceReservation, budget: MemoryBudget = UPLOAD_MEMORY_BUDGET
    ) -> None:
        self.path = path
        self.name = ""
        self.fields: dict[str, str] = {}
        self.received_bytes = 0
        self.limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self.space, self._reserved_space_bytes = space, 0
        self._budget = budget
        # Bytes reserved in the memory budget for pending blocks and for a file in memory.
        self._reserved_memory_bytes = 0
        self._is_in_memory = False
        # Digest of the file passed to `adopt`.
        self._adopted_digest: str | None = None
        self._content: bytearray | None = None
        self._hash = blake3()
        self._pending_blocks: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._write_task: asyncio.Task[BinaryIO] | None = None

    def set_name(self, name: str) -> None:
        """Set the file name that the client sent."""
        self.name = sanitize_file_name(name)

    def reserve_space(self, nbytes: int) -> None:
        """Reserve disk space for a file of `nbytes` bytes. Raises the same errors as `SpaceReservation.reserve`."""
        self.space.reserve(nbytes - self._reserved_space_bytes)
        self._reserved_space_bytes = nbytes

    def add_data(self, data: bytes | memoryview) -> None:
        """Add bytes, which must not change afterward, to the file.

        Raises TooLarge if the file exceeds its size limit, and the same errors as `reserve_space`.
        """
        self.received_bytes += len(data)
        if self.received_bytes > self.limit_bytes:
            raise make_too_large_error(self.limit_bytes)
        if self.received_bytes > self._reserved_space_bytes:
            self.reserve_space(self.received_bytes + BLOCK_BYTES)
        self._pending_blocks.append(data)
        self._pending_bytes += len(data)

    async def write_full_blocks(self, nbytes: int) -> None:
        """Write pending bytes in a thread if necessary. Call this method after parsing the next `nbytes` of the body.

        A full block is written while more data arrives. If the memory budget is exhausted, all pending bytes are
        written before this method returns.
        """
        is_memory_reserved = self._budget.reserve(nbytes)
        self._reserved_memory_bytes += nbytes if is_memory_reserved else 0
        if self._pending_bytes < BLOCK_BYTES and (is_memory_reserved or not self._pending_blocks):
            return
        # One write at a time keeps the blocks in order, and prevents a slow disk from filling the memory.
        await self.wait_for_write()
        reserved_bytes, self._reserved_memory_bytes = self._reserved_memory_bytes, 0
        self._write_task = asyncio.create_task(run_in_thread(partial(self._write, self._take_pending_blocks())))
        # Release the memory in a callback, because a task that is canceled before it starts runs none of its code.
        self._write_task.add_done_callback(lambda _: self._budget.release(reserved_bytes))
        if not is_memory_reserved:
            await self.wait_for_write()

    async def wait_for_write(self) -> None:
        """Wait for a running write to finish. Raises OSError if it failed."""
        write_task, self._write_task = self._write_task, None
        if write_task is not None:
            await write_task

    def keep_in_memory(self) -> None:
        """Keep the received file in memory, unless part of it has already been written to disk."""
        if self._file is None:
            self._is_in_memory = True
            self._release(keep_bytes=self.received_bytes)

    def adopt(self, file: Path, digest: str) -> None:
        """Use a file stored by this service as the content of this upload. The request body must be empty. Blocks.

        The stored file may be deleted afterward. Raises FileNotFoundError if it has already been deleted.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        _link_file(file, self.path)
        self._adopted_digest, self._is_in_memory = digest, False

    def complete(self) -> None:
        """Write or join the pending blocks in the calling thread. Call this method before the file is read."""
        blocks = self._take_pending_blocks()
        if self._adopted_digest is not None:
            self._release()
        elif self._is_in_memory:
            self._content = bytearray().join(blocks)
            self._hash.update(self._content)
        else:
            self._write(blocks).close()
            self._release()

    @property
    def source(self) -> Path | bytearray:
        """The content of the complete file if it is in memory (until `drop_content`), or else its path."""
        return self.path if self._content is None else self._content

    def drop_content(self) -> None:
        """Release the content if the file is in memory, or close the file on disk."""
        self._content = None
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        """Release the content and all pending bytes, and return their memory to the budget."""
        self.drop_content()
        self._take_pending_blocks()
        self._release()

    @property
    def digest(self) -> str:
        """BLAKE3 digest of the complete file. BLAKE3 is as secure as SHA-256 and four times as fast."""
        return self._hash.hexdigest() if self._adopted_digest is None else self._adopted_digest

    def _release(self, keep_bytes: int = 0) -> None:
        """Release all reserved memory, including that of form boundaries and fields, except for `keep_bytes`."""
        self._budget.release(self._reserved_memory_bytes - keep_bytes)
        self._reserved_memory_bytes = keep_bytes

    def _take_pending_blocks(self) -> list[bytes | memoryview]:
        blocks, self._pending_blocks, self._pending_bytes = self._pending_blocks, [], 0
        return blocks

    def _write(self, blocks: list[bytes | memoryview]) -> BinaryIO:
        if self._file is None:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = self.path.open("wb")
        for block in blocks:
            self._hash.update(block)
        self._file.writelines(blocks)
        return self._file


def _link_file(file: Path, link: Path) -> None:
    """Create a hard link to a file or, if that is impossible, a symbolic link. Raises OSError."""
    try:
        link.hardlink_to(file)
    except OSError as error:
        if error.errno not in HARD_LINK_ERRORS:
            raise
        link.symlink_to(file)


def is_multipart(request: Request) -> bool:
    """Return whether the body of a request is a multipart form."""
    return _get_media_type(request) == MULTIPART


async def receive_upload(
    request: Request,
    upload: Upload,
    body_format: BodyFormat = STACK_BODY,
    extra_files: Mapping[str, Upload] | None = None,
) -> None:
    """Receive a file, and write all but its last bytes as they arrive. An empty body results in an empty file.

    upload       receiver of the file
    body_format  accepted formats of the body
    extra_files  receivers of additional files in a form, by form field

    Raises UnsupportedMedia for other formats, TooLarge if a file exceeds its size limit, BadParameter for an invalid
    form, RateLimited or OutOfStorage if there is not enough space, and Cancelled if the client disconnects before the
    end of the body.
    """
    uploads = {**(extra_files or {}), body_format.form_field: upload}
    form = _make_form_parser(request, uploads, body_format)
    files = list(uploads.values()) if form is not None else [upload]
    length = _get_content_length(request, upload.limit_bytes * len(files))
    # The sizes of the individual files of a form are unknown until they arrive.
    upload.reserve_space(length if len(files) == 1 else 0)
    try:
        await _receive_chunks(request, upload.add_data if form is None else form.feed, files)
    finally:
        for file in files:
            await file.wait_for_write()
    if form is not None:
        form.finish()


async def _receive_chunks(request: Request, feed: Callable[[bytes], None], files: Sequence[Upload]) -> None:
    """Pass the chunks of a body to `feed`, which adds their data to the files. Write full blocks."""
    has_more = True
    while has_more:
        # Unlike `request.stream`, this loop holds no reference to a chunk while it waits for the next one. Otherwise, a
        # stalled upload would keep the chunk in memory.
        previous_sizes = [file.received_bytes for file in files]
        nbytes, has_more = _feed_chunk(feed, await request.receive())
        for file, previous_bytes in zip(files, previous_sizes, strict=True):
            # A chunk may contain the end of one file and the beginning of another.
            if file.received_bytes > previous_bytes:
                await file.write_full_blocks(nbytes)


def _feed_chunk(feed: Callable[[bytes], None], message: Message) -> tuple[int, bool]:
    """Pass the chunk in a message to `feed`. Return its size, and whether another chunk follows. Raises Cancelled."""
    if message["type"] == "http.disconnect":
        raise Cancelled("The client disconnected during the upload.")
    chunk = message.get("body", b"")
    feed(chunk)
    return len(chunk), message.get("more_body", False)


def make_too_large_error(limit_bytes: int) -> TooLarge:
    """Return the error for a file with more than `limit_bytes`."""
    return TooLarge(
        f"The file is too large: this service accepts files of at most {limit_bytes:,} bytes. Crop the stack, or save"
        " it as a compressed TIFF (deflate)."
    )


def _get_media_type(request: Request) -> str:
    return get_header(request.scope, b"content-type").partition(";")[0].strip().lower()


def _make_form_parser(request: Request, uploads: Mapping[str, Upload], body_format: BodyFormat) -> FormParser | None:
    """Return a parser if the body is a form, or None if it is a raw file.

    Raises UnsupportedMedia for other bodies, and BadParameter for a form with an invalid boundary.
    """
    encoding = get_list_header(request.scope, b"content-encoding").lower() or "identity"
    if encoding not in body_format.encodings:
        raise UnsupportedMedia(
            f"Content-Encoding {encoding} is not supported. Unpack {body_format.file_description}, and send it"
            " without a Content-Encoding."
        )
    media_type = _get_media_type(request)
    if media_type == MULTIPART:
        _, options = parse_options_header(request.headers["content-type"])
        return FormParser(options.get(b"boundary", b""), uploads, uploads[body_format.form_field].fields)
    if media_type in body_format.media_types:
        uploads[body_format.form_field].set_name(_decode_name(get_header(request.scope, b"x-filename")))
        return None
    raise UnsupportedMedia(
        f"Content-Type {media_type} is not supported. Send {body_format.file_description} with Content-Type:"
        " image/tiff."
    )


def _get_content_length(request: Request, limit_bytes: int) -> int:
    """Return the Content-Length of the body, or 0 if there is none.

    Raises TooLarge if it exceeds the limit. The limit is higher for a form, to allow for boundaries and fields.
    """
    header = get_header(request.scope, b"content-length")
    length = int(header) if header.isdecimal() else 0
    if length > limit_bytes + (MAX_FORM_BYTES if is_multipart(request) else 0):
        raise make_too_large_error(limit_bytes)
    return length


def _decode_name(header: str) -> str:
    """Decode a file name from a header value that was decoded as Latin-1.

    The name may be UTF-8, as curl sends it, or percent-encoded. Scripts in browsers and most HTTP libraries can send
    only Latin-1 characters and must percent-encode all others.
    """
    name = unquote_to_bytes(header.encode("latin-1"))
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def sanitize_file_name(name: str) -> str:
    """Return the last component of a client's file name, which is used only to name the result and is never opened."""
    return "".join(c for c in PurePath(name.replace("\\", "/")).name if c.isprintable())[:200]
