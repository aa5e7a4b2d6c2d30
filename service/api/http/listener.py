"""A listening socket that limits the number of connections, by closing those that wait for their clients."""

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

# More descriptors than this are not asked for: some libraries walk through all that there may be.
MAX_DESCRIPTORS = 2**16
# The most connections, and an eighth of all, that make room at a time: not every new one shall look at all.
MAX_BATCH = 32
# Seconds in which a connection that waits for its client is closed last.
FRESH_SECONDS = 1.0
# Seconds between two lines in the log about connections that had to be closed.
LOG_SECONDS = 60.0
# What asyncio waits for until it accepts again, where the system has no descriptor or memory left.
ACCEPT_RETRY_SECONDS = 1.0
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _Accepted(NamedTuple):
    """A connection from its acceptance on, before a TLS handshake too."""

    socket: socket.socket
    address: str
    since: float

    def close(self) -> None:
        """End both sides; whoever reads or writes finds out, and closes the socket."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """A listening socket whose connections are counted as asyncio accepts them.

    At the limit, connections that wait for their clients are closed for new ones, those of the address that has the
    most first, and of these the one that waits longest. Where none waits, the new one is closed. Who has sent something
    that was not read yet is not waited for.

    listening    the socket, which this takes over
    limit        of connections
    connections  of the server, those that have begun to speak HTTP
    """

    def __init__(self, listening: socket.socket, limit: int, connections: Collection[Any] = ()) -> None:
        super().__init__(fileno=listening.detach())
        self._limit, self.connections = limit, connections
        # By file descriptor, so that a closed connection goes at the latest when its number is given again.
        self._accepted: dict[int, _Accepted] = {}
        self._made_room = False
        # Since the last line in the log; when that was, and when the system had no resources last.
        self._closed, self._logged, self._out_of_resources = 0, -LOG_SECONDS, -ACCEPT_RETRY_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises BlockingIOError and OSError to have asyncio try again later."""
        if self._made_room:
            # asyncio accepts until there is nothing more. First it shall close what was aborted.
            self._made_room = False
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                self._wait_for_resources()
            raise
        if len(self._accepted) >= self._limit and len(self._open()) >= self._limit:
            self._made_room = self._make_room()
            if not self._made_room:
                accepted.close()
                # Newer versions of asyncio would accept again at once after ConnectionAbortedError.
                raise BlockingIOError
        self._accepted[accepted.fileno()] = _Accepted(accepted, str(address[0]), time.monotonic())
        return accepted, address

    def close_silent(self, seconds: float) -> None:
        """Close connections that have been in a TLS handshake for so long."""
        spoken = {connection.fileno() for connection in self.connections}
        for descriptor, accepted in self._open().items():
            if descriptor not in spoken and time.monotonic() - accepted.since >= seconds:
                accepted.close()

    def _open(self) -> dict[int, _Accepted]:
        """Forget connections that were closed, and return the others."""
        opened = self._accepted.items()
        self._accepted = {number: accepted for number, accepted in opened if accepted.socket.fileno() == number}
        return self._accepted

    def _wait_for_resources(self) -> None:
        """Make room where files, not connections, have taken all descriptors; return where asyncio shall wait instead.

        asyncio goes on accepting after such an error, with an entry in the log for each, and then waits. Raises
        BlockingIOError to end that.
        """
        now = time.monotonic()
        self._open()
        if self._make_room() or now - self._out_of_resources < ACCEPT_RETRY_SECONDS:
            raise BlockingIOError
        self._out_of_resources = now

    def _make_room(self) -> bool:
        """Abort connections that wait for their clients; return whether there were any."""
        spoken = {connection.fileno(): connection for connection in self.connections}
        number = len(self._accepted)
        victims = heapq.nsmallest(min(MAX_BATCH, number // 8 or 1), self._waiting(spoken))
        for *_, descriptor in victims:
            accepted = self._accepted.pop(descriptor)
            if descriptor in spoken:
                spoken[descriptor].transport.abort()
            else:
                accepted.close()
        self._closed += max(1, len(victims))
        if time.monotonic() - self._logged >= LOG_SECONDS:
            limits = "server.connections, or the limit of open files"
            log.warning("%d connections are all that may be (%s): %d were closed", number, limits, self._closed)
            self._closed, self._logged = 0, time.monotonic()
        return bool(victims)

    def _waiting(self, spoken: Mapping[int, Connection]) -> Iterator[tuple[int, int, float, int]]:
        """Yield connections that may be closed: what decides about their order, and the descriptor."""
        numbers = Counter(accepted.address for accepted in self._accepted.values())
        for descriptor, accepted in self._accepted.items():
            state = spoken[descriptor].dispensable if descriptor in spoken else (False, accepted.since)
            if state is not None and not count_unread(accepted.socket):
                cuts_answer, since = state
                # A new connection shall come to speak, however many stream answers.
                rank = 1 if cuts_answer else 2 * (time.monotonic() - since < FRESH_SECONDS)
                yield rank, -numbers[accepted.address], since, descriptor


def limit_connections(wanted: int) -> int:
    """Raise the limit of open files, and return how many of `wanted` connections may be open: half of it at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    limit = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 2)
    if limit < wanted:
        log.warning("At most %d connections: the limit of open files is %d, of which requests need some", limit, soft)
    return limit
