from __future__ import annotations

import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes import FakeSegmenter, wait_until
from live import STACK, LiveServer, eager_settings, serve
from sockets import (
    TIMEOUT_SECONDS,
    ChunkedApp,
    EchoApp,
    GatedApp,
    connect_tls,
    create_certificate,
    make_request_head,
    make_server,
    needs_openssl,
    read_error,
    read_response_body,
    run_server,
)
from starlette.types import Receive, Scope, Send

from service.api.access.access_log import RequestLog
from service.api.http.data_rate import SlowClientLimits
from service.api.http.listener import listen
from service.api.messages.headers import set_send_timeout
from service.api.server import POLL_SECONDS, Server, format_url

RATE = 1000
STRICT_LIMITS = SlowClientLimits(head_seconds=2, bytes_per_second=RATE, window_seconds=2)
# For clients that receive either nothing or much more than the minimum rate, so that delays on a busy machine do not
# change the result.
STRICTER_LIMITS = SlowClientLimits(head_seconds=2, bytes_per_second=RATE, window_seconds=1)


@contextmanager
def strict_server(app: Any, **options: Any) -> Iterator[tuple[str, int]]:
    server = make_server(app, TIMEOUT_SECONDS, TIMEOUT_SECONDS, **options)
    server.client_limits = STRICT_LIMITS
    with run_server(server) as address:
        yield address


def send_slowly(client: socket.socket, number: int) -> bytes:
    """Send single bytes slowly until the server responds or closes the connection."""
    client.settimeout(0.2)
    for _ in range(number):
        client.sendall(b"a")
        try:
            return client.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
    raise AssertionError("the server is still waiting")


def test_incomplete_request_heads_time_out_with_a_reason() -> None:
    with strict_server(EchoApp(), timeout_keep_alive=TIMEOUT_SECONDS) as address, ExitStack() as exit_stack:
        silent, dripping, used = (
            exit_stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS)) for _ in range(3)
        )
        used.sendall(make_request_head())
        assert read_response_body(used) == b""
        used.sendall(b"GET / HTTP/1.1\r\n")
        began = time.monotonic()
        dripping.sendall(make_request_head()[:-2] + b"X: ")
        assert send_slowly(dripping, 50)
        dripping.settimeout(TIMEOUT_SECONDS)
        assert read_error(dripping, 408)[1]["type"] == "urn:stackseg:problem:too-slow"
        assert read_error(used, 408)[1]["type"] == "urn:stackseg:problem:too-slow"
        assert silent.recv(1) == b""
        assert time.monotonic() - began < 2 * STRICT_LIMITS.head_seconds + 2


def test_used_connection_stays_open_until_it_has_been_idle_for_the_configured_time() -> None:
    idle_seconds = STRICT_LIMITS.head_seconds + 2
    with (
        strict_server(EchoApp(), timeout_keep_alive=idle_seconds) as address,
        socket.create_connection(address, TIMEOUT_SECONDS) as client,
    ):
        for pause in (idle_seconds - 1, 0):
            client.sendall(make_request_head("Content-Length: 2") + b"ab")
            assert read_response_body(client) == b"ab"
            time.sleep(pause)
        began = time.monotonic()
        assert client.recv(1) == b""
        assert idle_seconds - 1 < time.monotonic() - began < idle_seconds + 2


def test_slow_uploads_are_rejected_with_408(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), strict_server(RequestLog(GatedApp())) as address:
        with socket.create_connection(address, TIMEOUT_SECONDS) as client:
            client.sendall(make_request_head("Content-Length: 1000000"))
            assert send_slowly(client, 50)
            client.settimeout(TIMEOUT_SECONDS)
            assert read_error(client, 408)[1]["type"] == "urn:stackseg:problem:too-slow"
        wait_until(lambda: any(" / 408 " in record.getMessage() for record in caplog.records), TIMEOUT_SECONDS)


