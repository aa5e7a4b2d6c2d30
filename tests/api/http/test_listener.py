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
from fakes import wait_until
from sockets import (
    TIMEOUT_SECONDS,
    EchoApp,
    GatedApp,
    create_certificate,
    make_request_head,
    make_server,
    needs_openssl,
    read_response_body,
    run_server,
)

from service.api.http.data_rate import SlowClientLimits
from service.api.http.listener import (
    LOG_INTERVAL_SECONDS,
    NEW_CONNECTION_SECONDS,
    ConnectionLimiter,
    Listener,
    listen,
    raise_open_file_limit,
)
from service.api.server import Server
from service.core.errors import ConfigError

LIMIT = 8


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


def make_listener(limit: int) -> Listener:
    """Listen on a free port, with a limit on the number of connections."""
    (listening_socket,) = listen("127.0.0.1", 0)
    return Listener(listening_socket, ConnectionLimiter(limit))


@contextmanager
def limited_server(app: Any, **options: Any) -> Iterator[tuple[Server, tuple[str, int]]]:
    """Run a server that allows at most `LIMIT` connections."""
    server = make_server(app, TIMEOUT_SECONDS, TIMEOUT_SECONDS, **options)
    with make_listener(LIMIT) as listener, run_server(server, [listener]):
        yield server, listener.getsockname()


def connect(exit_stack: ExitStack, address: tuple[str, int]) -> socket.socket:
    """Open a connection that is closed with `exit_stack`."""
    return exit_stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS))


def is_closed(client: socket.socket) -> bool:
    """Return whether the server has closed a connection."""
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_idle_connections_are_closed_for_new_ones_starting_with_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), limited_server(EchoApp()) as (server, address), ExitStack() as exit_stack:
        clients = [connect(exit_stack, address) for _ in range(LIMIT)]
        wait_until(lambda: len(server.server_state.connections) == LIMIT, TIMEOUT_SECONDS)
        for _ in range(3):
            clients += [connect(exit_stack, address) for _ in range(LIMIT)]
            busy = connect(exit_stack, address)
            busy.sendall(make_request_head("Content-Length: 2") + b"ab")
            assert read_response_body(busy) == b"ab"
        assert all(is_closed(client) for client in clients[:LIMIT])
        wait_until(lambda: len(server.server_state.connections) <= LIMIT, TIMEOUT_SECONDS)
    lines = [record for record in caplog.records if "server.connections" in record.getMessage()]
    assert len(lines) == 1
    assert LOG_INTERVAL_SECONDS > TIMEOUT_SECONDS


