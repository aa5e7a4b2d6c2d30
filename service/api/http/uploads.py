"""Receive an uploaded file, a raw body or a part of a multipart form, and write it while it arrives."""

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

from service.api.http.media_types import MULTIPART, STACKS, BodyKinds
from service.api.http.multipart import MAX_FORM_BYTES, FormParser
from service.api.messages.headers import get_header
from service.core.errors import Cancelled, TooLarge, UnsupportedMedia
from service.serving.storage.memory_budget import MemoryBudget
from service.serving.storage.scratch import Hold
from service.serving.storage.threads import run_in_thread

# Errors of a hard link from one file system to another, or on one that has none.
NO_HARD_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS})
# Large enough that handing a block to a thread costs nothing, small enough that memory does not matter.
BLOCK_BYTES = 2 * 2**20
# Memory of this process for uploads that are not on disk.
UPLOAD_MEMORY_BYTES = 64 * 2**20
UPLOAD_MEMORY = MemoryBudget(UPLOAD_MEMORY_BYTES)


class Upload:
    """A file on its way to disk, or into memory where it is small, with its name and the fields of its form.

    path   where the complete file lies, unless it is kept in memory
    space  counts the announced bytes, or those that have arrived, as if all were on disk
    """

    def __init__(self, path: Path, limit_bytes: int, space: Hold, budget: MemoryBudget = UPLOAD_MEMORY) -> None:
        self.path = path
        self.name = ""
        self.fields: dict[str, str] = {}
        self.received = 0
        self.limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self.space, self._announced = space, 0
        self._budget = budget
        # Bytes of the budget for pending blocks, and for a file that is kept in memory.
        self._reserved = 0
        self._in_memory = False
        # Digest of the file that was adopted.
        self._adopted: str | None = None
        self._content: bytearray | None = None
        self._hash = blake3()
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._writing: asyncio.Task[BinaryIO] | None = None

    def set_name(self, name: str) -> None:
        """Set the name that the client gives the file."""
        self.name = plain_name(name)

    def announce(self, nbytes: int) -> None:
        """Reserve space for a file of so many bytes. Raises what `Hold.reserve` raises."""
        self.space.reserve(nbytes - self._announced)
        self._announced = nbytes

    def add_data(self, data: bytes | memoryview) -> None:
        """Add bytes of the file, which must not change afterwards. Raises TooLarge, and what `announce` raises."""
        self.received += len(data)
        if self.received > self.limit_bytes:
            raise too_large(self.limit_bytes)
        if self.received > self._announced:
            self.announce(self.received + BLOCK_BYTES)
        self._pending.append(data)
        self._pending_bytes += len(data)

    async def flush(self, nbytes: int) -> None:
        """Have a thread write the pending bytes, after the next `nbytes` of the body were parsed.

        A full block is written while more arrives. Where the budget is used up, all is written before this returns.
        """
        fits = self._budget.reserve(nbytes)
        self._reserved += nbytes if fits else 0
        if self._pending_bytes < BLOCK_BYTES and (fits or not self._pending):
            return
        # One write at a time: blocks keep their order, and a disk slower than the network does not fill the memory.
        await self.wait_written()
        reserved, self._reserved = self._reserved, 0
        self._writing = asyncio.create_task(run_in_thread(partial(self._write, self._take_pending())))
        # A task that is cancelled before it begins runs no line of its own.
        self._writing.add_done_callback(lambda _: self._budget.release(reserved))
        if not fits:
            await self.wait_written()

    async def wait_written(self) -> None:
        """Wait until no block is being written. Raises OSError where that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def keep_in_memory(self) -> None:
        """Keep the received file in memory, if all of it is there: a part may have been written already."""
        if self._file is None:
            self._in_memory = True
            self._release(all_but=self.received)

    def adopt(self, file: Path, digest: str) -> None:
        """Take a complete file of this service instead of a body, which must be empty. Blocks.

        It may be deleted afterwards. Raises FileNotFoundError where it was before.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        _link(file, self.path)
        self._adopted, self._in_memory = digest, False

    def complete(self) -> None:
        """Write the rest, or join it in memory, in the calling thread: only then the file can be read."""
        blocks = self._take_pending()
        if self._adopted is not None:
            self._release()
        elif self._in_memory:
            self._content = bytearray().join(blocks)
            self._hash.update(self._content)
        else:
            self._write(blocks).close()
            self._release()

    @property
    def source(self) -> Path | bytearray:
        """The complete file: its content until `drop_content` if it is kept in memory, else its path."""
        return self.path if self._content is None else self._content

    def drop_content(self) -> None:
        """Forget the content of a file in memory, and write no more to one on disk."""
        self._content = None
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        """Drop the content and all pending bytes, and give their memory back to the budget."""
        self.drop_content()
        self._take_pending()
        self._release()

    @property
    def digest(self) -> str:
        """BLAKE3 of the complete file: as hard to forge as SHA-256, in a quarter of the time."""
        return self._hash.hexdigest() if self._adopted is None else self._adopted

    def _release(self, all_but: int = 0) -> None:
        """Give reserved bytes back; those of a form's frame and fields are among them."""
        self._budget.release(self._reserved - all_but)
        self._reserved = all_but

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


