"""Send the head of an answer together with the beginning of its body, in one system call instead of two.

The client then wakes up once. This file can be deleted: `build_config` in `service.api.server` then takes `Connection`,
and only speed changes. What uvicorn calls when an answer is complete must then still not close a transport twice.
"""

from __future__ import annotations

import weakref
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.api.http.protocol import Connection, close

# The largest piece of a body that is copied to be sent together with the head of its answer.
MAX_JOINED_BYTES = 2**16


class JoiningConnection(Connection):
    """A connection that sends the head of each answer together with the first piece of the body."""

    def on_headers_complete(self) -> None:
        """Begin a request after the parser has read its head."""
        previous = self.cycle
        super().on_headers_complete()
        if self.cycle is not previous:
            self.cycle.transport = _JoiningTransport(self.cycle)  # type: ignore[assignment] # all methods that are used

    def on_response_complete(self) -> None:
        """Send a head that still waits."""
        for cycle in self._unanswered:
            cast("_JoiningTransport", cycle.transport).flush()
        super().on_response_complete()


class _JoiningTransport:
    """Transport of one answer, whose first write is the head."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._transport = cycle.transport
        # Weak, since the cycle refers to this: both, with a body, would stay until the garbage collector runs.
        self._cycle = weakref.proxy(cycle)
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        """Send a piece; the first one is the head of the answer and waits for the second."""
        if self._cycle.response_started and not self._begun:
            self._head, self._begun = data, True
            return
        head, self._head = self._head, None
        if head is not None and len(data) <= MAX_JOINED_BYTES:
            data = head + data
        elif head is not None:
            self._transport.write(head)
        self._transport.write(data)

    def flush(self) -> None:
        """Send the head where nothing follows it."""
        if self._head is not None:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Send the head if it still waits, and close the connection."""
        self.flush()
        close(self._transport)