def test_uploads_at_the_minimum_rate_and_long_computations_do_not_time_out() -> None:
    gated, echo = GatedApp(), EchoApp()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (gated if scope["path"] == "/gated" else echo)(scope, receive, send)

    with strict_server(app) as address, ExitStack() as exit_stack:
        slow, computing, expecting = (
            exit_stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS)) for _ in range(3)
        )
        computing.sendall(make_request_head("Content-Length: 2").replace(b" / ", b" /gated ") + b"ab")
        expecting.sendall(make_request_head("Content-Length: 2", "Expect: 100-continue").replace(b" / ", b" /gated "))
        pieces = 3 * STRICT_LIMITS.window_seconds
        slow.sendall(make_request_head(f"Content-Length: {int(2 * pieces) * RATE}"))
        for _ in range(int(2 * pieces)):
            slow.sendall(bytes(RATE))
            time.sleep(0.5)
        assert read_response_body(slow) == bytes(int(2 * pieces) * RATE)
        gated.gate.set()
        assert read_response_body(computing) == b"ok"


def post_with_small_buffer(
    exit_stack: ExitStack, address: tuple[str, int], body: bytes, files: dict[str, str]
) -> socket.socket:
    """Post a body to an echo application from a client with a small receive buffer."""
    if files:
        client: socket.socket = exit_stack.enter_context(connect_tls(address, files, SO_RCVBUF=2**12))
    else:
        client = exit_stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        client.settimeout(TIMEOUT_SECONDS)
        client.connect(address)
    client.sendall(make_request_head(f"Content-Length: {len(body)}") + body)
    return client


@needs_openssl
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("size", [2**16, 2**20, 12 * 2**20])
def test_connection_is_closed_if_the_client_does_not_receive_the_response(
    tmp_path: Path, size: int, *, secure: bool
) -> None:
    files = create_certificate(tmp_path) if secure else {}
    server = make_server(EchoApp(), TIMEOUT_SECONDS, TIMEOUT_SECONDS, **files)
    server.client_limits = STRICTER_LIMITS
    with run_server(server) as address, ExitStack() as exit_stack:
        post_with_small_buffer(exit_stack, address, bytes(size), files)
        began = time.monotonic()
        wait_until(lambda: not server.server_state.connections, TIMEOUT_SECONDS)
        # Two windows and the next check, or an earlier close because the connection is idle.
        assert time.monotonic() - began < 3 * STRICTER_LIMITS.window_seconds + 5


@needs_openssl
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_slowly_received_responses_are_sent_completely(tmp_path: Path, *, secure: bool) -> None:
    files, body = create_certificate(tmp_path) if secure else {}, random.Random(0).randbytes(2**20)
    server = make_server(EchoApp(), TIMEOUT_SECONDS, TIMEOUT_SECONDS, **files)
    server.client_limits = STRICTER_LIMITS
    with run_server(server) as address, ExitStack() as exit_stack:
        client, received = post_with_small_buffer(exit_stack, address, body, files), bytearray()
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


