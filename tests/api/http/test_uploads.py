from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from service.api.http import uploads
from service.api.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, MAX_PREAMBLE_BYTES
from service.api.http.uploads import BLOCK_BYTES, UPLOAD_MEMORY_BUDGET, Upload, receive_upload, sanitize_file_name
from service.core.errors import BadParameter, Cancelled, RateLimited, StackSegError, TooLarge, UnsupportedMedia
from service.serving.storage.memory_budget import MemoryBudget
from service.serving.storage.scratch import ScratchSpace, SpaceReservation

TIFF = {"content-type": "image/tiff"}
FORM = {"content-type": "multipart/form-data; boundary=frontier"}


def make_quota(nbytes: int = 2**40) -> SpaceReservation:
    """Return the disk quota of a request in a scratch space of `nbytes` bytes."""
    return ScratchSpace(nbytes).make_reservation("client")


def post(
    chunks: list[bytes],
    headers: dict[str, str],
    folder: Path,
    limit: int = 2**30,
    *,
    disconnected: bool = False,
    in_memory: bool = False,
    budget: MemoryBudget = UPLOAD_MEMORY_BUDGET,
) -> Upload:
    """Receive a body that arrives in these chunks, and return the completed upload.

    If `disconnected` is set, the client disconnects before the end of the body.
    """
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append(
        {"type": "http.disconnect"} if disconnected else {"type": "http.request", "body": b"", "more_body": False}
    )
    pending = iter(messages)

    async def next_message() -> Any:
        return next(pending)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "method": "POST", "headers": raw}, next_message)
    upload = Upload(folder / "request" / "upload.tif", limit, make_quota(), budget)
    folder.mkdir(exist_ok=True)
    try:
        asyncio.run(receive_upload(request, upload))
    except BaseException:
        upload.close()
        raise
    if in_memory:
        upload.keep_in_memory()
    upload.complete()
    return upload


def encode_part(name: str, content: bytes, filename: str | None = None) -> bytes:
    file_name_option = f'; filename="{filename}"' if filename is not None else ""
    return (
        f'--frontier\r\nContent-Disposition: form-data; name="{name}"{file_name_option}\r\n\r\n'.encode()
        + content
        + b"\r\n"
    )


def encode_form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--frontier--\r\n"


def test_raw_body_is_written_to_disk(tmp_path: Path) -> None:
    upload = post([b"II*\0", b"", b"rest"], TIFF | {"x-filename": "cells.tif"}, tmp_path)
    assert upload.path.read_bytes() == b"II*\0rest"
    assert (upload.name, upload.received_bytes, upload.fields) == ("cells.tif", 8, {})


def test_small_body_stays_in_memory_until_its_content_is_dropped(tmp_path: Path) -> None:
    upload = post([b"II*\0", b"rest"], TIFF, tmp_path, in_memory=True)
    assert upload.source == b"II*\0rest"
    assert upload.digest == blake3(b"II*\0rest").hexdigest()
    assert list(tmp_path.iterdir()) == []
    upload.drop_content()
    assert upload.source == upload.path
    upload.close()


def test_bodies_that_exceed_the_memory_budget_are_written_to_disk(tmp_path: Path) -> None:
    budget = MemoryBudget(20)
    uploads = [post([b"II*\0rest"], TIFF, tmp_path / str(n), in_memory=True, budget=budget) for n in range(3)]
    assert [upload.source for upload in uploads] == [b"II*\0rest", b"II*\0rest", uploads[2].path]
    assert uploads[2].path.read_bytes() == b"II*\0rest"
    # A volume may still refer to the content, so its memory is not returned yet.
    uploads[0].drop_content()
    assert not budget.reserve(8)
    for _ in range(2):
        uploads[0].close()
    assert budget.reserve(12)
    assert not budget.reserve(1)
    uploads[1].close()


