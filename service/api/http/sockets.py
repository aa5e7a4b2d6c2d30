"""Functions that query and configure TCP sockets through the operating system."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios

# The field `tcpi_bytes_acked` in Linux's struct tcp_info: the number of bytes that the client has acknowledged.
_ACKNOWLEDGED_BYTES_FIELD = struct.Struct("120xQ")
# Idle time before TCP keepalive probes, and their interval, in seconds. The operating system of a client that has
# disconnected answers such probes only for about a minute.
_KEEPALIVE_OPTIONS = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 15}


def count_unsent_bytes(transport: asyncio.Transport) -> int:
    """Count written bytes that may not have reached the client. Return at least 1 if the system does not report them.

    A TLS transport does not report the buffer of its underlying transport. However, the socket also has unsent bytes
    while that buffer is not empty.
    """
    unsent_bytes, connection = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    try:
        if connection is not None:
            unsent_bytes += int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # The system does not report the number, or the socket is closed.
        connection = None
    return max(unsent_bytes, 1) if connection is None else unsent_bytes


def count_unread_bytes(connection: socket.socket) -> int:
    """Count bytes from the client in the socket's receive buffer. Return 0 if the system does not report them."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


def count_acknowledged_bytes(transport: asyncio.Transport) -> int | None:
    """Count bytes that the client has acknowledged. Return None if the operating system does not report them."""
    connection = transport.get_extra_info("socket")
    try:
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED_BYTES_FIELD.size)
        (acknowledged_bytes,) = _ACKNOWLEDGED_BYTES_FIELD.unpack(tcp_info)
    except (OSError, AttributeError, struct.error):
        return None
    # Systems that do not count these bytes report 0. A real client, even a slow one, acknowledges at least some bytes.
    return int(acknowledged_bytes) or None


def enable_keepalive(connection: socket.socket) -> None:
    """Enable TCP keepalive, so that the operating system detects clients that have disappeared."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE_OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