def _link(file: Path, name: Path) -> None:
    """Give a file a second name, which outlives the first one where both are on one file system. Raises OSError."""
    try:
        name.hardlink_to(file)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        name.symlink_to(file)


def is_multipart(request: Request) -> bool:
    """Return whether the body is a multipart form."""
    return _media_type(request) == MULTIPART


async def receive(
    request: Request, upload: Upload, kinds: BodyKinds = STACKS, beside: Mapping[str, Upload] | None = None
) -> None:
    """Receive the posted file and write all but its end, as it comes. An empty body makes an empty file.

    A form may have files `beside` it, by the names of their parts.

    Raises UnsupportedMedia, TooLarge, BadParameter for a broken form, RateLimited or OutOfStorage where there is too
    little space for it, and Cancelled when the client disconnects before it has sent everything.
    """
    uploads = {**(beside or {}), kinds.part: upload}
    form = _make_form_parser(request, uploads, kinds)
    files = list(uploads.values()) if form is not None else [upload]
    length = _stated_length(request, upload.limit_bytes * len(files))
    # Which share of a form is whose is seen as they come.
    upload.announce(length if len(files) == 1 else 0)
    try:
        await _receive_chunks(request, upload.add_data if form is None else form.feed, files)
    finally:
        for file in files:
            await file.wait_written()
    if form is not None:
        form.finish()


async def _receive_chunks(request: Request, feed: Callable[[bytes], None], files: Sequence[Upload]) -> None:
    """Pass on the chunks of a body, which adds their data to the files."""
    more = True
    while more:
        # No local variable may refer to a chunk while the next one is awaited, as in `request.stream`: a stalled body
        # would keep it in memory.
        received = [file.received for file in files]
        nbytes, more = _feed(feed, await request.receive())
        for file, before in zip(files, received, strict=True):
            # A chunk may hold the end of one file and the beginning of another.
            if file.received > before:
                await file.flush(nbytes)


def _feed(feed: Callable[[bytes], None], message: Message) -> tuple[int, bool]:
    """Pass on the chunk of a message; return its bytes and whether more will come. Raises Cancelled."""
    if message["type"] == "http.disconnect":
        raise Cancelled("The client went away while sending.")
    chunk = message.get("body", b"")
    feed(chunk)
    return len(chunk), message.get("more_body", False)


def too_large(limit_bytes: int) -> TooLarge:
    """Return the error for a file of more than `limit_bytes`."""
    return TooLarge(f"The upload exceeds the limit of {limit_bytes:,} bytes; crop it, or compress it as TIFF deflate.")


def _media_type(request: Request) -> str:
    return get_header(request.scope, b"content-type").partition(";")[0].strip().lower()


def _make_form_parser(request: Request, uploads: Mapping[str, Upload], kinds: BodyKinds) -> FormParser | None:
    """Return the parser of a form, None for a body that is the file itself.

    Raises UnsupportedMedia for any other body, and BadParameter for a form's boundary.
    """
    encoding = get_header(request.scope, b"content-encoding").lower() or "identity"
    if encoding not in kinds.encodings:
        raise UnsupportedMedia(f"Content-Encoding {encoding} is not read; send {kinds.name}, compressed or not.")
    media_type = _media_type(request)
    if media_type == MULTIPART:
        _, options = parse_options_header(request.headers["content-type"])
        return FormParser(options.get(b"boundary", b""), uploads, uploads[kinds.part].fields)
    if media_type in kinds.media_types:
        uploads[kinds.part].set_name(_decode_name(get_header(request.scope, b"x-filename")))
        return None
    raise UnsupportedMedia(f"A body of type {media_type} is not read; send {kinds.name} with Content-Type: image/tiff.")


def _stated_length(request: Request, limit_bytes: int) -> int:
    """Return the length of the body, 0 where it is not stated.

    Raises TooLarge for one beyond the limit; a form may add its frame and fields.
    """
    stated = get_header(request.scope, b"content-length")
    length = int(stated) if stated.isdecimal() else 0
    if length > limit_bytes + (MAX_FORM_BYTES if is_multipart(request) else 0):
        raise too_large(limit_bytes)
    return length


def _decode_name(header: str) -> str:
    """Return the file name in a header that was read as Latin-1: in UTF-8, as curl sends it, or percent-encoded.

    A browser's scripts and most libraries can send no other letters than those of Latin-1, and must encode the rest.
    """
    name = unquote_to_bytes(header.encode("latin-1"))
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def plain_name(name: str) -> str:
    """Return the last part of a file name that a client sent, for naming the answer; it is never opened."""
    return "".join(c for c in PurePath(name.replace("\\", "/")).name if c.isprintable())[:200]
