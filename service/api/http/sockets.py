"""Queries and settings of TCP sockets that the operating system provides."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios

# Field `tcpi_bytes_acked` of Linux's struct tcp_info: the number of bytes that the client has acknowledged.
_BYTES_ACKED = struct.Struct("120xQ")
# Idle time and interval of TCP keepalive probes, in seconds. A client forgets a closed connection after about a minute.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 15}


def count_unsent(transport: asyncio.Transport) -> int:
    """Count written bytes that may not have reached the client; at least 1 if the system does not report them.

    A TLS transport does not report the buffer of its underlying transport. However, while that buffer is not empty, the
    socket has unsent bytes too.
    """
    waiting, connection = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    try:
        if connection is not None:
            waiting += int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        # The system does not report the number, or the socket is closed.
        connection = None
    return max(waiting, 1) if connection is None else waiting


def count_unread(connection: socket.socket) -> int:
    """Count bytes from the client in the socket's receive buffer; 0 if the system does not report them."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


def count_acknowledged(transport: asyncio.Transport) -> int | None:
    """Count bytes that the client's system has acknowledged; None if the operating system does not report them."""
    connection = transport.get_extra_info("socket")
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        (number,) = _BYTES_ACKED.unpack(info)
    except (OSError, AttributeError, struct.error):
        return None
    # Systems that do not count also report 0. A real client, even a slow one, acknowledges at least some bytes.
    return int(number) or None


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keepalive, so that the system detects clients that have disappeared."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
