"""Receive a posted file, counting bytes while they arrive; raw bodies and multipart forms alike."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path, PurePath
from typing import BinaryIO, Protocol

from blake3 import blake3
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.types import Message

from service.api.headers import stated
from service.api.multipart import FORM_BYTES, Form
from service.api.threads import in_thread
from service.core.errors import Cancelled, TooLarge, UnsupportedMedia

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


class Room:
    """At most `nbytes` of memory for uploads, or parts of them, that lie nowhere else. Safe to use from threads."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Whether there was so much; who has taken it gives it back."""
        with self._lock:
            if nbytes > self._free:
                return False
            self._free -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._free += nbytes


# Of this process.
ROOM_BYTES = 64 * 2**20
ROOM = Room(ROOM_BYTES)


class Upload:
    """A file on its way to disk, or into memory where it is small, with the name and the form fields that came along.

    path  where the file is, or will be once it has landed, if it is to lie on the disk
    """

    def __init__(self, path: Path, limit_bytes: int, room: Room = ROOM) -> None:
        self.path = path
        self.name = ""
        self.fields: dict[str, str] = {}
        self.received = 0
        self._file: BinaryIO | None = None
        self._room = room
        # Of the room, for what is pending, and for a file that is kept in memory.
        self._taken = 0
        self._kept = False
        self._content: bytearray | None = None
        self._hash = blake3()
        self.limit_bytes = limit_bytes
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._writing: asyncio.Task[None] | None = None

    def take(self, data: bytes | memoryview) -> None:
        """Add bytes of the file, which must not change afterwards. Raises TooLarge."""
        self.received += len(data)
        if self.received > self.limit_bytes:
            raise too_large(self.limit_bytes)
        self._pending.append(data)
        self._pending_bytes += len(data)

    async def flush(self, nbytes: int) -> None:
        """Have what is pending written by a thread, now that the next `nbytes` of the body were taken.

        While more arrives, if it is a block; before that, if there is no room for it.
        """
        room = self._room.take(nbytes)
        self._taken += nbytes if room else 0
        if self._pending_bytes < BLOCK_BYTES and (room or not self._pending):
            return
        # One at a time: blocks keep their order, and a disk slower than the network does not fill the memory.
        await self.written()
        taken, self._taken = self._taken, 0
        self._writing = asyncio.create_task(self._write_block(self._drain(), taken))
        if not room:
            await self.written()

    async def _write_block(self, blocks: list[bytes | memoryview], taken: int) -> None:
        try:
            await in_thread(partial(self._write, blocks))
        finally:
            self._room.give_back(taken)

    async def written(self) -> None:
        """Until no block is being written. Raises OSError where that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def keep_in_memory(self) -> None:
        """The file that has arrived never is on a disk; only where there was room, and no part of it is written."""
        if self._file is None:
            self._kept = True
            self._give_back(all_but=self.received)

    def land(self) -> None:
        """Write the rest, or put it together, in the thread of the caller: only then the file is there."""
        blocks = self._drain()
        if self._kept:
            self._content = bytearray().join(blocks)
            self._hash.update(self._content)
        else:
            self._write(blocks).close()
            self._give_back()

    @property
    def source(self) -> Path | bytearray:
        """The file, once it has landed: where it lies on the disk, or all that would be in it, until `let_go`."""
        return self.path if self._content is None else self._content

    def let_go(self) -> None:
        """Nothing more is written; of a file in memory there is left what is looked at."""
        self._content = None
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        """The same, and its room in memory is for others: nobody looks at it any more."""
        self.let_go()
        self._drain()
        self._give_back()

    @property
    def digest(self) -> str:
        """BLAKE3 of what was written: as hard to forge as SHA-256, in a quarter of the time."""
        return self._hash.hexdigest()

    def _give_back(self, all_but: int = 0) -> None:
        """Of the room, what was taken: of a form, its frame and fields as well."""
        self._room.give_back(self._taken - all_but)
        self._taken = all_but

    def _drain(self) -> list[bytes | memoryview]:
        """What was pending."""
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


async def receive(request: Request, upload: Upload) -> None:
    """Take the posted file; all but its end is written. An empty body makes an empty one.

    Raises UnsupportedMedia, TooLarge, BadParameter for a broken form, and Cancelled when the client goes away before it
    has sent everything.
    """
    body = _feed_for(request, upload)
    _check_length(request, upload.limit_bytes)
    more = True
    try:
        while more:
            # No name here may hold a piece while the next is waited for, as those of `request.stream` do.
            nbytes, more = _fed(body, await request.receive())
            await upload.flush(nbytes)
    finally:
        await upload.written()
    body.finish()


def _fed(body: Feed, message: Message) -> tuple[int, bool]:
    """Bytes of the body that came with the message, which were taken, and whether more will come. Raises Cancelled."""
    if message["type"] == "http.disconnect":
        raise Cancelled("The client went away while sending.")
    chunk = message.get("body", b"")
    body.feed(chunk)
    return len(chunk), message.get("more_body", False)


def too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"The upload exceeds the limit of {limit_bytes:,} bytes; crop it, or compress it as TIFF deflate.")


def _media_type(request: Request) -> str:
    return stated(request.scope, b"content-type").partition(";")[0].strip().lower()


def _feed_for(request: Request, upload: Upload) -> Feed:
    encoding = stated(request.scope, b"content-encoding").lower() or "identity"
    if encoding != "identity":
        raise UnsupportedMedia(f"Content-Encoding {encoding} is not read; send the TIFF itself, compressed or not.")
    kind = _media_type(request)
    if kind == MULTIPART:
        _, options = parse_options_header(request.headers["content-type"])
        form = Form(options.get(b"boundary", b""), upload.take, upload.fields)
        form.named = lambda name: setattr(upload, "name", plain_name(name))
        return form
    if kind in RAW_TYPES:
        upload.name = plain_name(stated(request.scope, b"x-filename"))
        return Raw(upload)
    raise UnsupportedMedia(f"A body of type {kind} is not read; send the TIFF itself with Content-Type: image/tiff.")


def _check_length(request: Request, limit_bytes: int) -> None:
    """Refuse before the body is read where its length is stated; a form is allowed its frame and its fields."""
    length = stated(request.scope, b"content-length")
    if not length.isdecimal() or int(length) <= limit_bytes:
        return
    if not is_multipart(request) or int(length) > limit_bytes + FORM_BYTES:
        raise too_large(limit_bytes)


def plain_name(name: str) -> str:
    """The last part of a file name that a client sent, for naming the answer; never opened."""
    return "".join(c for c in PurePath(name.replace("\\", "/")).name if c.isprintable())[:200]
