"""The transport of a connection as uvicorn sees it: closed once, and read only as far as a request asks for."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

# Bytes read of a body that nobody has asked for: its request waits for its turn, or for admission.
READ_AHEAD_BYTES = 2**16


class ClosedOnce:
    """A transport that may be closed twice: one of TLS could then be neither asked nor aborted."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()


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
