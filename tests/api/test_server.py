from __future__ import annotations

import logging
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes import FakeSegmenter, until
from live import STACK, Live, eager, serve
from sockets import (
    SECONDS,
    Echo,
    Gated,
    answer,
    head,
    key_and_certificate,
    needs_openssl,
    refusal,
    running,
    secured,
    stopping,
)

from service.api.access.middleware import RequestLog
from service.api.http.data_rate import SlowClientLimits
from service.api.server import POLL_SECONDS, Server, format_address, listen
from service.core import errors

RATE = 1000
STRICT_LIMITS = SlowClientLimits(head_seconds=2, bytes_per_second=RATE, window_seconds=2)
# For clients that take nothing, or far more than the rate: no hiccup of a busy machine makes one of the other.
STRICTER_LIMITS = SlowClientLimits(head_seconds=2, bytes_per_second=RATE, window_seconds=1)


@contextmanager
def strict_server(app: Any, **more: Any) -> Iterator[tuple[str, int]]:
    server = stopping(app, SECONDS, SECONDS, **more)
    server.patience = STRICT_LIMITS
    with running(server) as address:
        yield address


def drip(client: socket.socket, number: int) -> bytes:
    """Send a byte now and then, until the server says something or ends the connection."""
    client.settimeout(0.2)
    for _ in range(number):
        client.sendall(b"a")
        try:
            return client.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
    raise AssertionError("the server is still waiting")


def test_heads_that_do_not_come_end_the_connection_with_a_reason_if_they_were_begun() -> None:
    with strict_server(Echo(), timeout_keep_alive=SECONDS) as address, ExitStack() as held:
        silent, dripping, used = (held.enter_context(socket.create_connection(address, SECONDS)) for _ in range(3))
        used.sendall(head())
        assert answer(used) == b""
        began = time.monotonic()
        dripping.sendall(head()[:-2] + b"X: ")
        assert drip(dripping, 50)
        dripping.settimeout(SECONDS)
        assert refusal(dripping, 408)[1]["type"] == "urn:stackseg:problem:too-slow"
        assert silent.recv(1) == used.recv(1) == b""
        assert time.monotonic() - began < 2 * STRICT_LIMITS.head_seconds + 2


def test_slow_bodies_end_the_request_with_408(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), strict_server(RequestLog(Gated())) as address:
        with socket.create_connection(address, SECONDS) as client:
            client.sendall(head("Content-Length: 1000000"))
            assert drip(client, 50)
            client.settimeout(SECONDS)
            assert refusal(client, 408)[1]["type"] == "urn:stackseg:problem:too-slow"
        until(lambda: any(" / 408 " in record.getMessage() for record in caplog.records), SECONDS)


def test_bodies_at_the_least_rate_and_work_that_takes_long_are_waited_for() -> None:
    gated, echo = Gated(), Echo()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (gated if scope["path"] == "/gated" else echo)(scope, receive, send)

    with strict_server(app) as address, ExitStack() as held:
        slow, long, asking = (held.enter_context(socket.create_connection(address, SECONDS)) for _ in range(3))
        long.sendall(head("Content-Length: 2").replace(b" / ", b" /gated ") + b"ab")
        asking.sendall(head("Content-Length: 2", "Expect: 100-continue").replace(b" / ", b" /gated "))
        pieces = 3 * STRICT_LIMITS.window_seconds
        slow.sendall(head(f"Content-Length: {int(2 * pieces) * RATE}"))
        for _ in range(int(2 * pieces)):
            slow.sendall(bytes(RATE))
            time.sleep(0.5)
        assert answer(slow) == bytes(int(2 * pieces) * RATE)
        gated.opened.set()
        assert answer(long) == b"ok"


def ask(held: ExitStack, address: tuple[str, int], body: bytes, files: dict[str, str]) -> socket.socket:
    """Post a body to an echo, as a client whose system takes little of the answer that it has not read."""
    if files:
        client: socket.socket = held.enter_context(secured(address, files, SO_RCVBUF=2**12))
    else:
        client = held.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        client.settimeout(SECONDS)
        client.connect(address)
    client.sendall(head(f"Content-Length: {len(body)}") + body)
    return client


