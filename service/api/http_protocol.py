"""How the bytes of a connection come in: many at a time, copied no more often than they must be."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import termios
import threading
import weakref
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.api.headers import get_header
from service.api.middleware import SAFE, number_of
from service.api.problems import PROBLEM_TYPE, problem_members
from service.core import logs
from service.core.errors import NotReady, RequestError

log = logging.getLogger("service.access")

# What is read at a time, and so what a request holds of its body before it is asked for more.
READ_BYTES = 2 * 2**20
# The same before it has asked for any: while it waits for its turn, or for whether it is let in.
AHEAD_BYTES = 2**16
# Of a request line and headers, and of what else frames a body: more is refused.
HEAD_BYTES = 2**16
# Requests that a client may send before it has the answer to the first.
MOST_UNANSWERED = 16
# So much of a body is copied to go with its head.
JOINED_BYTES = 2**16


class Refused(ValueError):
    """A head that is not to be answered; the message goes to the client."""


class _Room(threading.local):
    """Where an event loop reads to, for all connections: what was read is taken out before the loop does more."""

    def __init__(self) -> None:
        # A view, whose slices are the same memory: what reads TLS asks for the rest of what it was given.
        self.buffer = memoryview(bytearray(READ_BYTES))


_ROOM = _Room()


class _Answer:
    """The transport as whoever answers one request sees it: the head of an answer goes with the beginning of its body.

    Each is a call of the system otherwise, and the client wakes up for each.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._transport = cycle.transport
        # Which holds this: it would stay, with what it has of a body, until Python looks for cycles.
        self._cycle = weakref.proxy(cycle)
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        """The first piece of an answer is its head."""
        if self._cycle.response_started and not self._begun:
            self._head, self._begun = data, True
            return
        head, self._head = self._head, None
        if head is not None and len(data) <= JOINED_BYTES:
            data = head + data
        elif head is not None:
            self._transport.write(head)
        self._transport.write(data)

    def flush(self) -> None:
        """Nothing follows the head."""
        if self._head is not None:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        _close(self._transport)


def _close(transport: asyncio.Transport) -> None:
    """Once: who closes a transport of TLS twice can neither ask it anything nor end it any more."""
    if not transport.is_closing():
        transport.close()


def _unsent(transport: asyncio.Transport) -> bool:
    """Whether the client lacks some of what was written, or may.

    A transport of TLS does not tell what waits in the one beneath it, but as long as anything does the system has work.
    """
    socket = transport.get_extra_info("socket")
    if transport.get_write_buffer_size() or socket is None:
        return True
    try:
        return any(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):
        # A system that does not tell, or a socket that was closed.
        return True


