"""A client that asks for much, in few bytes or slowly, keeps no other client waiting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from common import make_bomb
from fakes import until
from live import Live, as_tiff, eager, opened_as, serve

from service.api.api_keys import hash_key

KEYS = {name: hash_key(name) for name in ("greedy", "modest")}
FDS = Path("/proc/self/fd")
# 4 GiB of pixels, which take seconds to decode, in less than 100 KB.
BOMB = make_bomb(128, (4096, 8192))


@pytest.fixture(scope="module")
def live(bands_repository: Path) -> Iterator[Live]:
    with serve(eager(bands_repository, access={"keys": KEYS}, limits={"windows": 10**6})) as running:
        yield running


@contextmanager
def sending(live: Live, key: str, path: str, body: bytes) -> Iterator[socket.socket]:
    """A connection that has sent a request and hangs up at the end of the block."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((live.host, live.port)) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def post(live: Live, key: str, path: str, body: bytes) -> httpx2.Response:
    return live.client.post(path, content=body, headers={"X-API-Key": key}, timeout=20)


def decodes(live: Live) -> bool:
    """Whether a file without a name is open, which pixels are decoded to."""
    folder = str(live.runtime.scratch.requests)
    return any(name.startswith(folder) and name.endswith("(deleted)") for name in map(opened_as, FDS.iterdir()))


@pytest.mark.parametrize("path", ["/segment?axes=ZYX", "/jobs?axes=ZYX"])
def test_large_file_in_few_bytes_blocks_nobody_and_ends_with_its_client(live: Live, phantom: Any, path: str) -> None:
    stack, jobs = as_tiff(phantom.image), path.startswith("/jobs")
    with sending(live, "greedy", path, BOMB) as first, sending(live, "greedy", path, BOMB) as second:
        until(lambda: decodes(live))
        for key in ("modest", "greedy"):
            assert post(live, key, "/inspect", stack).status_code == 200
            assert post(live, key, "/segment", stack).status_code == 200
        assert decodes(live)
        if jobs:
            for connection in (first, second):
                location = connection.recv(10_000).decode().partition("location: ")[2].split()[0]
                headers = {"X-API-Key": "greedy"}
                assert live.client.delete(location, headers=headers).status_code == 204
    gone = time.monotonic()
    until(lambda: not live.leftovers())
    # The rest of either file would have taken several times as long.
    assert time.monotonic() - gone < 3
    assert post(live, "greedy", "/segment", stack).status_code == 200


def test_too_many_windows_are_refused_before_a_pixel_is_decoded(bands_repository: Path) -> None:
    gate = threading.Event()
    with serve(eager(bands_repository, limits={"windows": 100})) as live:
        large = live.runtime.decode_threads.of("other").submit(gate.wait, 60)
        try:
            for path in ("/segment", "/jobs"):
                refused = live.client.post(f"{path}?axes=ZYX", content=BOMB, timeout=20)
                assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (413, "too-large")
                assert "windows" in refused.json()["detail"]
        finally:
            gate.set()
        assert large.result(20)
