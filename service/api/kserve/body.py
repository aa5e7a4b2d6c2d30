"""Receive the body of an inference request: a JSON object, which the values of the tensor may follow as binary data."""

from __future__ import annotations

import zlib
from functools import partial
from typing import NamedTuple

from fastapi import Request
from starlette.types import Message

from service.api.dependencies import get_quota_name
from service.api.kserve.messages import InferenceRequest, parse_request
from service.api.kserve.tensors import check_size, convert_values, make_tiff_header
from service.api.messages.headers import get_header
from service.core.errors import BadParameter, Cancelled, RateLimited, TooLarge, UnsupportedMedia
from service.serving.storage.memory_budget import FairMemoryBudget
from service.serving.storage.threads import run_in_thread

LENGTH_HEADER = "Inference-Header-Content-Length"
# Maximum size of the JSON object that precedes binary data.
MAX_HEADER_BYTES = 2**16
# Maximum size of a JSON object that contains the values.
MAX_JSON_BYTES = 2**22
# Maximum number of lists and objects in a JSON object. Parsing millions of them blocks other threads for seconds.
MAX_JSON_PARTS = 2**17
# Memory per byte of a JSON object while it is parsed.
PARSING_BYTES = 48
# Maximum memory for JSON objects with values. A single client can use half of this memory.
JSON_MEMORY_BUDGET = FairMemoryBudget(4 * PARSING_BYTES * MAX_JSON_BYTES)
RETRY_SECONDS = 1
# Maximum number of bytes that are decompressed at a time.
CHUNK_BYTES = 2**20
# zlib's `wbits` arguments by content encoding.
WINDOW_BITS = {"gzip": 31, "deflate": 15}


class BodyStream:
    """The body of a request, decompressed as it arrives. Raises UnsupportedMedia for an unknown Content-Encoding.

    The methods raise Cancelled if the client disconnects, and BadParameter for invalid compressed data.
    """

    def __init__(self, request: Request) -> None:
        encoding = get_header(request.scope, b"content-encoding").strip().lower() or "identity"
        if encoding not in {"identity", *WINDOW_BITS}:
            raise UnsupportedMedia(f"Content-Encoding {encoding} is not supported. Use gzip, deflate or none.")
        self._request = request
        self._decompressor = None if encoding == "identity" else zlib.decompressobj(WINDOW_BITS[encoding])
        # Decoded bytes that have not been returned yet, and received bytes that have not been decompressed yet.
        self._pending, self._compressed = b"", b""
        self._has_more = True

    @property
    def is_compressed(self) -> bool:
        """Whether the body is compressed."""
        return self._decompressor is not None

    async def read_up_to(self, nbytes: int) -> bytes:
        """Return the next `nbytes` bytes, or fewer at the end of the body."""
        chunks, missing_bytes = list[bytes](), nbytes
        while missing_bytes and (chunk := await self.read_chunk()):
            chunks.append(chunk[:missing_bytes])
            self._pending = chunk[missing_bytes:]
            missing_bytes -= len(chunks[-1])
        return b"".join(chunks)

    async def read_chunk(self) -> bytes:
        """Return the next bytes, or b"" at the end of the body."""
        chunk, self._pending = self._pending, b""
        if self._decompressor is None:
            while not chunk and self._has_more:
                chunk = await self._receive()
            return chunk
        while not chunk and (self._has_more or self._compressed or not self._decompressor.eof):
            chunk = await self._decompress(self._decompressor)
        return chunk

    async def _receive(self) -> bytes:
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("The client disconnected during the upload.")
        self._has_more = message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def _decompress(self, decompressor: zlib._Decompress) -> bytes:
        compressed = self._compressed or (await self._receive() if self._has_more else b"")
        try:
            chunk = await run_in_thread(partial(decompressor.decompress, compressed, CHUNK_BYTES))
        except zlib.error:
            raise BadParameter("The body cannot be decompressed as its Content-Encoding specifies.") from None
        self._compressed = decompressor.unconsumed_tail
        is_truncated = not (chunk or self._has_more or self._compressed or decompressor.eof)
        if is_truncated or decompressor.unused_data:
            raise BadParameter("The compressed body is truncated, or other data follows it.")
        return chunk


class ReceivedRequest(NamedTuple):
    """A request whose JSON object has been received.

    message  the JSON object, without values
    values   values in the JSON object as binary data; None if they follow the JSON object
    nbytes   size of the values
    """

    message: InferenceRequest
    values: bytes | None
    nbytes: int

    @property
    def missing_bytes(self) -> int:
        """Size of the binary data after the JSON object."""
        return self.nbytes if self.values is None else 0


