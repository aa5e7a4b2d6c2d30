"""A listening socket that limits the descriptor of connections by closing those that are waiting for their clients."""

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
from service.api.http.sockets import count_unread

log = logging.getLogger(__name__)

# Upper limit for raising the limit of open files. Some libraries iterate over all possible descriptors.
MAX_DESCRIPTORS = 2**16
# Number of connections closed at a time: at most this many, and at most an eighth of all connections. Closing several
# at a time avoids a scan of all connections for every new one.
MAX_EVICTED_CONNECTIONS = 32
# Waiting connections younger than this are closed last.
NEW_CONNECTION_SECONDS = 1.0
# Minimum interval between log messages about closed connections.
LOG_INTERVAL_SECONDS = 60.0
# Delay before asyncio accepts connections again after the system ran out of descriptors or memory.
ACCEPT_RETRY_SECONDS = 1.0
_RESOURCE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _AcceptedConnection(NamedTuple):
    """An accepted connection, possibly still in its TLS handshake."""

    socket: socket.socket
    address: str
    accepted_at: float

    def close(self) -> None:
        """Shut down both directions. The owner of the socket notices and closes it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """A listening socket that limits the descriptor of open connections as asyncio accepts them.

    If a new connection exceeds the limit, connections that are waiting for their clients are closed. The address with
    the most connections loses connections first, starting with the one that has been waiting longest. If no connection
    is waiting, the new one is closed. A connection with received but unread bytes is not waiting for its client.

    listening    listening socket, whose descriptor this object takes over
    limit        maximum descriptor of connections
    connections  connections of the server that have reached the HTTP protocol (after any TLS handshake)
    """

    def __init__(self, listening: socket.socket, limit: int, connections: Collection[Any] = ()) -> None:
        super().__init__(fileno=listening.detach())
        self._limit, self.connections = limit, connections
        # By file descriptor: a closed connection is replaced, at the latest, when its descriptor is reused.
        self._accepted: dict[int, _AcceptedConnection] = {}
        self._has_evicted = False
        # Number of connections closed since the last log message, the time of that message, and the last time that the
        # system ran out of resources.
        self._closed_count, self._logged_at, self._exhausted_at = 0, -LOG_INTERVAL_SECONDS, -ACCEPT_RETRY_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError or OSError to make asyncio try again later."""
        if self._has_evicted:
            # asyncio accepts in a loop until this error. Interrupt it so that it closes the aborted connections first.
            self._has_evicted = False
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:
                self._wait_for_resources()
            raise
        if len(self._accepted) >= self._limit and len(self._prune_closed()) >= self._limit:
            self._has_evicted = self._evict_connections()
            if not self._has_evicted:
                accepted.close()
                # After ConnectionAbortedError, newer versions of asyncio would accept again immediately.
                raise BlockingIOError
        self._accepted[accepted.fileno()] = _AcceptedConnection(accepted, str(address[0]), time.monotonic())
        return accepted, address

    def close_stalled_handshakes(self, seconds: float) -> None:
        """Close connections whose TLS handshake has taken at least `seconds`."""
        with_http = {connection.fileno() for connection in self.connections}
        for descriptor, accepted in self._prune_closed().items():
            if descriptor not in with_http and time.monotonic() - accepted.accepted_at >= seconds:
                accepted.close()

    def _prune_closed(self) -> dict[int, _AcceptedConnection]:
        """Remove closed connections. Return the open ones by descriptor."""
        connections = self._accepted.items()
        self._accepted = {
            descriptor: accepted for descriptor, accepted in connections if accepted.socket.fileno() == descriptor
        }
        return self._accepted

    def _wait_for_resources(self) -> None:
        """Close connections when the process has run out of descriptors or memory.

        asyncio logs such an error, continues accepting, and then waits before the next round. Raises BlockingIOError to
        stop it from accepting. Returns normally at most once per `ACCEPT_RETRY_SECONDS`, to let asyncio wait.
        """
        now = time.monotonic()
        self._prune_closed()
        if self._evict_connections() or now - self._exhausted_at < ACCEPT_RETRY_SECONDS:
            raise BlockingIOError
        self._exhausted_at = now

    def _evict_connections(self) -> bool:
        """Close connections that are waiting for their clients. Return whether there were any."""
        with_http = {connection.fileno(): connection for connection in self.connections}
        count = len(self._accepted)
        evicted = heapq.nsmallest(min(MAX_EVICTED_CONNECTIONS, count // 8 or 1), self._rank_evictable(with_http))
        for *_, descriptor in evicted:
            accepted = self._accepted.pop(descriptor)
            if descriptor in with_http:
                with_http[descriptor].transport.abort()
            else:
                accepted.close()
        self._closed_count += max(1, len(evicted))
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_SECONDS:
            limits = "server.connections, or the limit of open files"
            log.warning(
                "Limit of %d connections reached (%s); %d connections closed", count, limits, self._closed_count
            )
            self._closed_count, self._logged_at = 0, time.monotonic()
        return bool(evicted)

    def _rank_evictable(self, with_http: Mapping[int, Connection]) -> Iterator[tuple[int, int, float, int]]:
        """Yield a sort key and the descriptor of each connection that may be closed."""
        counts = Counter(accepted.address for accepted in self._accepted.values())
        for descriptor, accepted in self._accepted.items():
            state = with_http[descriptor].eviction_state if descriptor in with_http else (False, accepted.accepted_at)
            if state is not None and not count_unread(accepted.socket):
                interrupts_response, waiting_since = state
                # Protect new connections more than running responses, so that they can send their first request.
                rank = 1 if interrupts_response else 2 * (time.monotonic() - waiting_since < NEW_CONNECTION_SECONDS)
                yield rank, -counts[accepted.address], waiting_since, descriptor


def limit_connections(requested: int) -> int:
    """Raise the limit of open files. Return the descriptor of connections to allow, at most half of that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    limit = requested if soft == resource.RLIM_INFINITY else min(requested, soft // 2)
    if limit < requested:
        log.warning(
            "Only %d connections are allowed: the limit of open files is %d, and requests need some", limit, soft
        )
    return limit
