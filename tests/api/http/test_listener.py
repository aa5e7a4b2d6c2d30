from __future__ import annotations

import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import until
from sockets import SECONDS, Echo, Gated, answer, head, key_and_certificate, needs_openssl, running, stopping

from service.api.http.data_rate import SlowClientLimits
from service.api.http.listener import NEW_CONNECTION_SECONDS, LOG_INTERVAL_SECONDS, Listener, limit_connections
from service.api.server import Server, listen

LIMIT = 8


@contextmanager
def limited_server(app: Any, **more: Any) -> Iterator[tuple[Server, tuple[str, int]]]:
    """A server that has LIMIT connections at most."""
    server = stopping(app, SECONDS, SECONDS, **more)
    with Listener(listen("127.0.0.1", 0), LIMIT) as listener, running(server, [listener]):
        yield server, listener.getsockname()


def connect(held: ExitStack, address: tuple[str, int]) -> socket.socket:
    return held.enter_context(socket.create_connection(address, SECONDS))


def ended(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_silent_connections_make_room_the_longest_waiting_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), limited_server(Echo()) as (server, address), ExitStack() as held:
        clients = [connect(held, address) for _ in range(LIMIT)]
        until(lambda: len(server.server_state.connections) == LIMIT, SECONDS)
        for _ in range(3):
            clients += [connect(held, address) for _ in range(LIMIT)]
            busy = connect(held, address)
            busy.sendall(head("Content-Length: 2") + b"ab")
            assert answer(busy) == b"ab"
        assert all(ended(client) for client in clients[:LIMIT])
        until(lambda: len(server.server_state.connections) <= LIMIT, SECONDS)
    lines = [record for record in caplog.records if "server.connections" in record.getMessage()]
    assert len(lines) == 1
    assert LOG_INTERVAL_SECONDS > SECONDS


