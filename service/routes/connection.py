"""How the bytes of a connection come in: many at a time, copied no more often than they must be."""

from __future__ import annotations

import asyncio
import threading

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# What is read at a time, and so what a request holds of its body before it is asked for more.
READ_BYTES = 2 * 2**20
# Of a request line and headers, and of what else frames a body: more is refused.
HEAD_BYTES = 2**16


class _Room(threading.local):
    """Where an event loop reads to, for all connections: what was read is taken out before the loop does more."""

    def __init__(self) -> None:
        # A view, whose slices are the same memory: what reads TLS asks for the rest of what it was given.
        self.buffer = memoryview(bytearray(READ_BYTES))


_ROOM = _Room()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection of a client whose bodies come in large pieces.

    The event loop otherwise reads into new memory, a few pages at a time, and what it read is put together and taken
    apart again on its way; here it goes to one place, and from there to the bytes that the request receives.
    """

    _framing = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's word for "as you like"
        """Where the loop puts what comes next."""
        return _ROOM.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._framing += nbytes
        with _ROOM.buffer[:nbytes] as data:
            self.data_received(data)  # type: ignore[arg-type] # the parser takes any buffer
        if self.cycle is not None and self.cycle.more_body and self.cycle.body:
            # Until it was received. After the end of a body nothing follows that is worth two calls of the system.
            self.flow.pause_reading()
        if self._framing > HEAD_BYTES:
            self._refuse()

    def on_headers_complete(self) -> None:
        """The parser has read the head of a request."""
        self._framing = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """The parser has read a piece of a body."""
        self._framing = 0
        if not self.cycle.response_complete:
            self._add(body)
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The parser has read the end of a request."""
        self._framing = 0
        super().on_message_complete()

    def _add(self, body: bytes) -> None:
        """To what waits to be received; mostly that is nothing, and there is nothing to put it together with."""
        waiting: bytes | bytearray = self.cycle.body
        if isinstance(waiting, bytearray) and waiting:
            waiting += body
        else:
            self.cycle.body = bytearray(waiting + body) if waiting else body  # type: ignore[assignment]

    def _refuse(self) -> None:
        """Read no further: whoever sends a head without end would fill the memory."""
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The head of the request is too long.")
        else:
            self.transport.close()
