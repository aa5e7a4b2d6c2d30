"""An HTTP protocol for uvicorn that reads large bodies with few copies, limits unread bytes and drains at shutdown.

asyncio otherwise reads 256 KiB at a time into new memory, and h11 and uvicorn copy each piece several times: a body of
33 MB takes 37 ms of the event loop that way, and 14 ms here (docs/experiments.md).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import weakref
from collections import deque
from http import HTTPStatus
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.api.http.data_rate import DataRate, Patience
from service.api.http.flow_control import READ_AHEAD_BYTES, ClosedOnce, ReadFlow
from service.api.http.refusals import MAX_HEAD_BYTES, Refusal, Refused, check_head, check_headers
from service.api.http.sockets import count_acknowledged, count_unsent, keep_alive
from service.api.messages.headers import choose_request_id, get_header
from service.api.messages.problems import status_of
from service.core import telemetry
from service.core.errors import Cancelled, NotReady, OutOfMemory, RequestError, TooSlow

log = logging.getLogger("service.access")

# Bytes read at a time, and so the most that a request holds of its body before it asks for more.
READ_BYTES = 2 * 2**20
# Requests that a client may send before the answer to the first.
MAX_UNANSWERED = 16
# How often the system is asked whether a client that has ended its side has hung up.
PROBE_SECONDS = 0.2
# How long a connection that was just opened is kept by a service that stops.
FIRST_REQUEST_SECONDS = 1.0


class _ReadBuffer(threading.local):
    """Memory that an event loop reads to, shared by all connections: bytes are taken out before the loop goes on."""

    def __init__(self) -> None:
        # A view, whose slices are the same memory: the TLS transport slices what `get_buffer` returns.
        self.memory = memoryview(bytearray(READ_BYTES))


_READ_BUFFER = _ReadBuffer()


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell a request that its client has gone, and the access log, unless it has its answer."""
    cycle.disconnected = not cycle.response_complete
    if not cycle.response_started:
        cycle.scope["state"].setdefault("closed_status", status_of(Cancelled))
    cycle.message_event.set()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Connection of a client; the event loop reads into one buffer, from where bytes go straight to the request."""

    flow: ReadFlow
    _framing_bytes = 0
    # Whether the client will send nothing more that is read.
    _input_ended = False
    # Bytes that came, and when they came last, by the clock of the loop.
    _received, _last_received = 0, 0.0
    # Since when the connection waits for the head of a request.
    _head_since = 0.0
    # Since when the connection is closed on this side and all written bytes have reached the client.
    _sent_all_since: float | None = None
    # Requests without a whole answer, the one that is worked on first.
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Start reading."""
        super().connection_made(ClosedOnce(transport))  # type: ignore[arg-type] # all methods that are used
        self.flow = ReadFlow(transport, weakref.WeakMethod(self._count_unread))
        self._receiving, self._sending = DataRate(), DataRate()
        self._head_since = self._last_received = self.loop.time()

    def fileno(self) -> int:
        """Return the file descriptor of the connection, -1 once it is closed."""
        # TLS knows none once its connection is lost.
        opened = self.transport.get_extra_info("socket")
        return -1 if opened is None else int(opened.fileno())

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the memory for the next bytes."""
        # Bytes that come belong to the newest request, but it is the oldest one that has asked for its body.
        wanted = self.flow.body_asked and not self.pipeline and self.cycle.more_body and not self._count_unread()
        return _READ_BUFFER.memory if wanted else _READ_BUFFER.memory[:READ_AHEAD_BYTES]

    def _count_unread(self) -> int:
        """Return bytes of bodies that were read and not received."""
        return sum(len(cycle.body) for cycle in self._unanswered)

    def buffer_updated(self, nbytes: int) -> None:
        """Parse bytes that are in the buffer, and stop reading where too many wait."""
        if self._input_ended:
            return
        self._framing_bytes += nbytes
        self._received += nbytes
        self._last_received = self.loop.time()
        with _READ_BUFFER.memory[:nbytes] as data:
            self.data_received(data)  # type: ignore[arg-type] # the parser takes any buffer
        if self.cycle is not None and self.cycle.more_body and self._count_unread() >= READ_AHEAD_BYTES:
            # Until the request has received them. Fewer bytes are mostly received by the next turn of the loop, and the
            # little that follows the end of a body is not worth two system calls.
            self.flow.pause_reading()
        if self._framing_bytes > MAX_HEAD_BYTES:
            # A head without end would fill the memory.
            self.send_400_response("The head of the request is too long.")

    def data_received(self, data: bytes) -> None:
        """Parse bytes, whose memory is used again afterwards."""
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, MemoryError):
                reason = "The service is short of memory; try again later."
                self._refuse_rest(Refusal(HTTPStatus.INSUFFICIENT_STORAGE, OutOfMemory.slug, reason))
                return
            self.send_400_response(str(refused) if isinstance(refused, Refused) else "Invalid HTTP request received.")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # After an offer of another protocol, which Java's clients send, the parser expects no body.
            head = self._drop_upgrade()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parse(head)
            self._parse(data[upgrade.args[0] :])

    def _drop_upgrade(self) -> bytes:
        """Return the head that was read without its offer, which a server may ignore (RFC 9110, 7.8)."""
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((first, *headers, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read as a request."""
        self._refuse_rest(Refusal(HTTPStatus.BAD_REQUEST, RequestError.slug, msg))

    def _refuse_rest(self, refusal: Refusal) -> None:
        """Refuse what follows, and close the connection; requests before it are answered first.

        The reason is sent only where it cannot be taken for the answer to one of them.
        """
        if not self._unanswered or self._awaits_body:
            self._refuse(refusal)
        elif self._end_input():
            return
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn closes every connection
        """Keep a connection whose client has ended its own side alone until its requests are answered."""
        # asyncio's TLS knows no such half.
        if self.scheme == "https" or not self._end_input():
            return False
        # A client that has hung up looks the same. Its system resets the connection when something is sent, or in the
        # end when it is probed. Others skip an interim answer (RFC 9110, 15.2), which HTTP/1.0 does not know.
        if not self._unanswered[0].response_started and self._unanswered[0].scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        keep_alive(self.transport.get_extra_info("socket"))
        self._abort_if_broken()
        return True

    def _end_input(self) -> bool:
        """Read nothing more, and close once the requests that came whole are answered; return whether there are any."""
        cut = [cycle for cycle in self._unanswered if cycle.more_body and not cycle.response_started]
        for cycle in cut:
            _disconnect(cycle)
        self.pipeline = deque(waiting for waiting in self.pipeline if waiting[0] not in cut)
        self._unanswered = tuple(cycle for cycle in self._unanswered if cycle not in cut)
        self._input_ended = True
        if self._unanswered:
            self.cycle = self._unanswered[-1]
            self.cycle.keep_alive = False
        return bool(self._unanswered)

    def _abort_if_broken(self) -> None:
        """Abort the connection once the system finds it broken, which the loop does not see after the end of input."""
        if self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(PROBE_SECONDS, self._abort_if_broken)

    def close_if_stalled(self, seconds: float) -> None:
        """Close the connection of a stopping service, unless an answer is owed or a first request still arrives.

        A body has stalled when nothing came for `seconds`, while its request was asking for more. A new connection has
        `FIRST_REQUEST_SECONDS` for its first request, which may be on its way.
        """
        if self.transport.is_closing():
            self._abort_if_sent(seconds)
            return
        now = self.loop.time()
        is_new = cast("RequestResponseCycle | None", self.cycle) is None
        if is_new and now - self._head_since < min(FIRST_REQUEST_SECONDS, seconds):
            return
        self.shutdown()
        if self.flow.read_paused and seconds > 0:
            self._last_received = now
        if self._awaits_body and now - self._last_received >= seconds and not self.transport.is_closing():
            late = NotReady("The service is stopping, and the body has not come; send it again when it is back.")
            retry = {"Retry-After": str(late.retry_after)}
            self._refuse(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, late.slug, str(late), retry))
            self.transport.close()

    def close_if_late(self, patience: Patience) -> None:
        """Close the connection if its client is too slow: with a head, with a body, or in taking an answer."""
        now = self.loop.time()
        if not (unsent := count_unsent(self.transport)):
            self._sending.reset()
        elif self._sending.is_too_low(patience, now, count_acknowledged(self.transport), unsent):
            self.transport.abort()
        if not self._waits_for_body:
            self._receiving.reset()
        elif self._receiving.is_too_low(patience, now, self._received):
            rate = f"{patience.bytes_per_second:g} bytes per second over {patience.window_seconds:g} s"
            self._close_late(f"The body comes too slowly: less than {rate}; send it again on a better line.")
        if not self._unanswered and now - self._head_since >= patience.head_seconds:
            self._close_late(f"The request's head has not come within {patience.head_seconds:g} s.")

    def _close_late(self, reason: str) -> None:
        """Close the connection; give the reason to a client that has begun a request and has no answer to it."""
        if self.transport.is_closing():
            return
        if self._awaits_body or (not self._unanswered and self._framing_bytes):
            self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, TooSlow.slug, reason))
        self.transport.close()

    @property
    def dispensable(self) -> tuple[bool, float] | None:
        """Whether an answer would be cut, and since when the client is waited for; None where work would be lost.

        A connection that is dispensable may be closed to make room for another one.
        """
        if not self._unanswered:
            return count_unsent(self.transport) > 0, self._head_since
        if self._waits_for_body:
            return False, self._last_received
        return (True, self._last_received) if self._unanswered[0].scope["method"] in {"GET", "HEAD"} else None

    @property
    def _waits_for_body(self) -> bool:
        """Whether it is the client's turn to send more of a body."""
        cycle = self.cycle
        return (
            cycle is not None
            and cycle.more_body
            and not (cycle.response_complete or cycle.waiting_for_100_continue or self.flow.read_paused)
        )

    def _abort_if_sent(self, seconds: float) -> None:
        """Abort a closed connection whose client does not end TLS, `seconds` after all bytes have reached it."""
        now = self.loop.time()
        if count_unsent(self.transport):
            self._sent_all_since = None
        elif self._sent_all_since is None:
            # Never at once: the system may have sent the last bytes only since the previous turn of the loop.
            self._sent_all_since = now
        elif now - self._sent_all_since >= seconds:
            self.transport.abort()

    @property
    def _awaits_body(self) -> bool:
        """Whether the connection only waits for the rest of a body, and no answer has begun."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline

    def _refuse(self, refusal: Refusal) -> None:
        """Write a last answer, and log it."""
        request_id = self._request_id()
        if self._awaits_body:
            self.cycle.scope["state"]["closed_status"] = int(refusal.status)
        fields = telemetry.fields(request_id=request_id, problem=refusal.slug)
        log.info("%d %s %s: %s", refusal.status, request_id, refusal.slug, refusal.reason, extra=fields)
        self.transport.write(refusal.encode(request_id, self.server_state.default_headers))

    def _request_id(self) -> str:
        """Return the id of the request that is being read, the one that the application gave it if it knows it."""
        scope = cast("Scope | None", self.scope)
        if scope is None:
            return choose_request_id("")
        known: str | None = scope["state"].get("request_id")
        return known or choose_request_id(get_header(scope, b"x-request-id"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all unanswered requests; uvicorn tells the last one alone."""
        for cycle in self._unanswered:
            _disconnect(cycle)
        self._unanswered = ()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Begin a request after the parser has read its head. An error raised here ends the connection."""
        self._framing_bytes = 0
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # `_parse` feeds the head again, without the offer.
            return
        version = self.parser.get_http_version()
        check_head(version, self.parser.get_method(), self.url, self.headers)
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise Refused("Too many requests were sent ahead.")
        check_headers(version, self.headers)
        if version == "1.0":
            # RFC 9110, 10.1.1: such a client knows no interim answer, and does not wait for one.
            self.expect_100_continue = False
            self.headers[:] = [header for header in self.headers if header[0] != b"expect"]
        super().on_headers_complete()
        self._unanswered += (self.cycle,)
        self.flow.body_asked = False

    def on_response_complete(self) -> None:
        """Forget answered requests; the rest of their bodies is dropped."""
        self._unanswered = tuple(cycle for cycle in self._unanswered if not cycle.response_complete)
        self._head_since = self.loop.time()
        super().on_response_complete()
        self.flow.body_asked = False

    def on_body(self, body: bytes) -> None:
        """Hand a piece of a body to its request."""
        self._framing_bytes = 0
        if self.cycle.response_complete:
            return
        waiting: bytes | bytearray = self.cycle.body
        if isinstance(waiting, bytearray) and waiting:
            waiting += body
        else:
            # Mostly none wait, and the piece is not copied.
            self.cycle.body = bytearray(waiting + body) if waiting else body  # type: ignore[assignment]
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """End a request after the parser has read all of it."""
        self._framing_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()