def test_received_bytes_of_stalled_uploads_count_against_the_memory_budget(tmp_path: Path) -> None:
    """The limit does not depend on the number of uploads, or on whether they are kept in memory."""
    budget = MemoryBudget(20)
    uploads = [Upload(tmp_path / str(n) / "upload.tif", 100, make_quota(), budget) for n in range(5)]

    async def arrive() -> None:
        for data in (b"II*\0", b"rest"):
            for upload in uploads:
                upload.add_data(data)
                await upload.write_full_blocks(len(data))

    asyncio.run(arrive())
    on_disk = [upload for upload in uploads if upload.path.exists()]
    reserved = 8 * (len(uploads) - len(on_disk))
    assert 0 < reserved <= 20
    assert budget.reserve(20 - reserved)
    assert not budget.reserve(1)
    for upload in uploads:
        upload.keep_in_memory()
        upload.complete()
        source = upload.source
        assert (source.read_bytes() if isinstance(source, Path) else source) == b"II*\0rest"
        assert (source == upload.path) == (upload in on_disk)
        upload.close()
    assert budget.reserve(reserved)


def test_written_chunk_of_a_stalled_upload_leaves_memory(tmp_path: Path) -> None:
    message = {"type": "http.request", "body": bytes(1000), "more_body": True}
    references = sys.getrefcount(message["body"])

    async def arrive() -> None:
        calls: asyncio.Queue[None] = asyncio.Queue()

        async def next_message() -> Any:
            calls.put_nowait(None)
            if calls.qsize() > 1:
                await asyncio.sleep(3600)
            return message

        request = Request({"type": "http", "method": "POST", "headers": []}, next_message)
        upload = Upload(tmp_path / "upload.tif", 2**20, make_quota(), MemoryBudget(0))
        receiving = asyncio.ensure_future(receive_upload(request, upload))
        async with asyncio.timeout(10):
            # The writing thread may still hold a reference.
            while calls.qsize() < 2 or sys.getrefcount(message["body"]) > references:
                await asyncio.sleep(0.01)
        receiving.cancel()
        upload.close()

    asyncio.run(arrive())


def test_memory_is_released_after_a_body_is_written_or_its_client_disconnects(tmp_path: Path) -> None:
    budget = MemoryBudget(4 * BLOCK_BYTES)
    post([bytes(BLOCK_BYTES), b"rest"] * 2, TIFF, tmp_path, budget=budget)
    with pytest.raises(Cancelled):
        post([bytes(BLOCK_BYTES)], TIFF, tmp_path, disconnected=True, budget=budget)
    assert budget.reserve(4 * BLOCK_BYTES)


def test_memory_of_form_boundaries_and_fields_is_released(tmp_path: Path) -> None:
    body = encode_form(encode_part("file", b"II*\0", "a"), encode_part("model", b"bands"))
    budget = MemoryBudget(len(body))
    upload = post([body], FORM, tmp_path, in_memory=True, budget=budget)
    assert upload.source == b"II*\0"
    assert budget.reserve(len(body) - 4)
    assert not budget.reserve(1)
    upload.close()
    assert budget.reserve(4)


def test_empty_body_in_memory_creates_no_folder(tmp_path: Path) -> None:
    upload = post([], TIFF, tmp_path / "request", in_memory=True)
    assert upload.source == b""
    assert not upload.path.parent.exists()


def test_blocks_written_during_the_upload_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 3)
    body = [number.to_bytes(2, "big") for number in range(1001)]
    upload = post(body, TIFF, tmp_path)
    assert upload.path.read_bytes() == b"".join(body)
    assert upload.digest == blake3(b"".join(body)).hexdigest()


def test_write_errors_during_the_upload_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 3)
    (tmp_path / "request" / "upload.tif").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        post([b"II*\0", b"rest", b"more"], TIFF, tmp_path)
    with pytest.raises(IsADirectoryError):
        post([b"II*\0"], TIFF, tmp_path)


def test_large_body_is_written_to_disk_even_if_it_should_stay_in_memory(tmp_path: Path) -> None:
    upload = post([bytes(BLOCK_BYTES), b"rest"], TIFF, tmp_path, in_memory=True)
    assert upload.source == upload.path
    assert upload.path.read_bytes() == bytes(BLOCK_BYTES) + b"rest"


