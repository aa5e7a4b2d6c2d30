"""Run the service with uvicorn: configuration, listening sockets, and graceful shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from service.api.access.path_prefix import ForwardedHeaders
from service.api.app import create_app
from service.api.http.data_rate import SlowClientLimits
from service.api.http.listener import ConnectionLimiter, Listener, listen, raise_open_file_limit
from service.api.http.protocol import Connection
from service.core.config import Settings
from service.core.errors import ConfigError
from service.serving.runtime import Runtime

log = logging.getLogger(__name__)

# The option M_ARENA_MAX in glibc's malloc.h.
_M_ARENA_MAX = -8
# Number of new objects after which Python's garbage collector runs. A request creates thousands of objects and hardly
# any reference cycles, so collecting at the default threshold would waste time.
GC_THRESHOLD_OBJECTS = 50_000
# At shutdown, uploads that stall for longer than this are aborted.
STALLED_UPLOAD_SECONDS = 5.0
# Interval between checks of the remaining connections during shutdown.
POLL_SECONDS = 0.1
# Number of iterations of uvicorn's main loop per second.
TICKS_PER_SECOND = 10


class Server(uvicorn.Server):
    """A uvicorn server that closes the connections of slow clients and finishes accepted work before it stops."""

    def __init__(
        self, config: uvicorn.Config, runtime: Runtime, stalled_seconds: float = STALLED_UPLOAD_SECONDS
    ) -> None:
        super().__init__(config)
        self._runtime, self._stalled_seconds = runtime, stalled_seconds
        self.client_limits = SlowClientLimits(bytes_per_second=runtime.settings.limits.bytes_per_second)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets. Their `ConnectionLimiter` closes connections of this server if it has too many."""
        self._limiters = {listener.limiter for listener in sockets or () if isinstance(listener, Listener)}
        for limiter in self._limiters:
            limiter.connections = self.server_state.connections
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Close the connections of slow clients once per second. Return whether to shut down."""
        if counter % TICKS_PER_SECOND == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_too_slow(self.client_limits)
            for limiter in self._limiters:
                limiter.close_stalled_handshakes(self.client_limits.head_seconds)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT: refuse new work, and complete accepted work within `server.drain_seconds`.

        SIGINT during the shutdown ends the process immediately. Its files remain in a consistent state, as after a
        crash, and the next start deletes temporary ones. Cancelling the requests instead would log a traceback of each.
        """
        if self.should_exit and sig == signal.SIGINT:
            log.warning("interrupted again: stopping without finishing the accepted work")
            logging.shutdown()
            os._exit(128 + sig)
        self._runtime.drain()
        super().handle_exit(sig, frame)

    def drain(self, *_signal: object) -> None:
        """Refuse new work, and stop once the accepted work is complete."""
        self._runtime.drain()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections, then wait for running requests and for uploads that make progress.

        New connections are still accepted during this time. Health checks are answered, and new work is refused with
        status 503.
        """
        deadline = time.monotonic() + self._runtime.settings.server.drain_seconds
        await self._wait_for_open_requests(deadline)
        for server in self.servers:
            server.close()
        # If the list were not empty, uvicorn would wait for incomplete TLS handshakes in Python 3.12 and later.
        self.servers = []
        close_task = asyncio.create_task(self._close_stalled_uploads(deadline))
        try:
            await super().shutdown(sockets)
        finally:
            close_task.cancel()

    async def _wait_for_open_requests(self, deadline: float) -> None:
        """Wait until all open connections are closed and no work is running, or until the deadline."""
        open_connections = {
            connection for connection in self.server_state.connections if isinstance(connection, Connection)
        }
        while time.monotonic() < deadline:
            open_connections &= self.server_state.connections
            for connection in open_connections:
                connection.close_if_stalled(self._stalled_seconds)
            if not open_connections and not self._runtime.is_busy:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _close_stalled_uploads(self, deadline: float) -> None:
        """Close idle connections and stalled uploads until cancelled. After the deadline, close all uploads."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_stalled(self._stalled_seconds if time.monotonic() < deadline else 0)


def serve(settings: Settings, host: str, port: int) -> bool:
    """Print the URLs of the service, and serve requests until a signal arrives.

    Return False if a thread was still running after shutdown. Raises ConfigError.
    """
    _limit_malloc_arenas()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, *gc.get_threshold()[1:])
    app = create_app(settings)
    # Build the routes and the OpenAPI document now, not during the first request. FastAPI changes Python's warning
    # filters while building them, which is unsafe if a thread that loads models changes the filters at the same time.
    app.openapi()
    runtime: Runtime = app.state.runtime
    config = build_config(
        app,
        ssl_keyfile=settings.server.ssl_keyfile,
        ssl_certfile=settings.server.ssl_certfile,
        # The runtime itself cancels and answers requests in time. This timeout is only for requests that still hang.
        timeout_keep_alive=settings.server.keep_alive_seconds,
        timeout_graceful_shutdown=round(settings.server.drain_seconds) + 5,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(
            f"The TLS key (server.ssl_keyfile) or certificate (server.ssl_certfile) cannot be loaded: {error}."
        ) from error
    limiter = ConnectionLimiter(raise_open_file_limit(settings.server.connections))
    with ExitStack() as exit_stack:
        listeners = [exit_stack.enter_context(Listener(listener, limiter)) for listener in listen(host, port)]
        server = Server(config, runtime)
        # Handle signals that arrive before uvicorn installs its own handlers. After its shutdown, uvicorn raises a
        # captured signal again. With the default handlers, that signal would kill the process after a clean shutdown.
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, server.drain)
        urls = " and ".join(format_url(listener, is_secure=config.is_ssl) for listener in listeners)
        sys.stdout.write(f"StackSeg listens on {urls}\n")
        sys.stdout.flush()
        server.run(sockets=[*listeners])
    return runtime.devices.has_ended


def build_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of an application. `options` are passed to `uvicorn.Config`."""
    return uvicorn.Config(
        ForwardedHeaders(app),
        proxy_headers=False,
        http=Connection,
        ws="none",
        # uvloop, the alternative, would not call `Listener.accept`.
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        **options,
    )


def _limit_malloc_arenas() -> None:
    """Limit glibc's malloc to two arenas for all threads.

    Otherwise, each of the many threads would get its own arena, and the memory of the process would grow for hours.
    """
    # Other C libraries have neither this function nor arenas.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def format_url(listener: socket.socket, *, is_secure: bool = False) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