class _Flow(FlowControl):
    """Reads on for who asks for more, unless too much has come that nobody has asked for.

    held   bytes of bodies that were read and not received; of a connection, which holds this
    asked  whether it is a request's body that was asked for
    """

    def __init__(self, transport: asyncio.Transport, held: weakref.WeakMethod[Callable[[], int]]) -> None:
        super().__init__(transport)
        self._held, self.asked = held, False

    def resume_reading(self) -> None:
        known = self._held()
        held = 0 if known is None else known()
        if held < AHEAD_BYTES:
            self.asked = not held
            super().resume_reading()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection of a client whose bodies come in large pieces.

    The event loop otherwise reads into new memory, a few pages at a time, and what it read is put together and taken
    apart again on its way; here it goes to one place, and from there to the bytes that the request receives.
    """

    flow: _Flow
    _framing = 0
    # When anything came last, by the clock of the loop.
    _heard = 0.0
    # Since when, by the same clock, it is closed on this side and all that was written has come to the client.
    _over: float | None = None
    # Requests without a whole answer, the one that is worked on first.
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Whatever comes is read, at first."""
        super().connection_made(transport)
        self.flow = _Flow(transport, weakref.WeakMethod(self._held))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's word for "as you like"
        """Where the loop puts what comes next."""
        # What comes belongs to the newest request, and what was asked for to the one that is worked on.
        wanted = self.flow.asked and not self.pipeline and self.cycle.more_body and not self._held()
        return _ROOM.buffer if wanted else _ROOM.buffer[:AHEAD_BYTES]

    def _held(self) -> int:
        return sum(len(cycle.body) for cycle in self._unanswered)

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._framing += nbytes
        self._heard = self.loop.time()
        with _ROOM.buffer[:nbytes] as data:
            self.data_received(data)  # type: ignore[arg-type] # the parser takes any buffer
        if self.cycle is not None and self.cycle.more_body and self._held() >= AHEAD_BYTES:
            # Until it was received. What is less mostly was by the next turn of the loop, and after the end of a body
            # nothing follows that is worth two calls of the system.
            self.flow.pause_reading()
        if self._framing > HEAD_BYTES:
            # Whoever sends a head without end would fill the memory.
            self.send_400_response("The head of the request is too long.")

    def data_received(self, data: bytes) -> None:
        """Bytes have come, which may not be there for longer."""
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError as error:
            refused = error.__context__
            reason = str(refused) if isinstance(refused, Refused) else "Invalid HTTP request received."
            self.send_400_response(reason)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # After a request that offers another protocol, as Java's clients do, the parser expects that, and no body.
            head = self._without_upgrade()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parse(head)
            self._parse(data[upgrade.args[0] :])

    def _without_upgrade(self) -> bytes:
        """The head that was read, but for the offer, which may be ignored (RFC 9110, 7.8)."""
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((first, *headers, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Read no further; the reason is told where it cannot be taken for an answer that is owed, or a part of one."""
        if self.cycle is None or self.cycle.response_complete or self._arriving:
            self.transport.write(self._refusal(HTTPStatus.BAD_REQUEST, RequestError.slug, msg))
        _close(self.transport)

    def shutdown(self) -> None:
        """Close it, now or once the answer is whole, unless that was done."""
        if not self.transport.is_closing():
            super().shutdown()

    def give_up(self, seconds: float) -> None:
        """Now that the service stops: close it unless an answer is owed, and also where a body stalls for so long.

        Those who still send are heard as long as something comes, or is not read because nobody has asked for it.
        """
        if self.transport.is_closing():
            self._leave(seconds)
            return
        self.shutdown()
        now = self.loop.time()
        if self.flow.read_paused and seconds > 0:
            self._heard = now
        if self._arriving and now - self._heard >= seconds and not self.transport.is_closing():
            late = NotReady("The service is stopping, and the body has not come; send it again when it is back.")
            retry = {"Retry-After": str(late.retry_after)}
            self.transport.write(self._refusal(HTTPStatus.SERVICE_UNAVAILABLE, late.slug, str(late), retry))
            self.transport.close()

    def _leave(self, seconds: float) -> None:
        """End it although the client does not end TLS, so many seconds after that was all it was waited for."""
        now = self.loop.time()
        if _unsent(self.transport):
            self._over = None
        elif self._over is None:
            # Not even where there is no time left: between two turns of the loop the system may just have sent it all.
            self._over = now
        elif now - self._over >= seconds:
            self.transport.abort()

    @property
    def _arriving(self) -> bool:
        """Whether the rest of a body is all that the client is waited for, and nothing was answered yet."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline

    def _refusal(self, status: HTTPStatus, slug: str, reason: str, more: Mapping[str, str] | None = None) -> bytes:
        """A problem document, as the application answers with, after which nothing follows; the log has it too."""
        number = self._number()
        log.info("%d %s %s: %s", status, number, slug, reason, extra=logs.fields(request_id=number, problem=slug))
        content = json.dumps(problem_members(slug, status, reason, number)).encode()
        headers = {**SAFE, **(more or {}), "Content-Type": PROBLEM_TYPE, "X-Request-ID": number, "Connection": "close"}
        lines = [f"HTTP/1.1 {status} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        lines += [f"{name.decode()}: {value.decode()}" for name, value in self.server_state.default_headers]
        return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content

    def _number(self) -> str:
        """Of the request whose head, or body, is being read: what the application calls it, if that knows it."""
        scope = cast("Scope | None", self.scope)
        if scope is None:
            return number_of("")
        known: str | None = scope["state"].get("request_id")
        return known or number_of(get_header(scope, b"x-request-id"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for an answer any more; uvicorn tells it the last request alone."""
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered = ()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """The parser has read the head of a request. An error raised here ends the connection."""
        self._framing = 0
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # It comes again, without the offer.
            return
        self._check_head()
        super().on_headers_complete()
        self.cycle.transport = _Answer(self.cycle)  # type: ignore[assignment] # of a transport all that is used
        self._unanswered += (self.cycle,)
        self.flow.asked = False

    def _check_head(self) -> None:
        """Raise Refused for what is not to be answered."""
        if self.parser.get_method() == b"CONNECT":
            raise Refused("This service is no proxy.")
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            raise Refused("The head of the request is too long.")
        if len(self._unanswered) >= MOST_UNANSWERED:
            raise Refused("Too many requests were sent ahead.")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            # RFC 9112, 3.2: whoever stands before this service might go by another one than its guard.
            raise Refused("The request must name one host.")
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            # Whose end is that of its last chunk, and what is in the chunks would be taken for the file.
            raise Refused("A body comes as it is or in chunks: no other Transfer-Encoding is read.")

    def on_response_complete(self) -> None:
        """An answer is whole, if only its head; what else comes of the request's body is for nobody."""
        for cycle in self._unanswered:
            cast("_Answer", cycle.transport).flush()
        self._unanswered = tuple(cycle for cycle in self._unanswered if not cycle.response_complete)
        super().on_response_complete()
        self.flow.asked = False

    def on_body(self, body: bytes) -> None:
        """The parser has read a piece of a body."""
        self._framing = 0
        if not self.cycle.response_complete:
            self._add(body)
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The parser has read the end of a request."""
        self._framing = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _add(self, body: bytes) -> None:
        """To what waits to be received; mostly that is nothing, and there is nothing to put it together with."""
        waiting: bytes | bytearray = self.cycle.body
        if isinstance(waiting, bytearray) and waiting:
            waiting += body
        else:
            self.cycle.body = bytearray(waiting + body) if waiting else body  # type: ignore[assignment]
