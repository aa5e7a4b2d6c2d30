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
from service.api.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS
from service.api.http.uploads import BLOCK_BYTES, UPLOAD_MEMORY, Upload, sanitize_file_name, receive
from service.core.errors import BadParameter, Cancelled, RateLimited, StackSegError, TooLarge, UnsupportedMedia
from service.serving.storage.memory_budget import MemoryBudget
from service.serving.storage.scratch import Hold, ScratchSpace

TIFF = {"content-type": "image/tiff"}
FORM = {"content-type": "multipart/form-data; boundary=frontier"}


def hold(nbytes: int = 2**40) -> Hold:
    """What one request holds of so many bytes."""
    return ScratchSpace(nbytes).hold("client")


def post(
    chunks: list[bytes],
    headers: dict[str, str],
    folder: Path,
    limit: int = 2**30,
    *,
    gone: bool = False,
    in_memory: bool = False,
    budget: MemoryBudget = UPLOAD_MEMORY,
) -> Upload:
    """What `receive` makes of a body that arrives in these chunks; `gone`: the client leaves before its end."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.disconnect"} if gone else {"type": "http.request", "body": b"", "more_body": False})
    pending = iter(messages)

    async def next_message() -> Any:
        return next(pending)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "method": "POST", "headers": raw}, next_message)
    upload = Upload(folder / "request" / "upload.tif", limit, hold(), budget)
    folder.mkdir(exist_ok=True)
    try:
        asyncio.run(receive(request, upload))
    except BaseException:
        upload.close()
        raise
    if in_memory:
        upload.keep_in_memory()
    upload.complete()
    return upload


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--frontier\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--frontier--\r\n"


def test_raw_body_lies_on_disk(tmp_path: Path) -> None:
    upload = post([b"II*\0", b"", b"rest"], TIFF | {"x-filename": "cells.tif"}, tmp_path)
    assert upload.path.read_bytes() == b"II*\0rest"
    assert (upload.name, upload.received, upload.fields) == ("cells.tif", 8, {})


def test_small_body_lies_in_memory_until_it_is_let_go_of(tmp_path: Path) -> None:
    upload = post([b"II*\0", b"rest"], TIFF, tmp_path, in_memory=True)
    assert upload.source == b"II*\0rest"
    assert upload.digest == blake3(b"II*\0rest").hexdigest()
    assert list(tmp_path.iterdir()) == []
    upload.drop_content()
    assert upload.source == upload.path
    upload.close()


def test_bodies_for_which_there_is_no_room_lie_on_disk(tmp_path: Path) -> None:
    budget = MemoryBudget(20)
    made = [post([b"II*\0rest"], TIFF, tmp_path / str(n), in_memory=True, budget=budget) for n in range(3)]
    assert [upload.source for upload in made] == [b"II*\0rest", b"II*\0rest", made[2].path]
    assert made[2].path.read_bytes() == b"II*\0rest"
    # What was read of it is still looked at.
    made[0].drop_content()
    assert not budget.reserve(8)
    for _ in range(2):
        made[0].close()
    assert budget.reserve(12)
    assert not budget.reserve(1)
    made[1].close()


def test_what_has_arrived_of_stalled_bodies_takes_room_too(tmp_path: Path) -> None:
    """However many they are, and whether they are to lie in memory or not."""
    budget = MemoryBudget(20)
    made = [Upload(tmp_path / str(n) / "upload.tif", 100, hold(), budget) for n in range(5)]

    async def arrive() -> None:
        for data in (b"II*\0", b"rest"):
            for upload in made:
                upload.add_data(data)
                await upload.flush(len(data))

    asyncio.run(arrive())
    on_disk = [upload for upload in made if upload.path.exists()]
    held = 8 * (len(made) - len(on_disk))
    assert 0 < held <= 20
    assert budget.reserve(20 - held)
    assert not budget.reserve(1)
    for upload in made:
        upload.keep_in_memory()
        upload.complete()
        source = upload.source
        assert (source.read_bytes() if isinstance(source, Path) else source) == b"II*\0rest"
        assert (source == upload.path) == (upload in on_disk)
        upload.close()
    assert budget.reserve(held)


def test_no_piece_of_a_stalled_body_stays_in_memory_once_it_is_written(tmp_path: Path) -> None:
    message = {"type": "http.request", "body": bytes(1000), "more_body": True}
    held = sys.getrefcount(message["body"])

    async def arrive() -> None:
        asked: asyncio.Queue[None] = asyncio.Queue()

        async def next_message() -> Any:
            asked.put_nowait(None)
            if asked.qsize() > 1:
                await asyncio.sleep(3600)
            return message

        request = Request({"type": "http", "method": "POST", "headers": []}, next_message)
        upload = Upload(tmp_path / "upload.tif", 2**20, hold(), MemoryBudget(0))
        receiving = asyncio.ensure_future(receive(request, upload))
        async with asyncio.timeout(10):
            # The thread that has written it may be about to let go.
            while asked.qsize() < 2 or sys.getrefcount(message["body"]) > held:
                await asyncio.sleep(0.01)
        receiving.cancel()
        upload.close()

    asyncio.run(arrive())


def test_room_is_for_others_once_a_body_is_written_or_its_client_has_gone(tmp_path: Path) -> None:
    budget = MemoryBudget(4 * BLOCK_BYTES)
    post([bytes(BLOCK_BYTES), b"rest"] * 2, TIFF, tmp_path, budget=budget)
    with pytest.raises(Cancelled):
        post([bytes(BLOCK_BYTES)], TIFF, tmp_path, gone=True, budget=budget)
    assert budget.reserve(4 * BLOCK_BYTES)


def test_form_leaves_the_room_of_its_frame_to_others(tmp_path: Path) -> None:
    body = form(part("file", b"II*\0", "a"), part("model", b"bands"))
    budget = MemoryBudget(len(body))
    upload = post([body], FORM, tmp_path, in_memory=True, budget=budget)
    assert upload.source == b"II*\0"
    assert budget.reserve(len(body) - 4)
    assert not budget.reserve(1)
    upload.close()
    assert budget.reserve(4)


def test_empty_body_in_memory_makes_no_folder(tmp_path: Path) -> None:
    upload = post([], TIFF, tmp_path / "request", in_memory=True)
    assert upload.source == b""
    assert not upload.path.parent.exists()


def test_blocks_that_are_written_while_more_arrive_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 3)
    body = [number.to_bytes(2, "big") for number in range(1001)]
    upload = post(body, TIFF, tmp_path)
    assert upload.path.read_bytes() == b"".join(body)
    assert upload.digest == blake3(b"".join(body)).hexdigest()


def test_what_fails_while_more_arrives_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 3)
    (tmp_path / "request" / "upload.tif").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        post([b"II*\0", b"rest", b"more"], TIFF, tmp_path)
    with pytest.raises(IsADirectoryError):
        post([b"II*\0"], TIFF, tmp_path)


def test_large_body_lies_on_disk_whatever_is_wished(tmp_path: Path) -> None:
    upload = post([bytes(BLOCK_BYTES), b"rest"], TIFF, tmp_path, in_memory=True)
    assert upload.source == upload.path
    assert upload.path.read_bytes() == bytes(BLOCK_BYTES) + b"rest"


def test_body_of_many_blocks_keeps_its_order(tmp_path: Path) -> None:
    chunks = [bytes([number]) * (BLOCK_BYTES // 3) for number in range(10)]
    assert post(chunks, TIFF, tmp_path).path.read_bytes() == b"".join(chunks)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(min_size=1, max_size=300)
    | st.sampled_from([b"\r\n--frontie", b"--frontier", b"\r\n", b"\r\n--frontier-like"]),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_form_is_understood_however_it_is_cut(tmp_path: Path, content: bytes, cuts: list[int]) -> None:
    body = form(part("overlap", b"0.5"), part("file", content, "my cells.tif"), part("model", "zellen µ".encode()))
    places = sorted({0, *(min(cut, len(body)) for cut in cuts), len(body)})
    chunks = [body[start:end] for start, end in pairwise(places)]
    upload = post(chunks, FORM, tmp_path)
    assert upload.path.read_bytes() == content
    assert (upload.name, upload.fields) == ("my cells.tif", {"overlap": "0.5", "model": "zellen µ"})


@pytest.mark.parametrize(
    ("body", "headers", "error", "word"),
    [
        (form(part("file", b"a", "a"), part("file", b"b", "b")), FORM, BadParameter, "more than one"),
        (form(part("file", b"a", "a"), part("x", b"1"), part("x", b"2")), FORM, BadParameter, "twice"),
        (part("file", b"II*", "a"), FORM, BadParameter, "cut short"),
        (form(part("image", b"I" * (MAX_FIELD_BYTES + 1))), FORM, BadParameter, "'file'"),
        (form(*(part(str(n), b"1") for n in range(MAX_FIELDS + 1))), FORM, BadParameter, "fields"),
        (b"nonsense", FORM, BadParameter, "broken"),
        (b"--frontier\r\n" + b"a: b\r\n" * 5000, FORM, BadParameter, "broken"),
        (b"x", {"content-type": "multipart/form-data"}, BadParameter, "boundary"),
        (b"x", {"content-type": "multipart/form-data; boundary=" + "x" * 5000}, BadParameter, "cannot be read"),
        (b"{}", {"content-type": "application/json"}, UnsupportedMedia, "application/json"),
        (b"x", TIFF | {"content-encoding": "gzip"}, UnsupportedMedia, "gzip"),
    ],
)
def test_body_that_is_no_upload_is_refused_with_a_reason(
    tmp_path: Path, body: bytes, headers: dict[str, str], error: type[StackSegError], word: str
) -> None:
    with pytest.raises(error, match=word):
        post([body], headers, tmp_path)


def test_stated_length_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(TooLarge, match="100 bytes"):
        post([], TIFF | {"content-length": "101"}, tmp_path, 100, gone=True)


@pytest.mark.parametrize("headers", [TIFF, TIFF | {"content-length": "5"}, TIFF | {"content-length": "-5"}])
def test_limit_holds_whatever_length_was_stated(tmp_path: Path, headers: dict[str, str]) -> None:
    assert post([b"x" * 60, b"x" * 40], headers, tmp_path, 100).received == 100
    with pytest.raises(TooLarge):
        post([b"x" * 60, b"x" * 41], headers, tmp_path, 100)


def test_limit_of_a_form_counts_the_file_alone(tmp_path: Path) -> None:
    body = form(part("file", b"x" * 100, "a"), part("model", b"bands"))
    assert post([body], FORM | {"content-length": str(len(body))}, tmp_path, 100).received == 100
    with pytest.raises(TooLarge):
        post([form(part("file", b"x" * 101, "a"))], FORM, tmp_path, 100)


def test_client_that_leaves_early_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        post([b"II*\0"], TIFF | {"content-length": "100"}, tmp_path, gone=True)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("cells.tif", "cells.tif"),
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\a.tif", "a.tif"),
        ("a\r\nb\0", "ab"),
        ("", ""),
    ],
)
def test_file_name_is_only_a_name(sent: str, kept: str) -> None:
    assert sanitize_file_name(sent) == kept


@pytest.mark.parametrize("stated", [True, False])
def test_bytes_are_held_once_they_are_announced_or_have_arrived(tmp_path: Path, stated: bool) -> None:
    space = ScratchSpace(2**30)

    async def stall(held: Hold, length: int) -> None:
        """Upload the first kilobyte, of `length` bytes, and leave."""
        stalled = asyncio.Event()
        messages = [{"type": "http.request", "body": bytes(1000), "more_body": True}]

        async def next_message() -> Any:
            if not messages:
                stalled.set()
                await asyncio.sleep(60)
            return messages.pop()

        headers = [(b"content-type", b"image/tiff"), (b"content-length", str(length).encode())]
        request = Request({"type": "http", "method": "POST", "headers": headers[: 1 + stated]}, next_message)
        upload = Upload(tmp_path / "upload.tif", 2**30, held)
        receiving = asyncio.ensure_future(receive(request, upload))
        await asyncio.wait([receiving, asyncio.ensure_future(stalled.wait())], return_when="FIRST_COMPLETED")
        receiving.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await receiving
        finally:
            upload.close()

    first, second, third = (space.hold("client") for _ in range(3))
    asyncio.run(stall(first, 2**28))
    assert first.nbytes == 2**28 if stated else 1000 <= first.nbytes <= 1000 + BLOCK_BYTES
    first.reserve(2**28 - first.nbytes)
    asyncio.run(stall(second, 2**28))
    space.hold("client").reserve(2**29 - space.used)
    with pytest.raises(RateLimited):
        asyncio.run(stall(third, 1000))


def test_room_is_for_others_where_a_request_ends_before_its_block_is_written(tmp_path: Path) -> None:
    budget = MemoryBudget(2 * BLOCK_BYTES)

    async def send(upload: Upload) -> None:
        for _ in range(2):
            upload.add_data(bytes(BLOCK_BYTES))
            await upload.flush(BLOCK_BYTES)

    async def end_early() -> None:
        upload = Upload(tmp_path / "upload.tif", 2**30, hold(), budget)
        sending = asyncio.ensure_future(send(upload))
        # After the first step of `sending`, before that of the task which writes the first block.
        asyncio.get_running_loop().call_soon(sending.cancel)
        with pytest.raises(asyncio.CancelledError):
            await sending
        upload.close()

    asyncio.run(end_early())
    assert budget.reserve(2 * BLOCK_BYTES)