def test_body_with_many_blocks_keeps_their_order(tmp_path: Path) -> None:
    chunks = [bytes([number]) * (BLOCK_BYTES // 3) for number in range(10)]
    assert post(chunks, TIFF, tmp_path).path.read_bytes() == b"".join(chunks)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(min_size=1, max_size=300)
    | st.sampled_from([b"\r\n--frontie", b"--frontier", b"\r\n", b"\r\n--frontier-like"]),
    preamble=st.sampled_from(
        [
            b"",
            b"\r\n",
            b"A message.\r\n",
            b"MIME-Version: 1.0\r\n\r\n",
            b"--frontiers\r\n--frontie\n",
            b"a--frontier\r\n\n",
        ]
    ),
    epilogue=st.sampled_from([b"", b"The end.\r\n", b"--frontier\r\n"]),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_form_is_parsed_in_chunks_of_any_size(
    tmp_path: Path, content: bytes, preamble: bytes, epilogue: bytes, cuts: list[int]
) -> None:
    form = encode_form(
        encode_part("overlap", b"0.5"),
        encode_part("file", content, "my cells.tif"),
        encode_part("model", "zellen µ".encode()),
    )
    body = preamble + form + epilogue
    edges = sorted({0, *(min(cut, len(body)) for cut in cuts), len(body)})
    chunks = [body[start:end] for start, end in pairwise(edges)]
    upload = post(chunks, FORM, tmp_path)
    assert upload.path.read_bytes() == content
    assert (upload.name, upload.fields) == ("my cells.tif", {"overlap": "0.5", "model": "zellen µ"})


def test_boundary_may_be_quoted_and_followed_by_blanks(tmp_path: Path) -> None:
    body = (
        encode_form(encode_part("file", b"II*\0", "a"))
        .replace(b"frontier", b"of a: form")
        .replace(b"form\r", b"form \t\r")
    )
    upload = post([body], {"content-type": 'multipart/form-data; boundary="of a: form"'}, tmp_path)
    assert upload.path.read_bytes() == b"II*\0"


@pytest.mark.parametrize(
    ("body", "headers", "error", "word"),
    [
        (
            encode_form(encode_part("file", b"a", "a"), encode_part("file", b"b", "b")),
            FORM,
            BadParameter,
            "more than one",
        ),
        (
            encode_form(encode_part("file", b"a", "a"), encode_part("x", b"1"), encode_part("x", b"2")),
            FORM,
            BadParameter,
            "twice",
        ),
        (encode_part("file", b"II*", "a"), FORM, BadParameter, "truncated"),
        (encode_form(encode_part("image", b"I" * (MAX_FIELD_BYTES + 1))), FORM, BadParameter, "'file'"),
        (encode_form(*(encode_part(str(n), b"1") for n in range(MAX_FIELDS + 1))), FORM, BadParameter, "fields"),
        (b"nonsense", FORM, BadParameter, "does not begin with its boundary"),
        (b"x\r\n" * MAX_PREAMBLE_BYTES, FORM, BadParameter, "does not begin with its boundary"),
        (encode_form(encode_part("file", b"II*", "a")).replace(b"\r", b""), FORM, BadParameter, "LF instead of CRLF"),
        (
            encode_form(
                encode_part("file", b"SUkq", "a").replace(b"\r\n\r", b"\r\nContent-Transfer-Encoding: BASE64\r\n\r")
            ),
            FORM,
            BadParameter,
            "base64",
        ),
        (b"--frontier\r\nfile", FORM, BadParameter, "truncated"),
        (b"--frontier\r\n" + b"a: b\r\n" * 5000, FORM, BadParameter, "malformed"),
        (b"x", {"content-type": "multipart/form-data"}, BadParameter, "no boundary"),
        (b"x", {"content-type": "multipart/form-data; boundary=" + "x" * 5000}, BadParameter, "boundary .* invalid"),
        (b"{}", {"content-type": "application/json"}, UnsupportedMedia, "application/json"),
        (b"x", TIFF | {"content-encoding": "gzip"}, UnsupportedMedia, "gzip"),
    ],
)
def test_invalid_body_is_rejected_with_a_reason(
    tmp_path: Path, body: bytes, headers: dict[str, str], error: type[StackSegError], word: str
) -> None:
    with pytest.raises(error, match=word):
        post([body], headers, tmp_path)


def test_content_length_beyond_the_limit_is_rejected_before_the_upload(tmp_path: Path) -> None:
    with pytest.raises(TooLarge, match="100 bytes"):
        post([], TIFF | {"content-length": "101"}, tmp_path, 100, disconnected=True)


@pytest.mark.parametrize("headers", [TIFF, TIFF | {"content-length": "5"}, TIFF | {"content-length": "-5"}])
def test_limit_applies_without_a_correct_content_length(tmp_path: Path, headers: dict[str, str]) -> None:
    assert post([b"x" * 60, b"x" * 40], headers, tmp_path, 100).received_bytes == 100
    with pytest.raises(TooLarge):
        post([b"x" * 60, b"x" * 41], headers, tmp_path, 100)


def test_limit_applies_only_to_the_file_in_a_form(tmp_path: Path) -> None:
    body = encode_form(encode_part("file", b"x" * 100, "a"), encode_part("model", b"bands"))
    assert post([body], FORM | {"content-length": str(len(body))}, tmp_path, 100).received_bytes == 100
    with pytest.raises(TooLarge):
        post([encode_form(encode_part("file", b"x" * 101, "a"))], FORM, tmp_path, 100)


def test_disconnect_during_the_upload_is_detected(tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        post([b"II*\0"], TIFF | {"content-length": "100"}, tmp_path, disconnected=True)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("cells.tif", "cells.tif"),
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\a.tif", "a.tif"),
        ("a\r\nb\0", "ab"),
        ("", ""),
    ],
)
def test_file_name_is_reduced_to_its_last_component(sent: str, expected: str) -> None:
    assert sanitize_file_name(sent) == expected


@pytest.mark.parametrize("has_length", [True, False])
def test_disk_space_is_reserved_for_expected_or_received_bytes(tmp_path: Path, has_length: bool) -> None:
    space = ScratchSpace(2**30)

    async def stall(quota: SpaceReservation, length: int) -> None:
        """Upload the first 1000 of `length` bytes, then cancel."""
        stalled = asyncio.Event()
        messages = [{"type": "http.request", "body": bytes(1000), "more_body": True}]

        async def next_message() -> Any:
            if not messages:
                stalled.set()
                await asyncio.sleep(60)
            return messages.pop()

        headers = [(b"content-type", b"image/tiff"), (b"content-length", str(length).encode())]
        request = Request({"type": "http", "method": "POST", "headers": headers[: 1 + has_length]}, next_message)
        upload = Upload(tmp_path / "upload.tif", 2**30, quota)
        receiving = asyncio.ensure_future(receive_upload(request, upload))
        await asyncio.wait([receiving, asyncio.ensure_future(stalled.wait())], return_when="FIRST_COMPLETED")
        receiving.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await receiving
        finally:
            upload.close()

    first, second, third = (space.make_reservation("client") for _ in range(3))
    asyncio.run(stall(first, 2**28))
    assert first.nbytes == 2**28 if has_length else 1000 <= first.nbytes <= 1000 + BLOCK_BYTES
    first.reserve(2**28 - first.nbytes)
    asyncio.run(stall(second, 2**28))
    space.make_reservation("client").reserve(2**29 - space.used_bytes)
    with pytest.raises(RateLimited):
        asyncio.run(stall(third, 1000))


def test_memory_is_released_if_a_request_ends_before_its_block_is_written(tmp_path: Path) -> None:
    budget = MemoryBudget(2 * BLOCK_BYTES)

    async def send(upload: Upload) -> None:
        for _ in range(2):
            upload.add_data(bytes(BLOCK_BYTES))
            await upload.write_full_blocks(BLOCK_BYTES)

    async def end_early() -> None:
        upload = Upload(tmp_path / "upload.tif", 2**30, make_quota(), budget)
        sending = asyncio.ensure_future(send(upload))
        # Cancel after the first step of `sending`, but before the first step of the task that writes the first block.
        asyncio.get_running_loop().call_soon(sending.cancel)
        with pytest.raises(asyncio.CancelledError):
            await sending
        upload.close()

    asyncio.run(end_early())
    assert budget.reserve(2 * BLOCK_BYTES)
