"""How the bytes of a connection are read: into one buffer, and few of a body that is not asked for."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

# Bytes read at a time, and so the most that a request holds of its body before it asks for more.
READ_BYTES = 2 * 2**20
# Bytes read of a body that nobody has asked for: its request waits for its turn, or for admission.
READ_AHEAD_BYTES = 2**16


class _ReadBuffer(threading.local):
    """Memory that an event loop reads to, shared by all connections: bytes are taken out before the loop goes on."""

    def __init__(self) -> None:
        # A view, whose slices are the same memory: the TLS transport slices what `get_buffer` returns.
        self.memory = memoryview(bytearray(READ_BYTES))


READ_BUFFER = _ReadBuffer()


class ReadFlow(FlowControl):
    """Flow control that resumes reading only while few bytes wait that nobody has asked for.

    count_unread  returns bytes of bodies that were read and not received; a weak reference to the connection's method
    body_asked    whether a request has asked for its body
    """

    def __init__(self, transport: asyncio.Transport, count_unread: weakref.WeakMethod[Callable[[], int]]) -> None:
        super().__init__(transport)
        self._count_unread, self.body_asked = count_unread, False

    def resume_reading(self) -> None:
        """Resume reading, unless too many bytes wait already."""
        count_unread = self._count_unread()
        unread = 0 if count_unread is None else count_unread()
        if unread < READ_AHEAD_BYTES:
            self.body_asked = not unread
            super().resume_reading()