@needs_ipv6
def test_listening_sockets_share_the_limit() -> None:
    limiter = ConnectionLimiter(LIMIT)
    server = make_server(EchoApp(), TIMEOUT_SECONDS, TIMEOUT_SECONDS)
    with ExitStack() as exit_stack:
        listeners = [exit_stack.enter_context(Listener(listening, limiter)) for listening in listen("::", 0)]
        exit_stack.enter_context(run_server(server, [*listeners]))
        addresses = [(host, listeners[0].getsockname()[1]) for host in ("::1", "127.0.0.1")]
        clients = [connect(exit_stack, address) for address in addresses for _ in range(LIMIT)]
        wait_until(lambda: sum(is_closed(client) for client in clients) >= LIMIT, TIMEOUT_SECONDS)
        assert not is_closed(clients[-1])


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "reachable"),
    [
        ("::", ["::1", "127.0.0.1"]),
        ("::0", ["::1", "127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_host_determines_the_protocols(host: str, reachable: list[str]) -> None:
    with ExitStack() as exit_stack:
        sockets = [exit_stack.enter_context(listener) for listener in listen(host, 0)]
        assert {listener.getsockname()[1] for listener in sockets} == {port := sockets[0].getsockname()[1]}
        for address in ("::1", "127.0.0.1"):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as client:
                assert (client.connect_ex((address, port)) == 0) == (address in reachable)


def test_name_stands_for_the_addresses_that_this_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may have an IPv6 address although the host has no IPv6; 192.0.2.1 is reserved for documentation."""
    addresses = {"localhost": ["192.0.2.1", "127.0.0.1"], "elsewhere": ["192.0.2.1"]}

    def resolve(host: str, port: int, **_options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    (listener,) = listen("localhost", 0)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="Cannot listen on elsewhere"):
        listen("elsewhere", 0)


@needs_ipv6
def test_port_in_use_at_one_of_the_addresses_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Cannot listen on ::, port {port}"):
            listen("::", port)
        with socket.socket(socket.AF_INET6) as client:
            assert client.connect_ex(("::1", port)) != 0, "the other socket is closed"


def test_connections_with_incomplete_requests_are_closed_but_not_those_with_running_requests() -> None:
    gated = GatedApp()
    with limited_server(gated) as (_, address), ExitStack() as exit_stack:
        working = connect(exit_stack, address)
        working.sendall(make_request_head())
        wait_until(lambda: gated.request_count == 1, TIMEOUT_SECONDS)
        stalled = [connect(exit_stack, address) for _ in range(LIMIT - 1)]
        for index, client in enumerate(stalled):
            client.sendall(make_request_head("Content-Length: 9") + b"half" if index % 2 else b"GET / HT")
        wait_until(lambda: gated.request_count == 1 + len(stalled) // 2, TIMEOUT_SECONDS)
        new = [connect(exit_stack, address) for _ in range(LIMIT)]
        wait_until(lambda: all(is_closed(client) for client in stalled), TIMEOUT_SECONDS)
        assert not is_closed(working)
        working.settimeout(TIMEOUT_SECONDS)
        gated.gate.set()
        assert read_response_body(working) == b"ok"
        new[-1].sendall(make_request_head())
        assert read_response_body(new[-1]) == b"ok"


def test_new_connection_is_closed_if_all_others_have_running_requests() -> None:
    gated = GatedApp()
    with limited_server(gated) as (_, address), ExitStack() as exit_stack:
        clients = [connect(exit_stack, address) for _ in range(LIMIT)]
        for client in clients:
            client.sendall(make_request_head())
        wait_until(lambda: gated.request_count == LIMIT, TIMEOUT_SECONDS)
        refused = connect(exit_stack, address)
        wait_until(lambda: is_closed(refused), TIMEOUT_SECONDS)
        gated.gate.set()
        assert [read_response_body(client) for client in clients] == [b"ok"] * LIMIT
        again = connect(exit_stack, address)
        again.sendall(make_request_head())
        assert read_response_body(again) == b"ok"


def test_running_response_is_not_interrupted_while_other_connections_are_idle() -> None:
    content = bytes(2**24)

    async def large(scope: Any, _receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    with limited_server(large) as (server, address), ExitStack() as exit_stack:
        slow = connect(exit_stack, address)
        slow.sendall(make_request_head())
        slow.recv(1, socket.MSG_PEEK)
        idle = [connect(exit_stack, address) for _ in range(LIMIT - 1)]
        wait_until(lambda: len(server.server_state.connections) == LIMIT, TIMEOUT_SECONDS)
        time.sleep(NEW_CONNECTION_SECONDS)
        new = connect(exit_stack, address)
        wait_until(lambda: any(is_closed(client) for client in idle), TIMEOUT_SECONDS)
        assert read_response_body(slow) == content
        assert not is_closed(new)


def test_streaming_responses_are_interrupted_last_and_only_for_get_requests() -> None:
    gated = GatedApp()
    with limited_server(gated) as (_, address), ExitStack() as exit_stack:
        posting, idle = connect(exit_stack, address), connect(exit_stack, address)
        posting.sendall(make_request_head())
        getting = [connect(exit_stack, address) for _ in range(LIMIT - 2)]
        for client in getting:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: gated.request_count == LIMIT - 1, TIMEOUT_SECONDS)
        time.sleep(NEW_CONNECTION_SECONDS)
        first = connect(exit_stack, address)
        wait_until(lambda: is_closed(idle), TIMEOUT_SECONDS)
        first.sendall(make_request_head())
        wait_until(lambda: gated.request_count == LIMIT, TIMEOUT_SECONDS)
        assert not any(is_closed(client) for client in getting)
        second = connect(exit_stack, address)
        wait_until(lambda: sum(is_closed(client) for client in getting) == 1, TIMEOUT_SECONDS)
        second.sendall(make_request_head())
        gated.gate.set()
        for client in (posting, first, second):
            client.settimeout(TIMEOUT_SECONDS)
            assert read_response_body(client) == b"ok"


def test_new_connection_is_preferred_to_streaming_responses_and_its_unread_bytes_protect_it() -> None:
    gated = GatedApp()
    with limited_server(gated) as (_, address), ExitStack() as exit_stack:
        getting = [connect(exit_stack, address) for _ in range(LIMIT)]
        for client in getting:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: gated.request_count == LIMIT, TIMEOUT_SECONDS)
        new = [connect(exit_stack, address) for _ in range(2)]
        wait_until(lambda: sum(is_closed(client) for client in getting) == 2, TIMEOUT_SECONDS)
        gated.gate.set()
        for client in new:
            client.sendall(make_request_head())
            assert read_response_body(client) == b"ok"
    with make_listener(1) as listener, ExitStack() as exit_stack:
        connect(exit_stack, listener.getsockname()).sendall(b"P")
        sent = exit_stack.enter_context(listener.accept()[0])
        refused = connect(exit_stack, listener.getsockname())
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert is_closed(refused)
        assert sent.recv(1) == b"P"


def test_address_with_the_most_connections_loses_connections_first() -> None:
    with limited_server(EchoApp()) as (server, address), ExitStack() as exit_stack:
        oldest = connect(exit_stack, address)
        time.sleep(0.1)
        for _ in range(2 * LIMIT):
            exit_stack.enter_context(
                socket.create_connection(address, TIMEOUT_SECONDS, source_address=("127.0.0.2", 0))
            )
        wait_until(lambda: len(server.server_state.connections) <= LIMIT, TIMEOUT_SECONDS)
        oldest.settimeout(TIMEOUT_SECONDS)
        oldest.sendall(make_request_head("Content-Length: 2") + b"ab")
        assert read_response_body(oldest) == b"ab"


@needs_openssl
def test_stalled_tls_handshakes_are_closed_for_new_connections_and_after_a_timeout(tmp_path: Path) -> None:
    with limited_server(EchoApp(), **create_certificate(tmp_path)) as (server, address), ExitStack() as exit_stack:
        clients = [connect(exit_stack, address) for _ in range(2 * LIMIT)]
        wait_until(lambda: sum(is_closed(client) for client in clients) >= LIMIT, TIMEOUT_SECONDS)
        assert not is_closed(clients[-1])
        server.client_limits = SlowClientLimits(head_seconds=0.5)
        wait_until(lambda: all(is_closed(client) for client in clients), TIMEOUT_SECONDS)


def test_connections_are_accepted_again_after_the_process_ran_out_of_descriptors() -> None:
    """The server runs in a separate process with a low limit on open files."""
    program = (
        "import resource, sys; sys.path[:0] = ['tests', 'tests/api/http']\n"
        "from test_listener import *\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "server = make_server(EchoApp(), TIMEOUT_SECONDS, TIMEOUT_SECONDS)\n"
        "with make_listener(1000) as listener, run_server(server, [listener]) as address:\n"
        "    print(address[1], flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program]
    with (
        subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process,
        ExitStack() as exit_stack,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        address = "127.0.0.1", int(process.stdout.readline())
        for _ in range(3):
            for _ in range(100):
                connect(exit_stack, address)
            client = connect(exit_stack, address)
            client.sendall(make_request_head("Content-Length: 2") + b"ab")
            assert read_response_body(client) == b"ab"
        print(file=process.stdin, flush=True)
        assert len(process.stderr.read().splitlines()) < 10
    assert process.returncode == 0


def test_connections_use_at_most_half_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: Any = SimpleNamespace(now=(1024, 20_000))
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits.now)
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: setattr(limits, "now", values))
    assert (raise_open_file_limit(1000), limits.now) == (1000, (20_000, 20_000))
    limits.now = (256, 1024)
    assert (raise_open_file_limit(1000), limits.now) == (512, (1024, 1024))
    limits.now = (1024, resource.RLIM_INFINITY)
    assert raise_open_file_limit(1000) == 1000
    assert limits.now == (2**16, resource.RLIM_INFINITY)
