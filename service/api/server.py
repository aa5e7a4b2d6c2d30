"""The process that serves: sockets, uvicorn, and draining."""

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
from service.api.http_protocol import Connection
from service.core.config import Settings
from service.core.errors import ConfigError
from service.serving.runtime import Runtime

# From glibc's malloc.h.
_M_ARENA_MAX = -8
# So many new objects before Python looks for cycles among them: a request makes thousands, and hardly any.
YOUNG_OBJECTS = 50_000
# While the service stops: how long nothing may come of an upload, and how often that is looked at.
STALLED_SECONDS = 5.0
LOOK_SECONDS = 0.5


class Server(uvicorn.Server):
    """A uvicorn server that stops being ready as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, stalled_seconds: float = STALLED_SECONDS) -> None:
        super().__init__(config)
        self._runtime, self._stalled_seconds = runtime, stalled_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: finish what was begun within the time to drain, accept nothing new."""
        self._runtime.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is idle, wait for answers that are owed, and for bodies as long as they arrive."""
        for server in self.servers:
            server.close()
        # Since Python 3.12 they would be waited for until clients that began no more than TLS have ended that.
        self.servers = []
        giving_up = asyncio.create_task(self._give_up_uploads())
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()

    async def _give_up_uploads(self) -> None:
        """Those that stall, all once the time to drain is over, and what was accepted at the last moment."""
        over = time.monotonic() + self._runtime.settings.server.drain_seconds
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.give_up(self._stalled_seconds if time.monotonic() < over else 0)


def serve(settings: Settings, host: str, port: int) -> bool:
    """Serve until a signal ends it; prints the address. False if a thread would not end. Raises ConfigError."""
    _share_freed_memory()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    config = configured(
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
    with listen(host, port) as listener:
        # uvicorn raises the signal once more when it has shut down, which would turn a clean end into a killed process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: None)
        sys.stdout.write(f"StackSeg listens on {address_of(listener, secure=config.is_ssl)}\n")
        sys.stdout.flush()
        Server(config, runtime).run(sockets=[listener])
    return runtime.ended


def configured(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """How the application is served; `more` as uvicorn has it."""
    return uvicorn.Config(
        app, http=Connection, ws="none", log_config=None, access_log=False, server_header=False, **more
    )


def _share_freed_memory() -> None:
    """Let all threads take from what any of them has freed.

    The C library otherwise keeps a pool for each of many threads, and the process grows for hours until all are full.
    """
    # Other C libraries have no such function, and no such pools.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"Cannot listen on {host}, port {port}: {error}.") from error


def address_of(listener: socket.socket, *, secure: bool = False) -> str:
    """The address to type into a browser."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
