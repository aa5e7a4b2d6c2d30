"""Responses that send files, such as results: byte ranges, ETags, and conditional requests."""

from __future__ import annotations

import os
import re
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from service.api.messages.headers import OCTET_STREAM, get_header, get_list_header
from service.api.messages.result_headers import build_headers, describe_attachment
from service.core.files.atomic_files import make_descriptor_path
from service.serving.results.metadata import ResultMetadata

# A byte range: first and last byte, or number of bytes at the end of the file. No file needs more digits.
BYTE_RANGE_PATTERN = re.compile(r"([0-9]{0,19})-([0-9]{0,19})")


class DownloadResponse(FileResponse):
    """Response that sends a file or, if the request has a Range header, parts of it (RFC 9110, section 14).

    If-Match and If-None-Match are compared with the ETag of the file (RFC 9110, section 13).
    Unlike in `FileResponse`, unknown units are ignored, parts that lie beyond the end of the file are skipped, and
    errors are problem documents. `stat_result` is required for these checks.
    """

    def apply_accept(self, scope: Scope) -> None:
        """Send the file as `application/octet-stream` if this is the only type that the client accepts."""
        if get_header(scope, b"accept").strip().lower() == OCTET_STREAM:
            self.headers["content-type"] = OCTET_STREAM

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.apply_accept(scope)
        if self._is_cached(scope):
            await self._send_not_modified(send)
            return
        range_header, if_range = get_header(scope, b"range"), get_header(scope, b"if-range")
        if range_header and self.stat_result is not None:
            is_current = if_range in {"", self.headers["etag"], self.headers["last-modified"]}
            # Ranges are defined only for GET.
            uses_range = scope["method"] == "GET" and self.status_code == HTTPStatus.OK and is_current
            ranges = select_ranges(range_header, self.stat_result.st_size) if uses_range else None
            headers = [header for header in scope["headers"] if header[0] != b"range"]
            scope = {**scope, "headers": [*headers, (b"range", ranges.encode())] if ranges else headers}
        await super().__call__(scope, receive, send)

    def _is_cached(self, scope: Scope) -> bool:
        return self.status_code == HTTPStatus.OK and is_cached(scope, self.headers.get("etag", ""))

    async def _send_not_modified(self, send: Send) -> None:
        # Browsers replace stored headers by these, and would replace the policy of the page by that of other responses.
        headers = [header for header in self.raw_headers if header[0] not in {b"content-length", b"content-type"}]
        await send({"type": "http.response.start", "status": HTTPStatus.NOT_MODIFIED, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def is_cached(scope: Scope, etag: str) -> bool:
    """Return whether the client already has the file. Raises HTTPException 412 if it requires another one."""
    if scope["method"] not in {"GET", "HEAD"}:
        return False
    if_match, if_none_match = get_list_header(scope, b"if-match"), get_list_header(scope, b"if-none-match")
    if if_match and {etag, "*"}.isdisjoint(_split_etags(if_match)):
        detail = "The file has another ETag than the header If-Match. Omit the header, and download the whole file."
        raise HTTPException(HTTPStatus.PRECONDITION_FAILED, detail, {"ETag": etag})
    return not {etag, f"W/{etag}", "*"}.isdisjoint(_split_etags(if_none_match))


def _split_etags(header: str) -> list[str]:
    """Return the ETags in a header. The ETags of this service do not contain commas."""
    return [etag.strip() for etag in header.split(",")]


def select_ranges(header: str, file_bytes: int) -> str | None:
    """Return a Range header with those ranges of a header that are part of a file; None if the unit is not `bytes`.

    Raises HTTPException 416 if the header is malformed, or if no range is part of the file.
    """
    unit, separator, ranges = header.partition("=")
    if separator and unit.strip().lower() != "bytes":
        return None
    matches = [BYTE_RANGE_PATTERN.fullmatch(item.strip()) for item in ranges.split(",") if item.strip()]
    selected = [match[0] for match in matches if match is not None and _is_satisfiable(match[1], match[2], file_bytes)]
    if None in matches or not selected:
        detail = (
            f"The header Range is malformed, or selects no bytes of this file, which has {file_bytes} bytes. To get"
            " bytes 100 to 199, send `Range: bytes=100-199`; for the rest of the file, send `Range: bytes=100-`."
        )
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        raise HTTPException(status, detail, {"Content-Range": f"bytes */{file_bytes}"})
    return f"bytes={','.join(selected)}"


def _is_satisfiable(first: str, last: str, file_bytes: int) -> bool:
    if not first:
        # The last bytes of the file.
        return bool(last) and int(last) > 0 and file_bytes > 0
    return int(first) < file_bytes and (not last or int(first) <= int(last))


class OpenFileResponse(DownloadResponse):
    """Response that sends an open file, even if its path is deleted in the meantime, and then closes the file."""

    def __init__(self, file: BinaryIO, media_type: str, headers: dict[str, str]) -> None:
        path, status = make_descriptor_path(file.fileno()), os.fstat(file.fileno())
        super().__init__(path, stat_result=status, media_type=media_type, headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


class ResultResponse(DownloadResponse):
    """Response that sends a result and then closes `resources`, even after an error.

    If the content is already in memory, it is sent directly, which saves four thread switches for a small result. In
    this case, Range headers are ignored, which is allowed because such responses are sent only for POST.
    """

    chunk_size = 2**20

    def __init__(
        self,
        path: Path,
        metadata: ResultMetadata,
        content: bytes | None = None,
        stat_result: os.stat_result | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(path, stat_result=stat_result, media_type=metadata.media_type, headers=headers)
        self.metadata = metadata
        self._content = content
        if content is not None:
            self.headers["content-length"] = str(len(content))
        self.resources = AsyncExitStack()

    def open(self) -> BinaryIO:
        """Open the result file. Write content that is only in memory to the file first. Blocks. Raises OSError."""
        path = Path(self.path)
        if self._content is not None:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(self._content)
        return path.open("rb")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.resources:
            if self._content is None:
                await super().__call__(scope, receive, send)
                return
            self.apply_accept(scope)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._content})


def build_response(
    path: Path, metadata: ResultMetadata, content: bytes | None = None, stat_result: os.stat_result | None = None
) -> ResultResponse:
    """Build the response with a result file and the metadata of the result.

    path         path of the file
    metadata     metadata to send as headers
    content      content of the file if it is in memory (only for POST)
    stat_result  result of `os.stat` for the file, if known
    """
    headers = build_headers(metadata) | {"Content-Disposition": describe_attachment(metadata.file_name)}
    return ResultResponse(path, metadata, content, stat_result, headers)
