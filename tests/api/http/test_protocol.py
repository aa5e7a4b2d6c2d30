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
from fakes import until
from sockets import (
    SECONDS,
    Echo,
    Gated,
    Pieces,
    answer,
    head,
    key_and_certificate,
    needs_openssl,
    refusal,
    running,
    secured,
    served,
    stopping,
)
from starlette.types import Receive, Scope, Send

from service.api.access.middleware import RequestLog
from service.api.http.flow_control import READ_AHEAD_BYTES
from service.api.http.protocol import MAX_UNANSWERED, PROBE_SECONDS, READ_BYTES, Connection
from service.api.http.refusals import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PARAMETERS
from service.api.messages.problems import Problem
from service.api.server import build_config


def taken(client: socket.socket, line: bytes, most: int) -> int:
    """Bytes that can be sent before the server stops reading or hangs up."""
    sent = 0
    with suppress(OSError):
        while sent < most:
            sent += client.send(line)
    return sent


def narrow(client: socket.socket) -> socket.socket:
    """The same, of which the system keeps little that the server has not read, however long that takes."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    return client


def test_bodies_arrive_whole_in_large_pieces_one_after_the_other() -> None:
    echo, body = Echo(), random.Random(0).randbytes(3 * READ_BYTES + 12345)
    with served(echo) as address, socket.create_connection(address, SECONDS) as client:
        for part in (body, b"", body[:1000], body):
            client.sendall(head(f"Content-Length: {len(part)}") + part)
            assert answer(client) == part
    assert max(echo.pieces) > READ_BYTES // 8


@needs_openssl
def test_bodies_arrive_whole_over_tls(tmp_path: Path) -> None:
    """What decrypts asks for a place once, and fills it record by record."""
    files = key_and_certificate(tmp_path)
    body = random.Random(2).randbytes(2 * READ_BYTES + 12345)
    with served(Echo(), **files) as address:
        plain = socket.create_connection(address, SECONDS)
        with ssl.create_default_context(cafile=files["ssl_certfile"]).wrap_socket(
            plain, server_hostname="localhost"
        ) as client:
            for part in (body, body[:1000], body[:100_000]):
                client.sendall(head(f"Content-Length: {len(part)}") + part)
                assert answer(client) == part


@pytest.mark.parametrize(("size", "number"), [(1, 100_000), (999, 2000), (70_000, 200)])
def test_bodies_in_chunks_of_any_size_arrive_whole(size: int, number: int) -> None:
    body = random.Random(1).randbytes(number * size)
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Transfer-Encoding: chunked"))
        for start in range(0, len(sent), 54_321):
            client.sendall(sent[start : start + 54_321])
        assert answer(client) == body


def test_pieces_that_wait_are_added_in_place() -> None:
    """Bodies in chunks of one byte would otherwise be copied as often as they have bytes."""
    connection = Connection.__new__(Connection)
    cycle: Any = SimpleNamespace(body=bytearray(), response_complete=False, message_event=threading.Event())
    connection.cycle = cycle
    connection.on_body(b"a")
    connection.on_body(b"b")
    waiting = cycle.body
    connection.on_body(b"c")
    assert cycle.body is waiting
    assert (bytes(waiting), cycle.message_event.is_set()) == (b"abc", True)


def test_connection_whose_tls_has_lost_its_socket_has_no_descriptor() -> None:
    """An error there would end the server, which asks all connections every second."""
    connection = Connection.__new__(Connection)
    # What `ssl.SSLObject` runs over, as it is after the end.
    loop = asyncio.new_event_loop()
    lost = SSLProtocol(loop, connection, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), None, server_side=True)
    connection.transport = lost._get_app_transport()
    connection.transport.abort()
    loop.close()
    assert connection.fileno() == -1


class ShortOfMemory(Connection):
    def on_body(self, body: bytes) -> None:
        raise MemoryError


def test_body_that_memory_does_not_hold_is_not_called_malformed() -> None:
    config = build_config(Echo(), host="127.0.0.1", port=0, lifespan="off")
    config.http = ShortOfMemory
    with running(uvicorn.Server(config)) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Content-Length: 5") + b"12345")
        answered = client.makefile("rb").read()
    assert answered.startswith(b"HTTP/1.1 507 ")
    assert b"urn:stackseg:problem:out-of-memory" in answered


def test_connections_that_send_at_the_same_time_do_not_get_each_others_bytes() -> None:
    bodies = [random.Random(seed).randbytes(2 * READ_BYTES) for seed in range(4)]
    with served(Echo()) as address:
        clients = [socket.create_connection(address, SECONDS) for _ in bodies]
        for client, body in zip(clients, bodies, strict=True):
            client.sendall(head(f"Content-Length: {len(body)}"))
        answers: dict[int, bytes] = {}

        def send(index: int) -> None:
            clients[index].sendall(bodies[index])
            answers[index] = answer(clients[index])

        threads = [threading.Thread(target=send, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread, client in zip(threads, clients, strict=True):
            thread.join()
            client.close()
    assert [answers[index] for index in range(len(bodies))] == bodies


def test_body_that_nobody_receives_is_not_read() -> None:
    ended = threading.Event()

    async def deaf(_scope: Scope, receive: Receive, send: Send) -> None:
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await Echo()(_scope, receive, send)

    with served(deaf) as address, socket.create_connection(address, 0.5) as client:
        client.sendall(head(f"Content-Length: {64 * 2**20}"))
        sent = taken(client, bytes(2**16), most=64 * 2**20)
        ended.set()
    # The system's own buffers take a few megabytes on either side.
    assert sent < 16 * 2**20 + READ_BYTES


@pytest.mark.parametrize("ahead", [b"", head(), head() * (MAX_UNANSWERED - 2)], ids=["the first", "next", "last"])
def test_little_is_read_of_bodies_that_nobody_has_asked_for(ahead: bytes) -> None:
    """Many connections would otherwise hold many times the memory that there is for uploads."""
    ended, busy, deaf, number, body = threading.Event(), threading.Event(), 0, 20, bytes(READ_BYTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal deaf
        match scope["path"]:
            case "/busy":
                busy.wait(SECONDS)
            case "/deaf":
                deaf += 1
                while not ended.is_set():
                    await asyncio.sleep(0.01)
        await Echo()(scope, receive, send)

    server = uvicorn.Server(build_config(app, host="127.0.0.1", port=0, lifespan="off"))
    with running(server) as address, ExitStack() as held:
        held.callback(ended.set)
        other, *clients = (held.enter_context(socket.create_connection(address, SECONDS)) for _ in range(1 + number))
        for client in clients:
            # The system makes room for more where much was received.
            client.sendall(head(f"Content-Length: {4 * len(body)}") + 4 * body)
            assert len(answer(client)) == 4 * len(body)
            client.settimeout(0.05)
        other.sendall(head().replace(b" / ", b" /busy "))
        for client in clients:
            taken(client, (ahead + head(f"Content-Length: {len(body)}")).replace(b" / ", b" /deaf ") + body, len(body))
        busy.set()
        until(lambda: deaf == number, SECONDS)
        bodies = [len(connection.cycle.body) for connection in server.server_state.connections if connection.cycle]
        assert 0 < sum(bodies) < number * 2 * READ_AHEAD_BYTES


def test_little_is_read_of_the_next_body_while_the_first_request_listens() -> None:
    """Who waits for a client to hang up asks for more, but not of the request behind."""
    ended, listening, body = threading.Event(), threading.Event(), bytes(2 * READ_BYTES)

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        leaving = asyncio.ensure_future(receive())
        await asyncio.sleep(0.2)
        listening.set()
        # Much comes meanwhile.
        time.sleep(0.5)
        while not ended.is_set():
            await asyncio.sleep(0.01)
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    server = uvicorn.Server(build_config(app, host="127.0.0.1", port=0, lifespan="off"))
    with running(server) as address, socket.create_connection(address, SECONDS) as client, ExitStack() as held:
        held.callback(ended.set)
        first = head(f"Content-Length: {len(body)}")
        client.sendall(first + body + first)
        assert listening.wait(SECONDS)
        client.settimeout(1)
        taken(client, body, len(body))
        (connection,) = server.server_state.connections
        until(lambda: connection.cycle.body, SECONDS)
        time.sleep(0.2)
        assert len(connection.cycle.body) < 2 * READ_AHEAD_BYTES


def test_rest_of_a_body_that_nobody_wanted_does_not_hold_up_the_next_request() -> None:
    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with served(hasty) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head(f"Content-Length: {READ_BYTES}") + bytes(READ_BYTES) + head())
        content = b""
        while content.count(b"\r\n\r\nok") < 2:
            content += client.recv(2**16)
            assert content


@pytest.mark.parametrize(
    ("begin", "line"),
    [(b"GET /", b"a" * 1000), (head()[:-2] + b"X-Long: ", b"a" * 1000), (head()[:-2], b"X-Many: 1\r\n" * 100)],
)
def test_head_without_end_is_refused(begin: bytes, line: bytes) -> None:
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(begin)
        assert taken(narrow(client), line, most=100 * MAX_HEAD_BYTES) < 32 * MAX_HEAD_BYTES


def test_trailers_without_end_end_the_connection() -> None:
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n")
        assert taken(narrow(client), b"X-Many: 1\r\n" * 100, most=100 * MAX_HEAD_BYTES) < 32 * MAX_HEAD_BYTES


def test_head_of_some_length_is_read() -> None:
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("X-Long: " + "a" * (MAX_HEAD_BYTES // 2), "Content-Length: 3"))
        client.sendall(b"abc")
        assert answer(client) == b"abc"


def test_what_was_answered_or_closed_is_gone_at_once() -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        requests.append(weakref.ref(receive.__self__))  # type: ignore[attr-defined] # uvicorn's, which has the body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def gone(every: list[weakref.ref[Any]]) -> bool:
        return all(one() is None for one in every)

    requests: list[weakref.ref[Any]] = []
    gc.collect()
    gc.disable()
    try:
        with served(app) as address, socket.create_connection(address) as client:
            for _ in range(3):
                client.sendall(head("Content-Length: 5") + b"12345")
                assert answer(client) == b"ok"
            # The connection has the latest.
            until(lambda: gone(requests[:-1]), SECONDS)
            connections = [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), Connection)]
            assert connections
            client.close()
            until(lambda: gone(requests) and gone(connections), SECONDS)
    finally:
        gc.enable()


def test_requests_sent_ahead_are_answered_one_after_the_other() -> None:
    gated = Gated()
    with served(gated) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head() * MAX_UNANSWERED)
        until(lambda: gated.asked == 1, SECONDS)
        gated.opened.set()
        content = b""
        while content.count(b"\r\n\r\nok") < MAX_UNANSWERED:
            content += client.recv(2**16)
        assert gated.asked == MAX_UNANSWERED
        client.sendall(head())
        assert answer(client) == b"ok"


def drain(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    content = b""
    while piece := client.recv(2**16):
        content += piece
    return content


def bodies(content: bytes) -> list[bytes]:
    """The bodies of answers that came one after the other and have no empty line in them."""
    return [answer.partition(b"\r\n\r\n")[2] for answer in content.split(b"HTTP/1.1 200 OK\r\n")[1:]]


class Numbered:
    """Answers with the path after a while."""

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        await Pieces(scope["path"].encode())(scope, _receive, send)


def numbered(number: int, *headers: str) -> bytes:
    return head(*headers).replace(b" / ", b" /%d " % number)


def test_of_requests_sent_ahead_without_end_those_accepted_are_answered_in_order() -> None:
    """Each would take memory, and a few bytes are enough for one."""
    with served(Numbered()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(b"".join(numbered(number) for number in range(40)))
        answers = drain(client)
        # Not even a refusal follows, which would be taken for the answer to the next.
        assert [body.split(b"\r\n")[1] for body in bodies(answers)] == [b"/%d" % n for n in range(MAX_UNANSWERED)]
        assert answers.count(b"connection: close") == answers.count(b"HTTP/1.1 ") - MAX_UNANSWERED + 1 == 1


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_client_that_ends_its_side_gets_its_answer(version: bytes) -> None:
    gated = Gated()
    with served(gated) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Content-Length: 2").replace(b"1.1", version) + b"ab")
        client.shutdown(socket.SHUT_WR)
        until(lambda: gated.asked == 1, SECONDS)
        time.sleep(3 * PROBE_SECONDS)
        gated.opened.set()
        answered = drain(client)
        assert answered.endswith(b"\r\n\r\nok")
        assert gated.left == 0
        # An interim answer, which only HTTP/1.1 knows, tells it from a client that has hung up.
        assert answered.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ") == (version == b"1.1")
        assert answered.count(b"HTTP/1.1") == (2 if version == b"1.1" else 1)


def test_client_that_ends_its_side_after_several_requests_gets_the_answers_to_the_whole_ones() -> None:
    with served(Numbered()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(b"".join(numbered(number) for number in range(3)) + numbered(3, "Content-Length: 5") + b"half")
        client.shutdown(socket.SHUT_WR)
        assert [body.split(b"\r\n")[1] for body in bodies(drain(client))] == [b"/0", b"/1", b"/2"]


def test_client_that_ends_its_side_in_the_midst_of_a_body_has_hung_up() -> None:
    gated = Gated()
    with served(gated) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Content-Length: 5") + b"half")
        until(lambda: gated.asked == 1, SECONDS)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        until(lambda: gated.left == 1, SECONDS)


def test_client_of_http_1_0_is_not_told_to_go_on() -> None:
    sent = head("Content-Length: 2", "Expect: 100-continue")
    with served(Echo()) as address:
        for version, interim in ((b"1.1", True), (b"1.0", False)):
            with socket.create_connection(address, SECONDS) as client:
                client.sendall(sent.replace(b"1.1", version))
                time.sleep(0.1)
                client.sendall(b"ab")
                first = client.recv(2**16)
            assert first.startswith(b"HTTP/1.1 100 ") == interim
            assert first.startswith(b"HTTP/1.1 200 ") != interim


@pytest.mark.parametrize(
    ("sent", "ended"),
    [(head(), False), (head(), True), (head() * 2, False), (head().replace(b"1.1", b"1.0"), True)],
    ids=["at once", "after its own side", "after it sent more", "after its own side, HTTP/1.0"],
)
def test_client_that_hangs_up_is_noticed(sent: bytes, *, ended: bool) -> None:
    gated = Gated()
    with served(gated) as address:
        with socket.create_connection(address, SECONDS) as client:
            client.sendall(sent)
            until(lambda: gated.asked == 1, SECONDS)
            if ended:
                client.shutdown(socket.SHUT_WR)
                time.sleep(3 * PROBE_SECONDS)
                assert gated.left == 0
                # Closed with a reset: the system of a client of HTTP/1.0, which is sent nothing, answers to probes
                # for another minute.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: gated.left == 1, SECONDS)
    assert gated.asked == 1


def test_nonsense_does_not_cut_an_answer() -> None:
    gated = Gated()
    with served(gated) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head() + b"nonsense\r\n\r\n")
        gated.opened.set()
        assert bodies(drain(client)) == [b"ok"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"nonsense\r\n\r\n", "Invalid"),
        (b"\r\n" * (MAX_HEAD_BYTES // 2 + 1), "too long"),
        (head(f"X-Long: {'a' * MAX_HEAD_BYTES}"), "too long"),
        (head("Host: there"), "one host"),
        (head(*["X: 1"] * MAX_HEADERS), "headers"),
        (f"GET /{'a' * MAX_HEAD_BYTES} HTTP/1.1\r\n\r\n".encode(), "too long"),
        (f"GET /?{'&'.join(MAX_PARAMETERS * ['a'])}&b HTTP/1.1\r\nHost: h\r\n\r\n".encode(), "parameters"),
        (head("Transfer-Encoding: gzip, chunked"), "Transfer-Encoding"),
        (head("Transfer-Encoding: gzip", "Transfer-Encoding: chunked"), "Transfer-Encoding"),
        (head("Transfer-Encoding: chunked").replace(b"1.1", b"1.0"), "Transfer-Encoding"),
        (head(f"Content-Length: {'0' * 5000}3"), "Content-Length"),
        *(
            (head(f"Content-Length: {length}"), "Invalid")
            for length in ("-3", "+3", "3 3", "3, 3", "0x3", "", "9" * 30)
        ),
        (head("Content-Length: 3", "Content-Length: 3"), "Invalid"),
        (head("Content-Length: 3", "Content-Length: 4"), "Invalid"),
        (head("Content-Length: 3", "Transfer-Encoding: chunked"), "Invalid"),
        (head("Transfer-Encoding: chunked", "Content-Length: 3"), "Invalid"),
        (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), "Invalid"),
        (head("Transfer-Encoding : chunked"), "Invalid"),
        (head("Content-Length:", " 3"), "Invalid"),
        (head("X: a\rContent-Length: 3"), "Invalid"),
        (head("Content-Length: 3").replace(b"1.1", b"2.0"), "HTTP/1.1"),
        (b"GET /\r\n\r\n", "HTTP/1.1"),
        (head("Transfer-Encoding: chunked") + b"nonsense\r\n", "Invalid"),
        (b"CONNECT there:80 HTTP/1.1\r\nHost: there:80\r\n\r\n", "proxy"),
    ],
)
def test_refusals_are_problem_documents(sent: bytes, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "service.access"),
        served(Echo()) as address,
        socket.create_connection(address, SECONDS) as client,
    ):
        client.sendall(sent)
        headers, document = refusal(client)
    assert Problem.model_validate(document).type == "urn:stackseg:problem:bad-request"
    assert (document["status"], reason in document["detail"]) == (400, True)
    assert document["instance"] == f"urn:uuid:{headers['x-request-id']}"
    assert headers["content-type"] == "application/problem+json"
    assert (headers["connection"], headers["x-content-type-options"]) == ("close", "nosniff")
    assert any(headers["x-request-id"] in record.getMessage() for record in caplog.records)


def test_refusal_carries_the_number_of_its_own_request() -> None:
    named, other = "X-Request-ID: the-first", "X-Request-ID: the-second"
    with served(RequestLog(Echo())) as address:
        with socket.create_connection(address, SECONDS) as client:
            client.sendall(head(named))
            assert answer(client) == b""
            client.sendall(head(other, "Host: there"))
            assert refusal(client)[0]["x-request-id"] == "the-second"
        with socket.create_connection(address, SECONDS) as client:
            client.sendall(head(named, "Transfer-Encoding: chunked") + b"nonsense\r\n")
            assert refusal(client)[1]["instance"] == "urn:stackseg:request:the-first"
        with socket.create_connection(address, SECONDS) as client:
            client.sendall(head("X-Request-ID: for; ged", "Host: there"))
            assert len(refusal(client)[0]["x-request-id"]) == len(str(uuid.UUID(int=0)))


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_offer_of_another_protocol_is_ignored(protocol: str) -> None:
    body = random.Random(3).randbytes(READ_BYTES + 12345)
    offer = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAEAAEAA")
    plain, chunked = head(*offer, f"Content-Length: {len(body)}"), head(*offer, "Transfer-Encoding: chunked")
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        for sent in (plain + body, chunked + chunks):
            client.sendall(sent)
            assert answer(client) == body
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        for piece in (plain[:70], plain[70:], body[:10], body[10:]):
            time.sleep(0.05)
            client.sendall(piece)
        assert answer(client) == body


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 1, 200), ("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 1, 200), ("1.0", 2, 400)],
)
def test_request_names_one_host(version: str, hosts: int, status: int) -> None:
    lines = [f"GET / HTTP/{version}", *(f"Host: host{number}" for number in range(hosts)), "", ""]
    with served(Echo()) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall("\r\n".join(lines).encode())
        assert client.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_who_stops_waits_for_answers_that_are_owed_and_for_bodies_that_come() -> None:
    gated, echo = Gated(), Echo()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (gated if scope["path"] == "/gated" else echo)(scope, receive, send)

    server = stopping(app, drain_seconds=10 * SECONDS, stalled_seconds=3)
    with running(server) as address, ExitStack() as held:
        silent, idle, half, owed, coming, stalled = (
            held.enter_context(socket.create_connection(address, SECONDS)) for _ in range(6)
        )
        idle.sendall(head())
        assert answer(idle) == b""
        half.sendall(b"POST / HT")
        owed.sendall(head().replace(b" / ", b" /gated "))
        coming.sendall(head("Content-Length: 12"))
        stalled.sendall(head("Content-Length: 12") + b"half")
        until(lambda: gated.asked == 1 and 4 in echo.pieces, SECONDS)
        server.should_exit = True
        for client in (silent, idle, half):
            assert client.recv(1) == b""
        # For longer than one may stall, and seldom enough to tell that each of them counts.
        for _ in range(12):
            time.sleep(0.3)
            coming.sendall(b"a")
        assert answer(coming) == 12 * b"a"
        headers, document = refusal(stalled, 503)
        assert document["type"] == "urn:stackseg:problem:not-ready"
        assert int(headers["retry-after"]) > 0
        assert not gated.opened.is_set()
        gated.opened.set()
        assert answer(owed) == b"ok"


def test_who_stops_does_not_wait_for_slow_bodies_for_ever() -> None:
    server = stopping(echo := Echo(), drain_seconds=1, stalled_seconds=SECONDS)
    with running(server) as address, socket.create_connection(address, SECONDS) as client:
        client.sendall(head("Content-Length: 12") + b"half")
        until(lambda: 4 in echo.pieces, SECONDS)
        server.should_exit = True
        refusal(client, 503)


@needs_openssl
def test_who_stops_does_not_wait_for_who_has_not_even_begun_to_speak_tls(tmp_path: Path) -> None:
    server = stopping(Echo(), SECONDS, SECONDS, timeout_graceful_shutdown=SECONDS, **key_and_certificate(tmp_path))
    with ExitStack() as held:
        with running(server) as address:
            held.enter_context(socket.create_connection(address, SECONDS))
            # Until it was accepted.
            time.sleep(0.5)
            began = time.monotonic()
        assert time.monotonic() - began < SECONDS / 2


@needs_openssl
@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (head("Content-Length: 2") + b"ab", True),
        (head("Connection: close", "Content-Length: 2") + b"ab", True),
        (head("Content-Length: 1000") + b"ab", False),
    ],
    ids=["idle", "answered for the last time", "stalled"],
)
def test_who_stops_does_not_wait_for_clients_to_end_tls(tmp_path: Path, sent: bytes, *, answered: bool) -> None:
    echo, files = Echo(), key_and_certificate(tmp_path)
    server = stopping(echo, 2 * SECONDS, stalled_seconds=1, timeout_graceful_shutdown=2 * SECONDS, **files)
    with ExitStack() as held:
        with running(server) as address:
            client = held.enter_context(secured(address, files))
            client.sendall(sent)
            until(lambda: echo.pieces, SECONDS)
            assert not answered or answer(client) == b"ab"
            began = time.monotonic()
        assert time.monotonic() - began < SECONDS / 2
        assert answered or refusal(client, 503)[0]["connection"] == "close"


@needs_openssl
@pytest.mark.parametrize("drain_seconds", [0.1, 6 * SECONDS], ids=["drained", "draining"])
def test_who_stops_sends_whole_answers_to_slow_readers_over_tls(tmp_path: Path, drain_seconds: float) -> None:
    echo, files, body = Echo(), key_and_certificate(tmp_path), random.Random(4).randbytes(12 * 2**20)
    server = stopping(echo, drain_seconds, stalled_seconds=0.5, timeout_graceful_shutdown=6 * SECONDS, **files)
    content = bytearray()

    def read(client: ssl.SSLSocket) -> None:
        while len(content) < len(body) and (piece := client.recv(2**18)):
            content.extend(piece)
            time.sleep(0.002)

    with ExitStack() as held:
        with running(server) as address:
            client = held.enter_context(secured(address, files, SO_RCVBUF=2**16))
            client.sendall(head(f"Content-Length: {len(body)}") + body)
            until(lambda: sum(echo.pieces) == len(body), SECONDS)
            reader = threading.Timer(2, read, [client])
            began = time.monotonic()
            reader.start()
        stopped = time.monotonic() - began
        reader.join()
    assert content.endswith(body[-(2**20) :])
    assert 2 < stopped < 4 * SECONDS


def test_what_the_system_has_not_sent_is_not_cut() -> None:
    """Where nothing waits in the transport of TLS itself, some may in the one beneath it."""
    clock, aborted = SimpleNamespace(now=0.0), []
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), SECONDS) as client,
        listener.accept()[0] as end,
    ):
        end.settimeout(0.5)
        sent = taken(end, bytes(2**16), most=2**30)
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
        # Until the system has heard that all of it came.
        time.sleep(0.5)
        for clock.now in (100.0, 104.0, 105.0):
            connection.close_if_stalled(5)
    assert aborted == [105.0]