@needs_openssl
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("size", [2**16, 2**20, 12 * 2**20])
def test_answers_that_are_not_taken_end_the_connection(tmp_path: Path, size: int, *, secure: bool) -> None:
    files = key_and_certificate(tmp_path) if secure else {}
    server = stopping(Echo(), SECONDS, SECONDS, **files)
    server.patience = STRICTER_LIMITS
    with running(server) as address, ExitStack() as held:
        ask(held, address, bytes(size), files)
        began = time.monotonic()
        until(lambda: not server.server_state.connections, SECONDS)
        # Two windows and the look after, or the end of an idle connection before.
        assert time.monotonic() - began < 3 * STRICTER_LIMITS.window_seconds + 5


@needs_openssl
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_answers_that_are_taken_slowly_are_sent_whole(tmp_path: Path, *, secure: bool) -> None:
    files, body = key_and_certificate(tmp_path) if secure else {}, random.Random(0).randbytes(2**20)
    server = stopping(Echo(), SECONDS, SECONDS, **files)
    server.patience = STRICTER_LIMITS
    with running(server) as address, ExitStack() as held:
        client, received = ask(held, address, body, files), bytearray()
        began = time.monotonic()
        while time.monotonic() - began < 4 * STRICTER_LIMITS.window_seconds:
            received += client.recv(2**12)
            time.sleep(0.1)
        assert len(received) < len(body)
        while len(received) < len(body):
            piece = client.recv(2**20)
            assert piece
            received += piece
        assert received.endswith(body[-1000:])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_port_zero_takes_a_free_port_and_tells_it(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert format_address(listener) == (f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def test_address_in_use_is_a_configuration_error() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(errors.ConfigError, match="Cannot listen"):
        listen("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def busy(bands_repository: Path, tmp_path: Path) -> Iterator[Live]:
    """A service of our own server at a job, which goes on once the test has ended."""
    with serve(
        eager(bands_repository, server={"scratch_folder": tmp_path}), load=FakeSegmenter, make_server=Server
    ) as live:
        fake = live.fake
        fake.gate.clear()
        live.submit()
        until(lambda: live.runtime.devices.running)
        yield live
        fake.gate.set()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://{live.host}:{live.port}/health/live")


def test_health_is_answered_while_work_that_was_begun_is_finished(busy: Live) -> None:
    (job,) = busy.client.get("/jobs").json()["jobs"]
    busy.server.handle_exit(signal.SIGTERM, None)
    for _ in range(3):
        answers = [
            httpx2.request(method, f"http://{busy.host}:{busy.port}{path}", content=content).status_code
            for method, path, content in (
                ("GET", "/health/live", None),
                ("GET", "/health/ready", None),
                ("GET", f"/jobs/{job['id']}", None),
                ("POST", "/segment", STACK),
            )
        ]
        assert answers == [200, 503, 200, 503]
        time.sleep(0.3)


def test_first_request_of_a_connection_is_answered_though_the_service_stops_before_it_comes(busy: Live) -> None:
    with socket.create_connection((busy.host, busy.port), timeout=10) as client:
        until(lambda: len(busy.server.server_state.connections) > 1)
        busy.server.handle_exit(signal.SIGTERM, None)
        time.sleep(3 * POLL_SECONDS)
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        # Its connection is then closed like others without work.
        while client.recv(2**16):
            pass


@pytest.mark.parametrize("sent", [head(), head("Content-Length: 9") + b"half"], ids=["at work", "in its body"])
def test_client_that_hangs_up_counts_as_such_whatever_the_application_then_does(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise RuntimeError("the client has gone")

    for app in (Gated(), failing):
        caplog.clear()
        with caplog.at_level(logging.INFO), strict_server(RequestLog(app)) as address:
            with socket.create_connection(address, SECONDS) as client:
                client.sendall(sent)
                time.sleep(0.2)
            until(lambda: any("POST / 499 " in record.getMessage() for record in caplog.records), SECONDS)


def test_signal_ends_the_service_however_early_it_comes() -> None:
    code = """
import os, signal, sys
from service.api.server import serve
from service.core.config import Settings

class SignalsAtOnce:
    def write(self, line): os.kill(os.getpid(), signal.SIGTERM)
    def flush(self): pass

sys.stdout = SignalsAtOnce()
ended = serve(Settings(), "127.0.0.1", 0)
sys.stderr.write(f"ended: {ended}")
"""
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert process.stderr.endswith("ended: True")