async def receive_json(request: Request, stream: BodyStream, limit_bytes: int) -> ReceivedRequest:
    """Receive the JSON object of a request for a tensor of at most `limit_bytes` bytes.

    Raises the errors of `parse_request`, `check_size`, `convert_values` and `check_missing_bytes`, TooLarge, and
    RateLimited if the JSON objects of the client need too much memory.
    """
    content_length = get_header(request.scope, b"content-length")
    is_known = content_length.isdecimal() and not stream.is_compressed
    if header := get_header(request.scope, LENGTH_HEADER.lower().encode()):
        header_bytes = _parse_header_length(header)
        received = _parse(await stream.read_up_to(header_bytes), limit_bytes)
        if is_known:
            check_missing_bytes(received, received.missing_bytes + header_bytes - int(content_length))
        return received
    max_bytes = int(content_length) if is_known else MAX_JSON_BYTES
    if max_bytes > MAX_JSON_BYTES:
        raise _make_json_too_large_error()
    client, memory_bytes = get_quota_name(request), max_bytes * PARSING_BYTES
    if not JSON_MEMORY_BUDGET.reserve(client, memory_bytes):
        raise RateLimited("Too many tensors in JSON are being received. Try again in a second.", RETRY_SECONDS)
    try:
        content = await stream.read_up_to(max_bytes)
        if await stream.read_chunk():
            raise _make_json_too_large_error()
        return await run_in_thread(partial(_parse, content, limit_bytes))
    finally:
        JSON_MEMORY_BUDGET.release(client, memory_bytes)


def _parse_header_length(header: str) -> int:
    length = int(header) if header.isdecimal() and len(header) < 20 else 0
    if not 1 <= length <= MAX_HEADER_BYTES:
        raise BadParameter(
            f"{LENGTH_HEADER}: the JSON object before the binary data must have 1 to {MAX_HEADER_BYTES:,} bytes."
        )
    return length


def _make_json_too_large_error() -> TooLarge:
    return TooLarge(
        f"The JSON object is larger than {MAX_JSON_BYTES:,} bytes. Send the values as binary data, with the parameter"
        f" binary_data_size and the header {LENGTH_HEADER}."
    )


def _parse(content: bytes, limit_bytes: int) -> ReceivedRequest:
    if content.count(b"[") + content.count(b"{") > MAX_JSON_PARTS:
        raise TooLarge(f"data: there are more than {MAX_JSON_PARTS:,} nested lists. Send one flat list in C order.")
    message = parse_request(content)
    tensor = message.input
    nbytes = check_size(tensor, limit_bytes)
    values = None if tensor.data is None else convert_values(tensor)
    message = message.model_copy(update={"inputs": [tensor.model_copy(update={"data": None})]})
    return ReceivedRequest(message, values, nbytes)


def check_missing_bytes(received: ReceivedRequest, missing_bytes: int) -> None:
    """Raise BadParameter unless the binary data has the size of the tensor. `missing_bytes` may be negative."""
    if missing_bytes:
        problem = "longer than" if missing_bytes < 0 else f"{missing_bytes} bytes shorter than"
        raise BadParameter(
            f"The binary data is {problem} the {received.missing_bytes} bytes of the tensor.",
            parameter="binary_data_size",
        )


class TiffUpload:
    """The tensor of a request as the body of an upload: an uncompressed TIFF, which is passed on as it arrives."""

    def __init__(self, request: Request, stream: BodyStream, received: ReceivedRequest) -> None:
        self._request, self._stream, self._received = request, stream, received
        header = make_tiff_header(received.message.input)
        self.nbytes = len(header) + received.nbytes
        self._head = header + (received.values or b"")
        self._missing_bytes = received.missing_bytes
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next part of the TIFF. After its end, wait until the client disconnects.

        Raises the errors of `check_missing_bytes` and `BodyStream`.
        """
        if self._is_complete:
            return await self._request.receive()
        chunk, self._head = self._head, b""
        if not chunk:
            chunk = await self._stream.read_chunk()
            self._is_complete = not chunk
            self._missing_bytes -= len(chunk)
            if self._is_complete or self._missing_bytes < 0:
                check_missing_bytes(self._received, self._missing_bytes)
        return {"type": "http.request", "body": chunk, "more_body": not self._is_complete}
