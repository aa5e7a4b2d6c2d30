"""Transport and flow control for uvicorn: close transports once, and read bodies only as requests consume them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

# Number of body bytes that are read before the request asks for its body, for example while it waits for admission.
READ_AHEAD_BYTES = 2**16


class CloseOnceTransport:
    """A transport whose `close` may be called repeatedly. A TLS transport that is closed twice cannot be aborted."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()


class ReadFlowControl(FlowControl):
    """Flow control that resumes reading only while few unread body bytes are buffered.

    count_unread    weak reference to the method of the connection that returns the number of body bytes that were read
                    from the socket but not yet received by their request
    body_requested  whether the current request has asked for its body
    """

    def __init__(self, transport: asyncio.Transport, count_unread: weakref.WeakMethod[Callable[[], int]]) -> None:
        super().__init__(transport)
        self._count_unread, self.body_requested = count_unread, False

    def resume_reading(self) -> None:
        """Resume reading, unless too many bytes are buffered already."""
        count_unread = self._count_unread()
        unread = 0 if count_unread is None else count_unread()
        if unread < READ_AHEAD_BYTES:
            self.body_requested = not unread
            super().resume_reading()
