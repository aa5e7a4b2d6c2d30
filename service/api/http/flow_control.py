"""Transport and flow control for uvicorn: close connections only once, and read bodies as requests consume them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

# Maximum number of body bytes that are read before the application requests the body, for example during admission.
READ_AHEAD_BYTES = 2**16


class CloseOnceTransport:
    """Transport whose `close` may be called repeatedly. A TLS transport that is closed twice cannot be aborted."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()


class ReadFlowControl(FlowControl):
    """Flow control that resumes reading only while few unread body bytes are buffered.

    count_unread_bytes  weak reference to a method of the connection, which returns the number of body bytes that were
                        read from the socket but have not been received by their requests
    is_body_requested   whether the application has requested the body of the current request
    """

    def __init__(self, transport: asyncio.Transport, count_unread_bytes: weakref.WeakMethod[Callable[[], int]]) -> None:
        super().__init__(transport)
        self._count_unread_bytes, self.is_body_requested = count_unread_bytes, False

    def resume_reading(self) -> None:
        """Resume reading, unless too many unread bytes are buffered."""
        count_unread_bytes = self._count_unread_bytes()
        unread_bytes = 0 if count_unread_bytes is None else count_unread_bytes()
        if unread_bytes < READ_AHEAD_BYTES:
            self.is_body_requested = not unread_bytes
            super().resume_reading()
