"""Listening socket that limits the number of connections by closing those that are waiting for their clients."""

from __future__ import annotations

import errno
import heapq
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from service.api.http.protocol import Connection
from service.api.http.sockets import count_unread_bytes

log = logging.getLogger(__name__)

# The limit on open files is raised to at most this value, because some libraries iterate over all possible descriptors.
MAX_DESCRIPTORS = 2**16
# Maximum number of connections closed at a time, which is also limited to an eighth of all connections. Closing several
# connections at a time avoids a scan of all connections for every new one.
MAX_EVICTED_CONNECTIONS = 32
# Among waiting connections, those that have waited for less than this time are closed last.
NEW_CONNECTION_SECONDS = 1.0
# Minimum interval between log messages about closed connections.
LOG_INTERVAL_SECONDS = 60.0
# Time for which asyncio stops accepting connections after the system has run out of descriptors or memory.
ACCEPT_RETRY_SECONDS = 1.0
_RESOURCE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _AcceptedConnection(NamedTuple):
    """An accepted connection, possibly still in its TLS handshake."""

    socket: socket.socket
    address: str
    accepted_at: float

    def close(self) -> None:
        """Shut down both directions. The transport that owns the socket detects this and closes the socket."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """Listening socket that limits the number of open connections as asyncio accepts them.

    If a new connection exceeds the limit, connections that are waiting for their clients are closed, starting with
    those from the address with the most connections, and longest-waiting first. If no connection is waiting, the new
    one is closed. A connection with received but unread bytes is not waiting for its client.

    listening_socket  listening socket whose descriptor this object takes over
    max_connections   maximum number of connections
    connections       the server's HTTP connections, excluding those that are still in their TLS handshake
    """

    def __init__(
        self, listening_socket: socket.socket, max_connections: int, connections: Collection[Any] = ()
    ) -> None:
        super().__init__(fileno=listening_socket.detach())
        self._max_connections, self.connections = max_connections, connections
        # Accepted connections by file descriptor. A closed connection is replaced when its descriptor is reused.
        self._accepted_connections: dict[int, _AcceptedConnection] = {}
        self._has_evicted_connections = False
        # Number of connections closed since the last log message, the time of that message, and the time at which the
        # system last ran out of resources.
        self._closed_count, self._logged_at, self._exhausted_at = 0, -LOG_INTERVAL_SECONDS, -ACCEPT_RETRY_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError or OSError, after which asyncio tries again later."""
        if self._has_evicted_connections:
            # asyncio accepts connections in a loop that ends with this error. It then closes the aborted connections
            # before it accepts new ones.
            self._has_evicted_connections = False
            raise BlockingIOError
        try:
            accepted_socket, address = super().accept()
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:
                self._handle_resource_exhaustion()
            raise
        if (
            len(self._accepted_connections) >= self._max_connections
            and len(self._prune_closed_connections()) >= self._max_connections
        ):
            self._has_evicted_connections = self._evict_connections()
            if not self._has_evicted_connections:
                accepted_socket.close()
                # After a ConnectionAbortedError, newer versions of asyncio would accept again immediately.
                raise BlockingIOError
        self._accepted_connections[accepted_socket.fileno()] = _AcceptedConnection(
            accepted_socket, str(address[0]), time.monotonic()
        )
        return accepted_socket, address

    def close_stalled_handshakes(self, seconds: float) -> None:
        """Close connections whose TLS handshake has not been completed within `seconds`."""
        http_descriptors = {connection.fileno() for connection in self.connections}
        for descriptor, connection in self._prune_closed_connections().items():
            if descriptor not in http_descriptors and time.monotonic() - connection.accepted_at >= seconds:
                connection.close()

    def _prune_closed_connections(self) -> dict[int, _AcceptedConnection]:
        """Remove closed connections from the accepted ones. Return the open connections by descriptor."""
        connections = self._accepted_connections.items()
        self._accepted_connections = {
            descriptor: connection for descriptor, connection in connections if connection.socket.fileno() == descriptor
        }
        return self._accepted_connections

    def _handle_resource_exhaustion(self) -> None:
        """Close connections when the process has run out of descriptors or memory.

        Raises BlockingIOError to end the loop in which asyncio accepts connections. Returns normally at most once per
        `ACCEPT_RETRY_SECONDS`. The caller then raises the original error again, which asyncio logs before it waits.
        """
        now = time.monotonic()
        self._prune_closed_connections()
        if self._evict_connections() or now - self._exhausted_at < ACCEPT_RETRY_SECONDS:
            raise BlockingIOError
        self._exhausted_at = now

    def _evict_connections(self) -> bool:
        """Close connections that are waiting for their clients. Return whether there were any."""
        http_connections = {connection.fileno(): connection for connection in self.connections}
        connection_count = len(self._accepted_connections)
        evicted_entries = heapq.nsmallest(
            min(MAX_EVICTED_CONNECTIONS, connection_count // 8 or 1), self._rank_evictable_connections(http_connections)
        )
        for *_, descriptor in evicted_entries:
            connection = self._accepted_connections.pop(descriptor)
            if descriptor in http_connections:
                http_connections[descriptor].transport.abort()
            else:
                connection.close()
        self._closed_count += max(1, len(evicted_entries))
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_SECONDS:
            limit_names = "server.connections, or the limit on open files"
            log.warning(
                "Limit of %d connections reached (%s); %d connections closed",
                connection_count,
                limit_names,
                self._closed_count,
            )
            self._closed_count, self._logged_at = 0, time.monotonic()
        return bool(evicted_entries)

    def _rank_evictable_connections(
        self, http_connections: Mapping[int, Connection]
    ) -> Iterator[tuple[int, int, float, int]]:
        """Yield a tuple for each connection that may be closed: its sort key, followed by its descriptor."""
        connection_counts = Counter(connection.address for connection in self._accepted_connections.values())
        for descriptor, connection in self._accepted_connections.items():
            state = (
                http_connections[descriptor].eviction_state
                if descriptor in http_connections
                else (False, connection.accepted_at)
            )
            if state is not None and not count_unread_bytes(connection.socket):
                interrupts_response, waiting_since = state
                # Rank new connections after those with a response in progress, so that new clients can send their first
                # request.
                rank = 1 if interrupts_response else 2 * (time.monotonic() - waiting_since < NEW_CONNECTION_SECONDS)
                yield rank, -connection_counts[connection.address], waiting_since, descriptor


def raise_open_file_limit(requested_count: int) -> int:
    """Raise the limit on open files. Return the number of connections to allow, at most half of that limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target_limit = MAX_DESCRIPTORS if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MAX_DESCRIPTORS)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target_limit, hard_limit))
        soft_limit = target_limit
    max_connections = requested_count if soft_limit == resource.RLIM_INFINITY else min(requested_count, soft_limit // 2)
    if max_connections < requested_count:
        log.warning(
            "Only %d connections are allowed, because the limit on open files is %d", max_connections, soft_limit
        )
    return max_connections
