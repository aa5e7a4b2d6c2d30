"""End-to-end tests of fairness: expensive or slow requests of one client do not delay other clients."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from common import make_bomb
from fakes import FakeSegmenter, wait_until
from live import LiveServer, as_tiff, eager_settings, make_live_fixture, parse_problem, read_descriptor_target, serve

from service.api.access.keys import hash_key

KEYS = {name: hash_key(name) for name in ("greedy", "modest")}
GREEDY = "X-API-Key: greedy"
DESCRIPTORS = Path("/proc/self/fd")
# Less than 100 KB that decode to 4 GiB of pixels, which takes seconds.
BOMB = make_bomb(128, (4096, 8192))


live = make_live_fixture(access={"keys": KEYS}, limits={"windows": 10**6})


def post(live: LiveServer, key: str, path: str, body: bytes) -> httpx2.Response:
    """Send a POST request with an API key."""
    return live.client.post(path, content=body, headers={"X-API-Key": key}, timeout=20)


def is_decoding(live: LiveServer) -> bool:
    """Return whether pixels are being decoded, which the service does into a deleted file."""
    folder = str(live.runtime.scratch.requests_folder)
    return any(
        name.startswith(folder) and name.endswith("(deleted)")
        for name in map(read_descriptor_target, DESCRIPTORS.iterdir())
    )


@pytest.mark.parametrize("path", ["/segment?axes=ZYX", "/jobs?axes=ZYX"])
def test_decompression_bomb_blocks_no_other_client_and_is_cancelled_with_its_own(
    live: LiveServer, phantom: Any, path: str
) -> None:
    stack, jobs = as_tiff(phantom.image), path.startswith("/jobs")
    with live.open_request(path, BOMB, None, GREEDY) as first, live.open_request(path, BOMB, None, GREEDY) as second:
        wait_until(lambda: is_decoding(live))
        for key in ("modest", "greedy"):
            assert post(live, key, "/inspect", stack).status_code == 200
            assert post(live, key, "/segment", stack).status_code == 200
        assert is_decoding(live)
        if jobs:
            for connection in (first, second):
                location = connection.recv(10_000).decode().partition("location: ")[2].split()[0]
                headers = {"X-API-Key": "greedy"}
                assert live.client.delete(location, headers=headers).status_code == 204
    ended_at = time.monotonic()
    wait_until(lambda: not live.leftovers())
    # Decoding the rest of one file would take several times as long.
    assert time.monotonic() - ended_at < 3
    assert post(live, "greedy", "/segment", stack).status_code == 200


def test_stalled_uploads_leave_scratch_space_for_other_clients(bands_repository: Path, phantom: Any) -> None:
    stack = as_tiff(phantom.image)
    limits = {"scratch_bytes": 4 * len(stack)}
    with serve(eager_settings(bands_repository, access={"keys": KEYS}, limits=limits)) as live, ExitStack() as stalled:
        for _ in range(2):
            stalled.enter_context(live.open_request("/segment", stack[:-1], len(stack), GREEDY))
        wait_until(lambda: live.runtime.scratch_space.used_bytes == 2 * len(stack))
        for path in ("/segment", "/jobs", "/inspect"):
            refused = post(live, "greedy", path, stack)
            assert parse_problem(refused) == (429, "rate-limited")
            assert int(refused.headers["retry-after"]) > 0
            assert post(live, "modest", path, stack).is_success
        stalled.close()
        wait_until(lambda: post(live, "greedy", "/segment", stack).status_code == 200)
        wait_until(lambda: live.runtime.scratch_space.used_bytes == 0)


def test_results_that_are_not_downloaded_leave_scratch_space_for_other_clients(
    bands_repository: Path, phantom: Any, phantom_maker: Any
) -> None:
    large, stack = as_tiff(phantom_maker((16, 384, 320), seed=3).image), as_tiff(phantom.image)
    limits = {"scratch_bytes": 2**26}
    with serve(eager_settings(bands_repository, access={"keys": KEYS}, limits=limits)) as live, ExitStack() as waiting:
        path = "/segment?output=probabilities"
        for _ in range(2):
            connection = waiting.enter_context(live.open_request(path, large, None, GREEDY))
            wait_until(
                lambda before=live.runtime.scratch_space.used_bytes: (
                    live.runtime.scratch_space.used_bytes > before + 2**24
                ),
                60,
            )
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert post(live, "greedy", path, large).status_code == 429
        assert post(live, "modest", path, stack).status_code == 200
        waiting.close()
        wait_until(lambda: live.runtime.scratch_space.used_bytes == 0)
        assert post(live, "greedy", path, large).status_code == 200


def test_jobs_wait_for_scratch_space_before_decoding(bands_repository: Path) -> None:
    bomb = make_bomb(10, (2048, 2048))
    limits = {"scratch_bytes": 5 * 10 * 2**22 // 2}
    with serve(eager_settings(bands_repository, limits=limits), load=FakeSegmenter) as live:
        jobs = [live.submit(bomb, axes="ZYX") for _ in range(2)]
        wait_until(lambda: is_decoding(live))
        assert live.runtime.scratch_space.used_bytes <= limits["scratch_bytes"] // 2
        for job in jobs:
            live.wait(job, "done")
        wait_until(lambda: live.runtime.scratch_space.used_bytes == 0)


def test_requests_with_too_many_windows_are_refused_before_decoding(bands_repository: Path) -> None:
    gate = threading.Event()
    with serve(eager_settings(bands_repository, limits={"windows": 100})) as live:
        large = live.runtime.decode_threads.for_client("other").submit(gate.wait, 60)
        try:
            for path in ("/segment", "/jobs"):
                refused = live.client.post(f"{path}?axes=ZYX", content=BOMB, timeout=20)
                assert parse_problem(refused) == (413, "too-large")
                assert "windows" in refused.json()["detail"]
        finally:
            gate.set()
        assert large.result(20)