def test_who_drips_a_head_or_stalls_with_a_body_makes_room_and_who_is_worked_for_does_not() -> None:
    gated = Gated()
    with limited_server(gated) as (_, address), ExitStack() as held:
        owed = connect(held, address)
        owed.sendall(head())
        until(lambda: gated.asked == 1, SECONDS)
        stalled = [connect(held, address) for _ in range(LIMIT - 1)]
        for index, client in enumerate(stalled):
            client.sendall(head("Content-Length: 9") + b"half" if index % 2 else b"GET / HT")
        until(lambda: gated.asked == 1 + len(stalled) // 2, SECONDS)
        new = [connect(held, address) for _ in range(LIMIT)]
        until(lambda: all(ended(client) for client in stalled), SECONDS)
        assert not ended(owed)
        owed.settimeout(SECONDS)
        gated.opened.set()
        assert answer(owed) == b"ok"
        new[-1].sendall(head())
        assert answer(new[-1]) == b"ok"


def test_where_all_are_worked_for_the_new_one_is_closed() -> None:
    gated = Gated()
    with limited_server(gated) as (_, address), ExitStack() as held:
        clients = [connect(held, address) for _ in range(LIMIT)]
        for client in clients:
            client.sendall(head())
        until(lambda: gated.asked == LIMIT, SECONDS)
        late = connect(held, address)
        until(lambda: ended(late), SECONDS)
        gated.opened.set()
        assert [answer(client) for client in clients] == [b"ok"] * LIMIT
        again = connect(held, address)
        again.sendall(head())
        assert answer(again) == b"ok"


def test_answer_on_its_way_is_not_cut_while_others_are_idle() -> None:
    content = bytes(2**24)

    async def large(scope: Any, _receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    with limited_server(large) as (server, address), ExitStack() as held:
        slow = connect(held, address)
        slow.sendall(head())
        slow.recv(1, socket.MSG_PEEK)
        idle = [connect(held, address) for _ in range(LIMIT - 1)]
        until(lambda: len(server.server_state.connections) == LIMIT, SECONDS)
        time.sleep(NEW_CONNECTION_SECONDS)
        new = connect(held, address)
        until(lambda: any(ended(client) for client in idle), SECONDS)
        assert answer(slow) == content
        assert not ended(new)


def test_streams_of_answers_make_room_last_and_only_those_that_can_be_asked_for_again() -> None:
    gated = Gated()
    with limited_server(gated) as (_, address), ExitStack() as held:
        posting, idle = connect(held, address), connect(held, address)
        posting.sendall(head())
        getting = [connect(held, address) for _ in range(LIMIT - 2)]
        for client in getting:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        until(lambda: gated.asked == LIMIT - 1, SECONDS)
        time.sleep(NEW_CONNECTION_SECONDS)
        first = connect(held, address)
        until(lambda: ended(idle), SECONDS)
        first.sendall(head())
        until(lambda: gated.asked == LIMIT, SECONDS)
        assert not any(ended(client) for client in getting)
        second = connect(held, address)
        until(lambda: sum(ended(client) for client in getting) == 1, SECONDS)
        second.sendall(head())
        gated.opened.set()
        for client in (posting, first, second):
            client.settimeout(SECONDS)
            assert answer(client) == b"ok"


def test_new_connection_comes_to_speak_before_those_that_stream_answers_and_what_it_sent_is_read() -> None:
    gated = Gated()
    with limited_server(gated) as (_, address), ExitStack() as held:
        getting = [connect(held, address) for _ in range(LIMIT)]
        for client in getting:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        until(lambda: gated.asked == LIMIT, SECONDS)
        new = [connect(held, address) for _ in range(2)]
        until(lambda: sum(ended(client) for client in getting) == 2, SECONDS)
        gated.opened.set()
        for client in new:
            client.sendall(head())
            assert answer(client) == b"ok"
    with Listener(listen("127.0.0.1", 0), 1) as listener, ExitStack() as held:
        connect(held, listener.getsockname()).sendall(b"P")
        sent = held.enter_context(listener.accept()[0])
        late = connect(held, listener.getsockname())
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert ended(late)
        assert sent.recv(1) == b"P"


def test_address_with_the_most_connections_makes_room_first() -> None:
    with limited_server(Echo()) as (server, address), ExitStack() as held:
        for_long = connect(held, address)
        time.sleep(0.1)
        for _ in range(2 * LIMIT):
            held.enter_context(socket.create_connection(address, SECONDS, source_address=("127.0.0.2", 0)))
        until(lambda: len(server.server_state.connections) <= LIMIT, SECONDS)
        for_long.settimeout(SECONDS)
        for_long.sendall(head("Content-Length: 2") + b"ab")
        assert answer(for_long) == b"ab"


@needs_openssl
def test_silent_handshakes_make_room_and_end(tmp_path: Path) -> None:
    with limited_server(Echo(), **key_and_certificate(tmp_path)) as (server, address), ExitStack() as held:
        clients = [connect(held, address) for _ in range(2 * LIMIT)]
        until(lambda: sum(ended(client) for client in clients) >= LIMIT, SECONDS)
        assert not ended(clients[-1])
        server.patience = SlowClientLimits(head_seconds=0.5)
        until(lambda: all(ended(client) for client in clients), SECONDS)


def test_accepting_goes_on_where_files_have_taken_all_descriptors() -> None:
    """In a process of its own, whose limit is low."""
    program = (
        "import resource, sys; sys.path[:0] = ['tests', 'tests/api/http']\n"
        "from test_listener import *\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "server = stopping(Echo(), SECONDS, SECONDS)\n"
        "with Listener(listen('127.0.0.1', 0), 1000) as listener, running(server, [listener]) as address:\n"
        "    print(address[1], flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program]
    with (
        subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process,
        ExitStack() as held,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        address = "127.0.0.1", int(process.stdout.readline())
        for _ in range(3):
            for _ in range(100):
                connect(held, address)
            client = connect(held, address)
            client.sendall(head("Content-Length: 2") + b"ab")
            assert answer(client) == b"ab"
        print(file=process.stdin, flush=True)
        assert len(process.stderr.read().splitlines()) < 10
    assert process.returncode == 0


def test_connections_take_half_of_the_descriptors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: Any = SimpleNamespace(now=(1024, 20_000))
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits.now)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: setattr(limits, "now", wanted))
    assert (limit_connections(1000), limits.now) == (1000, (20_000, 20_000))
    limits.now = (256, 1024)
    assert (limit_connections(1000), limits.now) == (512, (1024, 1024))
    limits.now = (1024, resource.RLIM_INFINITY)
    assert limit_connections(1000) == 1000
    assert limits.now == (2**16, resource.RLIM_INFINITY)
