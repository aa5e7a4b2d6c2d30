"""Times and rates that clients must keep, and what the system knows about the bytes of a connection."""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import struct
import sys
import termios
from typing import NamedTuple

# Of Linux's struct tcp_info: where the number of bytes lies that the other side's system has confirmed.
_BYTES_ACKED = struct.Struct("120xQ")
# Seconds of silence after which the system asks that of a client, which forgets a connection a minute after its end.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 15}


class Patience(NamedTuple):
    """Limits of the time that clients are waited for.

    head_seconds      for a TLS handshake, and for a whole head after the connection or the previous answer
    bytes_per_second  of a body that is awaited, and of an answer that is sent
    window_seconds    over which these are averaged
    """

    head_seconds: float = 20.0
    bytes_per_second: float = 4096
    window_seconds: float = 30.0


class DataRate:
    """Bytes that have moved since the beginning of a window of time."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._moved, self._owed = 0, math.inf

    def reset(self) -> None:
        """Begin the next window with the next look."""
        self._began = None

    def is_too_low(self, patience: Patience, now: float, moved: int | None, owed: float = math.inf) -> bool:
        """Return whether a window has ended in which too little has moved; the next one begins then.

        `moved` counts all bytes so far; None where that is not known. Who had less to move, `owed` bytes at the
        beginning, must have moved those.
        """
        if moved is None:
            return False
        if self._began is None:
            self._began, self._moved, self._owed = now, moved, owed
        if now - self._began < patience.window_seconds:
            return False
        wanted = min(patience.bytes_per_second * patience.window_seconds, self._owed)
        slow = moved - self._moved < wanted
        self._began, self._moved, self._owed = now, moved, owed
        return slow


def count_unsent(transport: asyncio.Transport) -> int:
    """Count written bytes that may not have reached the client; 1 where the system does not tell.

    A TLS transport does not tell what waits in the transport beneath it, but while anything does, the socket has unsent
    bytes too.
    """
    waiting, connection = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    try:
        if connection is not None:
            waiting += int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # The system does not tell, or the socket was closed.
        connection = None
    return max(waiting, 1) if connection is None else waiting


def count_unread(connection: socket.socket) -> int:
    """Count bytes that have come from the client and lie in the system's buffer; 0 where it does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


def count_acknowledged(transport: asyncio.Transport) -> int | None:
    """Count bytes that have reached the client's system; None where this one does not tell."""
    connection = transport.get_extra_info("socket")
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        (number,) = _BYTES_ACKED.unpack(info)
    except (OSError, AttributeError, struct.error):
        return None
    # Zero as well where it is not counted: no client confirms nothing, be it slow.
    return int(number) or None


def keep_alive(connection: socket.socket) -> None:
    """Have the system ask whether a silent client is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
