"""Listening sockets, and a limit on their connections that closes those that are waiting for their clients."""

from __future__ import annotations

import errno
import heapq
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address, ip_address
from typing import Any, NamedTuple

from service.api.http.protocol import Connection
from service.api.http.sockets import count_unread_bytes
from service.core.errors import ConfigError

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
# Maximum number of connections that wait to be accepted.
BACKLOG = 2048
# Maximum number of attempts to find a port that is free at several addresses.
MAX_PORT_ATTEMPTS = 10
_MISSING_ADDRESS_ERRORS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
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


class _Address(NamedTuple):
    """Address to listen on.

    family   address family, AF_INET or AF_INET6
    ip       IP address
    details  flow label and scope of an IPv6 address, as in the socket module
    """

    family: int
    ip: str
    details: tuple[Any, ...]


class ConnectionLimiter:
    """Limit on the number of open connections of all listening sockets, applied as asyncio accepts connections.

    If a new connection exceeds the limit, connections that are waiting for their clients are closed, starting with
    those from the address with the most connections, and longest-waiting first. If no connection is waiting, the new
    one is closed. A connection with received but unread bytes is not waiting for its client.

    max_connections   maximum number of connections
    connections       the server's HTTP connections, excluding those that are still in their TLS handshake
    """

    def __init__(self, max_connections: int, connections: Collection[Any] = ()) -> None:
        self._max_connections, self.connections = max_connections, connections
        # Accepted connections by file descriptor. A closed connection is replaced when its descriptor is reused.
        self._accepted_connections: dict[int, _AcceptedConnection] = {}
        self._has_evicted_connections = False
        # Number of connections closed since the last log message, the time of that message, and the time at which the
        # system last ran out of resources.
        self._closed_count, self._logged_at, self._exhausted_at = 0, -LOG_INTERVAL_SECONDS, -ACCEPT_RETRY_SECONDS

    def accept(self, accept: Callable[[], tuple[socket.socket, Any]]) -> tuple[socket.socket, Any]:
        """Accept a connection with the function `accept`.

        Raises BlockingIOError or OSError, after which asyncio tries again later.
        """
        if self._has_evicted_connections:
            # asyncio accepts connections in a loop that ends with this error. It then closes the aborted connections
            # before it accepts new ones.
            self._has_evicted_connections = False
            raise BlockingIOError
        try:
            accepted_socket, address = accept()
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


class Listener(socket.socket):
    """Listening socket whose connections count toward a limit.

    listening_socket  listening socket whose descriptor this object takes over
    limiter           limit on the number of connections, which several listening sockets may share
    """

    def __init__(self, listening_socket: socket.socket, limiter: ConnectionLimiter) -> None:
        super().__init__(fileno=listening_socket.detach())
        self.limiter = limiter

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError or OSError, after which asyncio tries again later."""
        return self.limiter.accept(super().accept)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening TCP sockets, with the same port, for all addresses of a host.

    host  IP address, or a name such as `localhost`, which may have an IPv4 and an IPv6 address. `::` stands for all
          addresses of both protocols, and `0.0.0.0` for all IPv4 addresses.
    port  port; 0 selects a port that is free at all addresses

    Addresses that this host does not have are skipped, because `localhost` may have an IPv6 address on a host without
    IPv6. Raises ConfigError if none is left, or if another error occurs.
    """
    try:
        addresses = _find_addresses(host)
        # The system chooses a port that is free at the first address, but another program may use it at the second.
        for _ in range(0 if port else MAX_PORT_ATTEMPTS):
            with suppress(OSError):
                return _listen_at(addresses, port)
        return _listen_at(addresses, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"Cannot listen on {host}, port {port}: {error}. Choose another address or port.") from error


def _find_addresses(host: str) -> list[_Address]:
    """Return the addresses of a host. Raises OSError if the name is unknown."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    addresses = [_Address(family, str(address[0]), address[2:]) for family, _, _, _, address in found]
    if any(family == socket.AF_INET6 and ip_address(ip).is_unspecified for family, ip, _ in addresses):
        addresses.append(_Address(socket.AF_INET, str(IPv4Address(0)), ()))
    return list(dict.fromkeys(addresses))


def _listen_at(addresses: Sequence[_Address], port: int) -> list[socket.socket]:
    with ExitStack() as exit_stack:
        sockets: list[socket.socket] = []
        missing_address_error: OSError | None = None
        for family, ip, details in addresses:
            try:
                # An IPv6 socket accepts only IPv6. With one socket for both protocols, IPv4 clients would have
                # addresses such as ::ffff:127.0.0.1, which would have to be recognized as loopback addresses.
                listener = socket.create_server((ip, port, *details), family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno not in _MISSING_ADDRESS_ERRORS:
                    raise
                missing_address_error = error
                continue
            sockets.append(exit_stack.enter_context(listener))
            port = listener.getsockname()[1]
        if not sockets and missing_address_error is not None:
            raise missing_address_error
        exit_stack.pop_all()
        return sockets


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