def test_connection_is_closed_when_the_time_to_send_a_response_has_passed() -> None:
    body, released = bytes(2**25), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        set_send_timeout(scope, 1.0)
        try:
            await ChunkedApp(*(body[start : start + 2**20] for start in range(0, len(body), 2**20)))(
                scope, receive, send
            )
        finally:
            released.set()

    with run_server(make_server(app, TIMEOUT_SECONDS, TIMEOUT_SECONDS)) as address, ExitStack() as exit_stack:
        client = post_with_small_buffer(exit_stack, address, b"", {})
        began, received = time.monotonic(), 0
        # The client is faster than the minimum rate for other responses.
        with suppress(ConnectionResetError):
            while piece := client.recv(2**16):
                received += len(piece)
                time.sleep(0.01)
        assert released.wait(TIMEOUT_SECONDS)
        assert time.monotonic() - began < 10
        assert 0 < received < len(body)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_port_zero_selects_a_free_port_that_is_in_the_address(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    (listener,) = listen(host, 0)
    with listener:
        port = listener.getsockname()[1]
        assert format_url(listener) == (f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


@pytest.fixture
def busy_service(bands_repository: Path, tmp_path: Path) -> Iterator[LiveServer]:
    """A service that is running a job until the end of the test."""
    with serve(
        eager_settings(bands_repository, server={"scratch_folder": tmp_path}), load=FakeSegmenter, make_server=Server
    ) as live:
        fake = live.fake
        fake.gate.clear()
        live.submit()
        wait_until(lambda: live.runtime.devices.running_jobs)
        yield live
        fake.gate.set()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://{live.host}:{live.port}/health/live")


def test_health_requests_are_answered_during_shutdown(busy_service: LiveServer) -> None:
    (job,) = busy_service.client.get("/jobs").json()["jobs"]
    busy_service.server.handle_exit(signal.SIGTERM, None)
    for _ in range(3):
        answers = [
            httpx2.request(method, f"http://{busy_service.host}:{busy_service.port}{path}", content=content).status_code
            for method, path, content in (
                ("GET", "/health/live", None),
                ("GET", "/health/ready", None),
                ("GET", f"/jobs/{job['id']}", None),
                ("POST", "/segment", STACK),
            )
        ]
        assert answers == [200, 503, 200, 503]
        time.sleep(0.3)


def test_first_request_of_an_open_connection_is_answered_during_shutdown(busy_service: LiveServer) -> None:
    with socket.create_connection((busy_service.host, busy_service.port), timeout=10) as client:
        wait_until(lambda: len(busy_service.server.server_state.connections) > 1)
        busy_service.server.handle_exit(signal.SIGTERM, None)
        time.sleep(3 * POLL_SECONDS)
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        # The connection is then closed like other idle connections.
        while client.recv(2**16):
            pass


@pytest.mark.parametrize(
    "sent", [make_request_head(), make_request_head("Content-Length: 9") + b"half"], ids=["running", "uploading"]
)
def test_disconnect_is_logged_as_499_even_if_the_application_fails_afterwards(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise RuntimeError("the client has gone")

    for app in (GatedApp(), failing):
        caplog.clear()
        with caplog.at_level(logging.INFO), strict_server(RequestLog(app)) as address:
            with socket.create_connection(address, TIMEOUT_SECONDS) as client:
                client.sendall(sent)
                time.sleep(0.2)
            wait_until(lambda: any("POST / 499 " in record.getMessage() for record in caplog.records), TIMEOUT_SECONDS)


def test_early_signal_stops_the_service_cleanly(bands_repository: Path) -> None:
    code = """
import os, signal, sys
from service.api.server import serve
from service.core.config import Settings

class SignalOnWrite:
    def write(self, line): os.kill(os.getpid(), signal.SIGTERM)
    def flush(self): pass

sys.stdout = SignalOnWrite()
ended = serve(Settings(models={"folder": sys.argv[1]}), "127.0.0.1", 0)
sys.stderr.write(f"ended: {ended}")
"""
    # A small model is loaded before the service stops waiting, however busy the machine is.
    command = [sys.executable, "-c", code, str(bands_repository)]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert process.stderr.endswith("ended: True")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_the_shutdown_stops_the_service_immediately(first: signal.Signals, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"server: {{scratch_folder: {tmp_path}}}\njobs: {{folder: {tmp_path / 'jobs'}}}\n")
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as client:
            head = make_request_head("Content-Length: 9", "Content-Type: image/tiff", "Expect: 100-continue")
            client.sendall(head.replace(b"POST / ", b"POST /stacks "))
            # An upload that is in progress delays the shutdown.
            assert client.recv(100).startswith(b"HTTP/1.1 100 ")
            process.send_signal(first)
            ready = f"http://127.0.0.1:{port}/health/ready"
            wait_until(lambda: "is stopping" in httpx2.get(ready).text, TIMEOUT_SECONDS)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_SECONDS) == 128 + signal.SIGINT
        messages = process.stderr.read()
    assert messages.splitlines()[-1].endswith("interrupted again: stopping without finishing the accepted work")
    assert "Traceback" not in messages
