"""Run uvicorn: configuration, listening sockets, and draining at a signal."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from service.api.app import create_app
from service.api.http.data_rate import Patience
from service.api.http.listener import Listener, limit_connections
from service.api.http.protocol import Connection
from service.core.config import Settings
from service.core.errors import ConfigError
from service.serving.runtime import Runtime

# From glibc's malloc.h.
_M_ARENA_MAX = -8
# New objects before Python collects cycles among them: a request makes thousands of objects, and hardly a cycle.
YOUNG_OBJECTS = 50_000
# While the service stops: how long an upload may stall, and how often that is checked.
STALLED_SECONDS = 5.0
POLL_SECONDS = 0.1
# Of uvicorn's main loop.
TICKS_PER_SECOND = 10


class Server(uvicorn.Server):
    """A uvicorn server that closes connections of slow clients, and is not ready any more once it is told to end."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, stalled_seconds: float = STALLED_SECONDS) -> None:
        super().__init__(config)
        self._runtime, self._stalled_seconds = runtime, stalled_seconds
        self.patience = Patience(bytes_per_second=runtime.settings.limits.bytes_per_second)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets, which close connections of this server where there are too many."""
        self._listeners = [listener for listener in sockets or () if isinstance(listener, Listener)]
        for listener in self._listeners:
            listener.connections = self.server_state.connections
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Close connections of slow clients once per second, and return whether to shut down."""
        if counter % TICKS_PER_SECOND == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_late(self.patience)
            for listener in self._listeners:
                listener.close_silent(self.patience.head_seconds)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT: accept nothing new, and finish what was begun within the time to drain."""
        self._runtime.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections, wait for answers that are owed, and for bodies as long as they arrive.

        Others are answered meanwhile, with 503 where they bring work: whoever asks for the service's health is told.
        """
        deadline = time.monotonic() + self._runtime.settings.server.drain_seconds
        await self._finish_work(deadline)
        for server in self.servers:
            server.close()
        # Python 3.12 and later would wait for clients that have only begun a TLS handshake.
        self.servers = []
        closing = asyncio.create_task(self._close_stalled_uploads(deadline))
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _finish_work(self, deadline: float) -> None:
        """Wait until connections of before have their answers and nothing is computed, until the deadline at most."""
        before = {connection for connection in self.server_state.connections if isinstance(connection, Connection)}
        while time.monotonic() < deadline and not self.force_exit:
            before &= self.server_state.connections
            for connection in before:
                connection.close_if_stalled(self._stalled_seconds)
            if not before and not self._runtime.busy:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _close_stalled_uploads(self, deadline: float) -> None:
        """Close stalled uploads, all uploads after the time to drain, and connections accepted at the last moment."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_stalled(self._stalled_seconds if time.monotonic() < deadline else 0)


def serve(settings: Settings, host: str, port: int) -> bool:
    """Serve until a signal, and print the address. Return False if a thread would not end. Raises ConfigError."""
    _limit_malloc_arenas()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    app = create_app(settings)
    # FastAPI would build the routes and the document at the first request that needs them, while a thread loads models:
    # what it does there to Python's filters of warnings is not safe beside another thread that does so too.
    app.openapi()
    runtime: Runtime = app.state.runtime
    config = build_config(
        app,
        ssl_keyfile=settings.server.ssl_keyfile,
        ssl_certfile=settings.server.ssl_certfile,
        # The runtime ends requests itself, with an answer; this is for those that then still hang.
        timeout_graceful_shutdown=round(settings.server.drain_seconds) + 5,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"server.ssl_keyfile and server.ssl_certfile cannot be used: {error}.") from error
    limit = limit_connections(settings.server.connections)
    with Listener(listen(host, port), limit) as listener:
        server = Server(config, runtime)
        # A signal before uvicorn listens to signals ends the service as well. uvicorn raises it once more when it has
        # shut down, which would turn a clean end into a killed process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        sys.stdout.write(f"StackSeg listens on {format_address(listener, secure=config.is_ssl)}\n")
        sys.stdout.flush()
        server.run(sockets=[listener])
    return runtime.devices.ended


def build_config(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application; `more` are further arguments of it."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        # `Listener` is asked for connections by asyncio's own loop alone.
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        **more,
    )


def _limit_malloc_arenas() -> None:
    """Let all threads allocate from two arenas of glibc.

    Otherwise glibc keeps an arena for each of many threads, and the process grows for hours until all are full.
    """
    # Other C libraries have neither the function nor the arenas.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"Cannot listen on {host}, port {port}: {error}.") from error


def format_address(listener: socket.socket, *, secure: bool = False) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
