"""The HTTP server of the service with small test applications, and clients that write raw HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fakes import wait_until
from starlette.types import Receive, Scope, Send

from service.api.server import Server, build_config
from service.core.config import Settings

TIMEOUT_SECONDS = 20


class EchoApp:
    """An application that returns the request body and records the sizes of the received chunks in `pieces`."""

    def __init__(self) -> None:
        self.pieces: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            assert isinstance(message["body"], bytes)
            self.pieces.append(len(message["body"]))
            body, more = body + message["body"], message["more_body"]
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def serve_app(app: Any, **more: Any) -> Iterator[tuple[str, int]]:
    """Serve an application with a plain uvicorn server and the configuration of the service. Yield host and port."""
    with run_server(uvicorn.Server(build_config(app, host="127.0.0.1", port=0, lifespan="off", **more))) as address:
        yield address


@contextmanager
def run_server(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> Iterator[tuple[str, int]]:
    """Run a server in a thread until the context exits. Yield host and port."""
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        wait_until(lambda: server.started, TIMEOUT_SECONDS)
        yield server.servers[0].sockets[0].getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join()


def make_server(app: Any, drain_seconds: float, stalled_seconds: float, **more: Any) -> Server:
    """Return a server of the service around another application, with these time limits for the shutdown."""
    settings = Settings.model_validate({"server": {"drain_seconds": drain_seconds}})
    runtime: Any = SimpleNamespace(settings=settings, is_busy=False)
    return Server(build_config(app, host="127.0.0.1", port=0, lifespan="off", **more), runtime, stalled_seconds)


def make_request_head(*headers: str) -> bytes:
    """Return the head of a POST request with these header lines."""
    return "\r\n".join(["POST / HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def read_response_body(client: socket.socket) -> bytes:
    """Read the next response, which must have status 200, and return its body."""
    with client.makefile("rb") as file:
        status, length = file.readline(), 0
        while (line := file.readline().lower()) not in {b"\r\n", b""}:
            length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
        assert status.startswith(b"HTTP/1.1 200"), status
        return file.read(length)


def create_certificate(folder: Path) -> dict[str, str]:
    """Create a private key and a self-signed certificate for localhost. Return their paths as uvicorn options."""
    files = {"ssl_keyfile": str(folder / "key.pem"), "ssl_certfile": str(folder / "certificate.pem")}
    create = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    # Clients that verify the certificate require these extensions.
    extensions = [
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    ]
    command = [*create, *extensions, "-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]]
    subprocess.run(command, check=True, capture_output=True)
    return files


needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed; it creates the certificate"
)


class GatedApp(EchoApp):
    """An application that responds when `gate` is set. It counts requests, and clients that disconnect before."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.request_count, self.disconnect_count = threading.Event(), 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_count += 1
        disconnected = asyncio.ensure_future(self._listen(receive))
        while not self.gate.is_set() and not disconnected.done():
            await asyncio.sleep(0.01)
        disconnected.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnect_count += 1


def read_error(client: socket.socket, status: int = 400) -> tuple[dict[str, str], dict[str, Any]]:
    """Read an error response, after which the server must close the connection. Return its headers and its JSON."""
    response = HTTPResponse(client)
    response.begin()
    content = response.read()
    assert response.status == status
    with suppress(ConnectionResetError):
        assert client.recv(1) == b""
    return {name.lower(): value for name, value in response.getheaders()}, json.loads(content)


@contextmanager
def connect_tls(address: tuple[str, int], files: dict[str, str], **options: Any) -> Iterator[ssl.SSLSocket]:
    """Connect with TLS and verify the certificate. `options` are socket options."""
    context = ssl.create_default_context(cafile=files["ssl_certfile"])
    with socket.socket() as plain:
        for option, value in options.items():
            plain.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
        plain.settimeout(TIMEOUT_SECONDS)
        plain.connect(address)
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            yield client


class ChunkedApp:
    """An application that sends a body in several messages.

    length  the Content-Length header; None: no header
    """

    def __init__(self, *pieces: bytes, length: int | None = None) -> None:
        self.pieces, self.length = pieces, length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = [] if self.length is None else [(b"content-length", str(self.length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index, piece in enumerate(self.pieces):
            more = index + 1 < len(self.pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
