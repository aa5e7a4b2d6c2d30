"""What the operating system knows and does about a connection."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios

# Of Linux's struct tcp_info: where the number of bytes lies that the other side's system has confirmed.
_BYTES_ACKED = struct.Struct("120xQ")
# Seconds of silence after which the system asks that of a client, which forgets a connection a minute after its end.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 15}


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
