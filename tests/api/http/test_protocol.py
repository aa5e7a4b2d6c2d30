from __future__ import annotations

import asyncio
import gc
import random
import socket
import ssl
import struct
import threading
import time
import uuid
import weakref
from asyncio.sslproto import SSLProtocol
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fakes import wait_until
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
    serve_app,
)
from starlette.types import Receive, Scope, Send

from service.api.access.access_log import RequestLog
from service.api.http.flow_control import READ_AHEAD_BYTES
from service.api.http.protocol import MAX_PIPELINED_REQUESTS, PROBE_SECONDS, READ_BUFFER_BYTES, Connection
from service.api.http.refusals import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PARAMETERS
from service.api.messages.error_responses import Problem
from service.api.server import build_config


def send_until_blocked(client: socket.socket, line: bytes, max_bytes: int) -> int:
    """Send repeated lines until the server stops reading or closes the connection. Return the number of bytes sent."""
    sent = 0
    with suppress(OSError):
        while sent < max_bytes:
            sent += client.send(line)
    return sent


def limit_send_buffer(client: socket.socket) -> socket.socket:
    """Make the send buffer of a socket small, so that the system buffers few unread bytes. Return the socket."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    return client


def test_consecutive_bodies_arrive_complete_and_in_large_pieces() -> None:
    echo, body = EchoApp(), random.Random(0).randbytes(3 * READ_BUFFER_BYTES + 12345)
    with serve_app(echo) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        for part in (body, b"", body[:1000], body):
            client.sendall(make_request_head(f"Content-Length: {len(part)}") + part)
            assert read_response_body(client) == part
    assert max(echo.pieces) > READ_BUFFER_BYTES // 8


@needs_openssl
def test_bodies_arrive_complete_over_tls(tmp_path: Path) -> None:
    """The TLS transport requests the buffer once and fills it record by record."""
    files = create_certificate(tmp_path)
    body = random.Random(2).randbytes(2 * READ_BUFFER_BYTES + 12345)
    with serve_app(EchoApp(), **files) as address:
        plain = socket.create_connection(address, TIMEOUT_SECONDS)
        with ssl.create_default_context(cafile=files["ssl_certfile"]).wrap_socket(
            plain, server_hostname="localhost"
        ) as client:
            for part in (body, body[:1000], body[:100_000]):
                client.sendall(make_request_head(f"Content-Length: {len(part)}") + part)
                assert read_response_body(client) == part


@pytest.mark.parametrize(("size", "number"), [(1, 100_000), (999, 2000), (70_000, 200)])
def test_bodies_in_chunks_of_any_size_arrive_complete(size: int, number: int) -> None:
    body = random.Random(1).randbytes(number * size)
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("Transfer-Encoding: chunked"))
        for start in range(0, len(sent), 54_321):
            client.sendall(sent[start : start + 54_321])
        assert read_response_body(client) == body


def test_buffered_pieces_of_a_body_are_extended_in_place() -> None:
    """Otherwise, a body in chunks of one byte would be copied once per byte."""
    connection = Connection.__new__(Connection)
    cycle: Any = SimpleNamespace(body=bytearray(), response_complete=False, message_event=threading.Event())
    connection.cycle = cycle
    connection.on_body(b"a")
    connection.on_body(b"b")
    buffered = cycle.body
    connection.on_body(b"c")
    assert cycle.body is buffered
    assert (bytes(buffered), cycle.message_event.is_set()) == (b"abc", True)


def test_tls_connection_without_a_socket_has_no_descriptor() -> None:
    """An error here would stop the server, which checks all connections every second."""
    connection = Connection.__new__(Connection)
    # This is the transport after the connection has been lost.
    loop = asyncio.new_event_loop()
    lost = SSLProtocol(loop, connection, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), None, server_side=True)
    connection.transport = lost._get_app_transport()
    connection.transport.abort()
    loop.close()
    assert connection.fileno() == -1


class OutOfMemoryConnection(Connection):
    def on_body(self, body: bytes) -> None:
        raise MemoryError


def test_body_that_does_not_fit_in_memory_is_rejected_with_507() -> None:
    config = build_config(EchoApp(), host="127.0.0.1", port=0, lifespan="off")
    config.http = OutOfMemoryConnection
    with run_server(uvicorn.Server(config)) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("Content-Length: 5") + b"12345")
        answered = client.makefile("rb").read()
    assert answered.startswith(b"HTTP/1.1 507 ")
    assert b"urn:stackseg:problem:out-of-memory" in answered


def test_concurrent_uploads_do_not_mix_their_bytes() -> None:
    bodies = [random.Random(seed).randbytes(2 * READ_BUFFER_BYTES) for seed in range(4)]
    with serve_app(EchoApp()) as address:
        clients = [socket.create_connection(address, TIMEOUT_SECONDS) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(make_request_head(f"Content-Length: {len(body)}"))
        answers: dict[int, bytes] = {}

        def send(index: int) -> None:
            clients[index].sendall(bodies[index])
            answers[index] = read_response_body(clients[index])

        threads = [threading.Thread(target=send, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread, client in zip(threads, clients, strict=True):
            thread.join()
            client.close()
    assert [answers[index] for index in range(len(bodies))] == bodies


def test_body_is_not_read_until_the_application_receives_it() -> None:
    ended = threading.Event()

    async def wait_before_receiving(_scope: Scope, receive: Receive, send: Send) -> None:
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await EchoApp()(_scope, receive, send)

    with serve_app(wait_before_receiving) as address, socket.create_connection(address, 0.5) as client:
        client.sendall(make_request_head(f"Content-Length: {64 * 2**20}"))
        sent = send_until_blocked(client, bytes(2**16), max_bytes=64 * 2**20)
        ended.set()
    # The buffers of the operating system hold a few megabytes on either side.
    assert sent < 16 * 2**20 + READ_BUFFER_BYTES


@pytest.mark.parametrize(
    "ahead",
    [b"", make_request_head(), make_request_head() * (MAX_PIPELINED_REQUESTS - 2)],
    ids=["the first", "next", "last"],
)
def test_only_few_bytes_of_a_body_are_read_if_the_application_does_not_receive_it(ahead: bytes) -> None:
    """Otherwise, many connections would need much more memory than the limit for uploads."""
    ended, busy, not_receiving, number, body = threading.Event(), threading.Event(), 0, 20, bytes(READ_BUFFER_BYTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal not_receiving
        match scope["path"]:
            case "/busy":
                busy.wait(TIMEOUT_SECONDS)
            case "/wait":
                not_receiving += 1
                while not ended.is_set():
                    await asyncio.sleep(0.01)
        await EchoApp()(scope, receive, send)

    server = uvicorn.Server(build_config(app, host="127.0.0.1", port=0, lifespan="off"))
    with run_server(server) as address, ExitStack() as exit_stack:
        exit_stack.callback(ended.set)
        other, *clients = (
            exit_stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS)) for _ in range(1 + number)
        )
        for client in clients:
            # The system enlarges its buffers after receiving large bodies.
            client.sendall(make_request_head(f"Content-Length: {4 * len(body)}") + 4 * body)
            assert len(read_response_body(client)) == 4 * len(body)
            client.settimeout(0.05)
        other.sendall(make_request_head().replace(b" / ", b" /busy "))
        for client in clients:
            heads = (ahead + make_request_head(f"Content-Length: {len(body)}")).replace(b" / ", b" /wait ")
            send_until_blocked(client, heads + body, len(body))
        busy.set()
        wait_until(lambda: not_receiving == number, TIMEOUT_SECONDS)
        bodies = [len(connection.cycle.body) for connection in server.server_state.connections if connection.cycle]
        assert 0 < sum(bodies) < number * 2 * READ_AHEAD_BYTES


def test_only_few_bytes_of_the_next_body_are_read_while_a_request_waits_for_a_disconnect() -> None:
    """Waiting for a disconnect calls `receive`, but this must not read the body of the next request."""
    ended, listening, body = threading.Event(), threading.Event(), bytes(2 * READ_BUFFER_BYTES)

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        disconnect = asyncio.ensure_future(receive())
        await asyncio.sleep(0.2)
        listening.set()
        # Block the event loop while many bytes arrive.
        time.sleep(0.5)
        while not ended.is_set():
            await asyncio.sleep(0.01)
        disconnect.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    server = uvicorn.Server(build_config(app, host="127.0.0.1", port=0, lifespan="off"))
    with (
        run_server(server) as address,
        socket.create_connection(address, TIMEOUT_SECONDS) as client,
        ExitStack() as exit_stack,
    ):
        exit_stack.callback(ended.set)
        first = make_request_head(f"Content-Length: {len(body)}")
        client.sendall(first + body + first)
        assert listening.wait(TIMEOUT_SECONDS)
        client.settimeout(1)
        send_until_blocked(client, body, len(body))
        (connection,) = server.server_state.connections
        wait_until(lambda: connection.cycle.body, TIMEOUT_SECONDS)
        time.sleep(0.2)
        assert len(connection.cycle.body) < 2 * READ_AHEAD_BYTES


def test_unread_body_does_not_block_the_next_request() -> None:
    async def respond_immediately(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with serve_app(respond_immediately) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(
            make_request_head(f"Content-Length: {READ_BUFFER_BYTES}") + bytes(READ_BUFFER_BYTES) + make_request_head()
        )
        content = b""
        while content.count(b"\r\n\r\nok") < 2:
            content += client.recv(2**16)
            assert content


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (b"GET /", b"a" * 1000),
        (make_request_head()[:-2] + b"X-Long: ", b"a" * 1000),
        (make_request_head()[:-2], b"X-Many: 1\r\n" * 100),
    ],
)
def test_endless_head_is_rejected(begin: bytes, line: bytes) -> None:
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(begin)
        assert send_until_blocked(limit_send_buffer(client), line, max_bytes=100 * MAX_HEAD_BYTES) < 32 * MAX_HEAD_BYTES


def test_endless_trailers_close_the_connection() -> None:
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n")
        assert (
            send_until_blocked(limit_send_buffer(client), b"X-Many: 1\r\n" * 100, max_bytes=100 * MAX_HEAD_BYTES)
            < 32 * MAX_HEAD_BYTES
        )


def test_long_head_within_the_limit_is_accepted() -> None:
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("X-Long: " + "a" * (MAX_HEAD_BYTES // 2), "Content-Length: 3"))
        client.sendall(b"abc")
        assert read_response_body(client) == b"abc"


def test_answered_requests_and_closed_connections_leave_memory_without_garbage_collection() -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        requests.append(weakref.ref(receive.__self__))  # type: ignore[attr-defined] # uvicorn's cycle, with the body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def are_dead(references: list[weakref.ref[Any]]) -> bool:
        return all(reference() is None for reference in references)

    requests: list[weakref.ref[Any]] = []
    gc.collect()
    gc.disable()
    try:
        with serve_app(app) as address, socket.create_connection(address) as client:
            for _ in range(3):
                client.sendall(make_request_head("Content-Length: 5") + b"12345")
                assert read_response_body(client) == b"ok"
            # The connection refers to the latest request.
            wait_until(lambda: are_dead(requests[:-1]), TIMEOUT_SECONDS)
            connections = [weakref.ref(item) for item in gc.get_objects() if issubclass(type(item), Connection)]
            assert connections
            client.close()
            wait_until(lambda: are_dead(requests) and are_dead(connections), TIMEOUT_SECONDS)
    finally:
        gc.enable()


def test_pipelined_requests_are_answered_one_after_the_other() -> None:
    gated = GatedApp()
    with serve_app(gated) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head() * MAX_PIPELINED_REQUESTS)
        wait_until(lambda: gated.request_count == 1, TIMEOUT_SECONDS)
        gated.gate.set()
        content = b""
        while content.count(b"\r\n\r\nok") < MAX_PIPELINED_REQUESTS:
            content += client.recv(2**16)
        assert gated.request_count == MAX_PIPELINED_REQUESTS
        client.sendall(make_request_head())
        assert read_response_body(client) == b"ok"


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    content = b""
    while piece := client.recv(2**16):
        content += piece
    return content


def split_bodies(content: bytes) -> list[bytes]:
    """Return the bodies of consecutive responses. The bodies must not contain empty lines."""
    return [response.partition(b"\r\n\r\n")[2] for response in content.split(b"HTTP/1.1 200 OK\r\n")[1:]]


class EchoPath:
    """Application that responds with the path of the request after a short delay."""

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        await ChunkedApp(scope["path"].encode())(scope, _receive, send)


def make_numbered_head(number: int, *headers: str) -> bytes:
    """Return the head of a request for the path `/NUMBER`."""
    return make_request_head(*headers).replace(b" / ", b" /%d " % number)


def test_only_a_limited_number_of_pipelined_requests_is_answered() -> None:
    """Each request takes memory, although it has only a few bytes."""
    with serve_app(EchoPath()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(b"".join(make_numbered_head(number) for number in range(40)))
        responses = read_all(client)
        # The last response is not followed by an error, which the client would mistake for the next response.
        paths = [b"/%d" % number for number in range(MAX_PIPELINED_REQUESTS)]
        assert [body.split(b"\r\n")[1] for body in split_bodies(responses)] == paths
        assert responses.count(b"connection: close") == responses.count(b"HTTP/1.1 ") - MAX_PIPELINED_REQUESTS + 1 == 1


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_client_that_shuts_down_its_sending_side_gets_its_response(version: bytes) -> None:
    gated = GatedApp()
    with serve_app(gated) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("Content-Length: 2").replace(b"1.1", version) + b"ab")
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: gated.request_count == 1, TIMEOUT_SECONDS)
        time.sleep(3 * PROBE_SECONDS)
        gated.gate.set()
        content = read_all(client)
        assert content.endswith(b"\r\n\r\nok")
        assert gated.disconnect_count == 0
        # Only HTTP/1.1 has interim responses, which distinguish this client from a disconnected one.
        assert content.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ") == (version == b"1.1")
        assert content.count(b"HTTP/1.1") == (2 if version == b"1.1" else 1)


def test_client_that_shuts_down_its_sending_side_gets_responses_to_all_complete_requests() -> None:
    with serve_app(EchoPath()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        incomplete = make_numbered_head(3, "Content-Length: 5") + b"half"
        client.sendall(b"".join(make_numbered_head(number) for number in range(3)) + incomplete)
        client.shutdown(socket.SHUT_WR)
        assert [body.split(b"\r\n")[1] for body in split_bodies(read_all(client))] == [b"/0", b"/1", b"/2"]


def test_client_that_shuts_down_its_sending_side_during_a_body_counts_as_disconnected() -> None:
    gated = GatedApp()
    with serve_app(gated) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("Content-Length: 5") + b"half")
        wait_until(lambda: gated.request_count == 1, TIMEOUT_SECONDS)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        wait_until(lambda: gated.disconnect_count == 1, TIMEOUT_SECONDS)


def test_http_1_0_client_is_not_sent_100_continue() -> None:
    sent = make_request_head("Content-Length: 2", "Expect: 100-continue")
    with serve_app(EchoApp()) as address:
        for version, interim in ((b"1.1", True), (b"1.0", False)):
            with socket.create_connection(address, TIMEOUT_SECONDS) as client:
                client.sendall(sent.replace(b"1.1", version))
                time.sleep(0.1)
                client.sendall(b"ab")
                first = client.recv(2**16)
            assert first.startswith(b"HTTP/1.1 100 ") == interim
            assert first.startswith(b"HTTP/1.1 200 ") != interim


@pytest.mark.parametrize(
    ("sent", "half_closed"),
    [
        (make_request_head(), False),
        (make_request_head(), True),
        (make_request_head() * 2, False),
        (make_request_head().replace(b"1.1", b"1.0"), True),
    ],
    ids=["closed", "half-closed first", "pipelined", "half-closed first, HTTP/1.0"],
)
def test_disconnected_client_is_detected(sent: bytes, *, half_closed: bool) -> None:
    gated = GatedApp()
    with serve_app(gated) as address:
        with socket.create_connection(address, TIMEOUT_SECONDS) as client:
            client.sendall(sent)
            wait_until(lambda: gated.request_count == 1, TIMEOUT_SECONDS)
            if half_closed:
                client.shutdown(socket.SHUT_WR)
                time.sleep(3 * PROBE_SECONDS)
                assert gated.disconnect_count == 0
                # Close with a reset, because an HTTP/1.0 client receives no data and its system answers keepalive
                # probes for another minute.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: gated.disconnect_count == 1, TIMEOUT_SECONDS)
    assert gated.request_count == 1


def test_invalid_input_does_not_interrupt_a_response() -> None:
    gated = GatedApp()
    with serve_app(gated) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head() + b"nonsense\r\n\r\n")
        gated.gate.set()
        assert split_bodies(read_all(client)) == [b"ok"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"nonsense\r\n\r\n", "not valid HTTP"),
        (b"\r\n" * (MAX_HEAD_BYTES // 2 + 1), "are longer than"),
        (make_request_head(f"X-Long: {'a' * MAX_HEAD_BYTES}"), "are longer than"),
        (make_request_head("Host: there"), "one host"),
        (make_request_head(*["X: 1"] * MAX_HEADERS), "headers"),
        (f"GET /{'a' * MAX_HEAD_BYTES} HTTP/1.1\r\n\r\n".encode(), "are longer than"),
        (f"GET /?{'&'.join(MAX_PARAMETERS * ['a'])}&b HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), "parameters"),
        (make_request_head("Transfer-Encoding: gzip, chunked"), "Transfer-Encoding"),
        (make_request_head("Transfer-Encoding: gzip", "Transfer-Encoding: chunked"), "Transfer-Encoding"),
        (make_request_head("Transfer-Encoding: chunked").replace(b"1.1", b"1.0"), "Transfer-Encoding"),
        (make_request_head(f"Content-Length: {'0' * 5000}3"), "Content-Length"),
        *(
            (make_request_head(f"Content-Length: {length}"), "not valid HTTP")
            for length in ("-3", "+3", "3 3", "3, 3", "0x3", "", "9" * 30)
        ),
        (make_request_head("Content-Length: 3", "Content-Length: 3"), "not valid HTTP"),
        (make_request_head("Content-Length: 3", "Content-Length: 4"), "not valid HTTP"),
        (make_request_head("Content-Length: 3", "Transfer-Encoding: chunked"), "not valid HTTP"),
        (make_request_head("Transfer-Encoding: chunked", "Content-Length: 3"), "not valid HTTP"),
        (make_request_head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), "not valid HTTP"),
        (make_request_head("Transfer-Encoding : chunked"), "not valid HTTP"),
        (make_request_head("Content-Length:", " 3"), "not valid HTTP"),
        (make_request_head("X: a\rContent-Length: 3"), "not valid HTTP"),
        (make_request_head("Content-Length: 3").replace(b"1.1", b"2.0"), "HTTP/1.1"),
        (b"GET /\r\n\r\n", "HTTP/1.1"),
        (make_request_head("Transfer-Encoding: chunked") + b"nonsense\r\n", "not valid HTTP"),
        (b"CONNECT there:80 HTTP/1.1\r\nHost: there:80\r\n\r\n", "proxy"),
    ],
)
def test_invalid_requests_are_rejected_with_problem_documents(
    sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", "service.access"),
        serve_app(EchoApp()) as address,
        socket.create_connection(address, TIMEOUT_SECONDS) as client,
    ):
        client.sendall(sent)
        headers, document = read_error(client)
    assert Problem.model_validate(document).type == "urn:stackseg:problem:bad-request"
    assert (document["status"], reason in document["detail"]) == (400, True)
    assert document["instance"] == f"urn:uuid:{headers['x-request-id']}"
    assert headers["content-type"] == "application/problem+json"
    assert (headers["connection"], headers["x-content-type-options"]) == ("close", "nosniff")
    assert any(f"{headers['x-request-id']} 127.0.0.1" in record.getMessage() for record in caplog.records)


def test_rejection_has_the_id_of_its_own_request() -> None:
    first, second = "X-Request-ID: the-first", "X-Request-ID: the-second"
    with serve_app(RequestLog(EchoApp())) as address:
        with socket.create_connection(address, TIMEOUT_SECONDS) as client:
            client.sendall(make_request_head(first))
            assert read_response_body(client) == b""
            client.sendall(make_request_head(second, "Host: there"))
            assert read_error(client)[0]["x-request-id"] == "the-second"
        with socket.create_connection(address, TIMEOUT_SECONDS) as client:
            client.sendall(make_request_head(first, "Transfer-Encoding: chunked") + b"nonsense\r\n")
            assert read_error(client)[1]["instance"] == "urn:stackseg:request:the-first"
        with socket.create_connection(address, TIMEOUT_SECONDS) as client:
            client.sendall(make_request_head("X-Request-ID: for; ged", "Host: there"))
            assert len(read_error(client)[0]["x-request-id"]) == len(str(uuid.UUID(int=0)))


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_upgrade_header_is_ignored(protocol: str) -> None:
    body = random.Random(3).randbytes(READ_BUFFER_BYTES + 12345)
    upgrade = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAEAAEAA")
    plain, chunked = (
        make_request_head(*upgrade, f"Content-Length: {len(body)}"),
        make_request_head(*upgrade, "Transfer-Encoding: chunked"),
    )
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        for sent in (plain + body, chunked + chunks):
            client.sendall(sent)
            assert read_response_body(client) == body
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        for piece in (plain[:70], plain[70:], body[:10], body[10:]):
            time.sleep(0.05)
            client.sendall(piece)
        assert read_response_body(client) == body


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 1, 200), ("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 1, 200), ("1.0", 2, 400)],
)
def test_request_must_have_one_host(version: str, hosts: int, status: int) -> None:
    lines = [f"GET / HTTP/{version}", *(f"Host: host{number}" for number in range(hosts)), "", ""]
    with serve_app(EchoApp()) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall("\r\n".join(lines).encode())
        assert client.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_shutdown_waits_for_pending_responses_and_active_uploads() -> None:
    gated, echo = GatedApp(), EchoApp()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (gated if scope["path"] == "/gated" else echo)(scope, receive, send)

    server = make_server(app, drain_seconds=10 * TIMEOUT_SECONDS, stalled_seconds=3)
    with run_server(server) as address, ExitStack() as exit_stack:
        silent, idle, partial_head, pending, uploading, stalled = (
            exit_stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS)) for _ in range(6)
        )
        idle.sendall(make_request_head())
        assert read_response_body(idle) == b""
        partial_head.sendall(b"POST / HT")
        pending.sendall(make_request_head().replace(b" / ", b" /gated "))
        uploading.sendall(make_request_head("Content-Length: 12"))
        stalled.sendall(make_request_head("Content-Length: 12") + b"half")
        wait_until(lambda: gated.request_count == 1 and 4 in echo.pieces, TIMEOUT_SECONDS)
        server.should_exit = True
        for client in (silent, idle, partial_head):
            assert client.recv(1) == b""
        # Upload for longer than an upload may stall, so that every byte must restart the timeout.
        for _ in range(12):
            time.sleep(0.3)
            uploading.sendall(b"a")
        assert read_response_body(uploading) == 12 * b"a"
        headers, document = read_error(stalled, 503)
        assert document["type"] == "urn:stackseg:problem:not-ready"
        assert int(headers["retry-after"]) > 0
        assert not gated.gate.is_set()
        gated.gate.set()
        assert read_response_body(pending) == b"ok"


def test_shutdown_does_not_wait_for_slow_uploads() -> None:
    server = make_server(echo := EchoApp(), drain_seconds=1, stalled_seconds=TIMEOUT_SECONDS)
    with run_server(server) as address, socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.sendall(make_request_head("Content-Length: 12") + b"half")
        wait_until(lambda: 4 in echo.pieces, TIMEOUT_SECONDS)
        server.should_exit = True
        read_error(client, 503)


@needs_openssl
def test_shutdown_does_not_wait_for_unfinished_tls_handshakes(tmp_path: Path) -> None:
    server = make_server(
        EchoApp(),
        TIMEOUT_SECONDS,
        TIMEOUT_SECONDS,
        timeout_graceful_shutdown=TIMEOUT_SECONDS,
        **create_certificate(tmp_path),
    )
    with ExitStack() as exit_stack:
        with run_server(server) as address:
            exit_stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS))
            # Wait until the connection is accepted.
            time.sleep(0.5)
            began = time.monotonic()
        assert time.monotonic() - began < TIMEOUT_SECONDS / 2


@needs_openssl
@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (make_request_head("Content-Length: 2") + b"ab", True),
        (make_request_head("Connection: close", "Content-Length: 2") + b"ab", True),
        (make_request_head("Content-Length: 1000") + b"ab", False),
    ],
    ids=["idle", "last response sent", "stalled"],
)
def test_shutdown_does_not_wait_for_clients_to_end_tls(tmp_path: Path, sent: bytes, *, answered: bool) -> None:
    echo, files = EchoApp(), create_certificate(tmp_path)
    server = make_server(
        echo, 2 * TIMEOUT_SECONDS, stalled_seconds=1, timeout_graceful_shutdown=2 * TIMEOUT_SECONDS, **files
    )
    with ExitStack() as exit_stack:
        with run_server(server) as address:
            client = exit_stack.enter_context(connect_tls(address, files))
            client.sendall(sent)
            wait_until(lambda: echo.pieces, TIMEOUT_SECONDS)
            assert not answered or read_response_body(client) == b"ab"
            began = time.monotonic()
        assert time.monotonic() - began < TIMEOUT_SECONDS / 2
        assert answered or read_error(client, 503)[0]["connection"] == "close"


@needs_openssl
@pytest.mark.parametrize("drain_seconds", [0.1, 6 * TIMEOUT_SECONDS], ids=["drained", "draining"])
def test_shutdown_sends_complete_responses_to_slow_clients_over_tls(tmp_path: Path, drain_seconds: float) -> None:
    echo, files, body = EchoApp(), create_certificate(tmp_path), random.Random(4).randbytes(12 * 2**20)
    server = make_server(
        echo, drain_seconds, stalled_seconds=0.5, timeout_graceful_shutdown=6 * TIMEOUT_SECONDS, **files
    )
    content = bytearray()

    def read(client: ssl.SSLSocket) -> None:
        while len(content) < len(body) and (piece := client.recv(2**18)):
            content.extend(piece)
            time.sleep(0.002)

    with ExitStack() as exit_stack:
        with run_server(server) as address:
            client = exit_stack.enter_context(connect_tls(address, files, SO_RCVBUF=2**16))
            client.sendall(make_request_head(f"Content-Length: {len(body)}") + body)
            wait_until(lambda: sum(echo.pieces) == len(body), TIMEOUT_SECONDS)
            reader = threading.Timer(2, read, [client])
            began = time.monotonic()
            reader.start()
        stopped = time.monotonic() - began
        reader.join()
    assert content.endswith(body[-(2**20) :])
    assert 2 < stopped < 4 * TIMEOUT_SECONDS


def test_connection_is_not_aborted_while_the_system_has_unsent_bytes() -> None:
    """The buffer of the TLS transport may be empty while the underlying transport still has data."""
    clock, aborted = SimpleNamespace(now=0.0), []
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), TIMEOUT_SECONDS) as client,
        listener.accept()[0] as end,
    ):
        end.settimeout(0.5)
        sent = send_until_blocked(end, bytes(2**16), max_bytes=2**30)
        connection: Any = Connection.__new__(Connection)
        connection.loop = SimpleNamespace(time=lambda: clock.now)
        connection.transport = SimpleNamespace(
            is_closing=lambda: True,
            get_write_buffer_size=lambda: 0,
            get_extra_info={"socket": end}.get,
            abort=lambda: aborted.append(clock.now),
        )
        for clock.now in (1.0, 2.0, 99.0):
            connection.close_if_stalled(5)
        while sent:
            sent -= len(client.recv(2**20))
        # Wait until the system has received all acknowledgments.
        time.sleep(0.5)
        for clock.now in (100.0, 104.0, 105.0):
            connection.close_if_stalled(5)
    assert aborted == [105.0]
