"""An HTTP protocol for uvicorn that reads large bodies with few copies, limits unread bytes and drains at shutdown.

By default, asyncio reads 256 KiB at a time into new memory, and h11 and uvicorn copy each piece several times. A body
of 33 MB then takes 37 ms of the event loop, compared with 14 ms here (docs/experiments.md).
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

from service.api.http.data_rate import DataRate, SlowClientLimits
from service.api.http.flow_control import READ_AHEAD_BYTES, CloseOnceTransport, ReadFlowControl
from service.api.http.refusals import MAX_HEAD_BYTES, HeadError, RefusalResponse, check_head, check_headers
from service.api.http.sockets import count_acknowledged, count_unsent, keep_alive
from service.api.messages.headers import choose_request_id, get_header
from service.api.messages.problems import status_of
from service.core import telemetry
from service.core.errors import Cancelled, NotReady, OutOfMemory, RequestError, TooSlow

log = logging.getLogger("service.access")

# Number of bytes read at a time, and therefore the most that a request buffers of its body before it asks for more.
READ_BYTES = 2 * 2**20
# Number of requests that a client may send ahead (pipelining), including the one in progress.
MAX_UNANSWERED = 16
# Interval of checks whether a client that has shut down its sending side has disconnected.
PROBE_SECONDS = 0.2
# At shutdown, a new connection is kept open this long for its first request.
FIRST_REQUEST_SECONDS = 1.0


class _ReadBuffer(threading.local):
    """Read buffer of an event loop, shared by all connections: each read is processed before the loop continues."""

    def __init__(self) -> None:
        # A view, whose slices share its memory: the TLS transport slices the result of `get_buffer`.
        self.memory = memoryview(bytearray(READ_BYTES))


_READ_BUFFER = _ReadBuffer()


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Notify a request and the access log that the client has disconnected, unless the response is complete."""
    cycle.disconnected = not cycle.response_complete
    if not cycle.response_started:
        cycle.scope["state"].setdefault("closed_status", status_of(Cancelled))
    cycle.message_event.set()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Connection of a client. The event loop reads into a shared buffer, and bytes go directly to the request."""

    flow: ReadFlowControl
    _framing_bytes = 0  # of the current head, chunk header or trailers
    # Whether further input is ignored.
    _input_ended = False
    # Total number of received bytes, and the time of the last ones (event loop clock).
    _received, _last_received = 0, 0.0
    # Start of the wait for the next request head.
    _head_since = 0.0
    # Time since which the connection is closed on this side and the client has received all written bytes.
    _sent_all_since: float | None = None
    # Requests without a complete response, in order. The first one is being processed.
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # the type in uvicorn
        """Start reading."""
        super().connection_made(CloseOnceTransport(transport))  # type: ignore[arg-type] # has all methods that are used
        self.flow = ReadFlowControl(transport, weakref.WeakMethod(self._count_unread))
        self._receiving, self._sending = DataRate(), DataRate()
        self._head_since = self._last_received = self.loop.time()

    def fileno(self) -> int:
        """Return the file descriptor of the connection; -1 after it is closed."""
        # A TLS transport has no socket after its connection is lost.
        opened = self.transport.get_extra_info("socket")
        return -1 if opened is None else int(opened.fileno())

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        # Incoming bytes belong to the newest request, but only the oldest request can have asked for its body.
        needed = self.flow.body_requested and not self.pipeline and self.cycle.more_body and not self._count_unread()
        return _READ_BUFFER.memory if needed else _READ_BUFFER.memory[:READ_AHEAD_BYTES]

    def _count_unread(self) -> int:
        """Return the number of body bytes that were read from the socket but not yet received by their requests."""
        return sum(len(cycle.body) for cycle in self._unanswered)

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes in the buffer. Pause reading if too many body bytes are unread."""
        if self._input_ended:
            return
        self._framing_bytes += nbytes
        self._received += nbytes
        self._last_received = self.loop.time()
        with _READ_BUFFER.memory[:nbytes] as data:
            self.data_received(data)  # type: ignore[arg-type] # the parser takes any buffer
        if self.cycle is not None and self.cycle.more_body and self._count_unread() >= READ_AHEAD_BYTES:
            # Resumes when the request has received them. Smaller amounts are usually received by the next iteration of
            # the loop, and the few bytes after the end of a body are not worth two system calls.
            self.flow.pause_reading()
        if self._framing_bytes > MAX_HEAD_BYTES:
            # An endless head would fill the memory.
            self.send_400_response(f"The URL and the headers are too long: more than {MAX_HEAD_BYTES:,} bytes.")

    def data_received(self, data: bytes) -> None:
        """Parse bytes. Their memory is reused afterwards."""
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, MemoryError):
                reason = "The service is out of memory. Try again later."
                self._refuse_rest(RefusalResponse(HTTPStatus.INSUFFICIENT_STORAGE, OutOfMemory.slug, reason))
                return
            self.send_400_response(str(cause) if isinstance(cause, HeadError) else "Invalid HTTP request received.")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # After an Upgrade header, which Java clients send, the parser expects no body.
            head = self._drop_upgrade()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parse(head)
            self._parse(data[upgrade.args[0] :])

    def _drop_upgrade(self) -> bytes:
        """Return the parsed head without its Upgrade header, which a server may ignore (RFC 9110, 7.8)."""
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((first, *headers, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Reject input that is not a valid request, and close the connection."""
        self._refuse_rest(RefusalResponse(HTTPStatus.BAD_REQUEST, RequestError.slug, msg))

    def _refuse_rest(self, refusal: RefusalResponse) -> None:
        """Reject further input and close the connection after earlier requests have been answered.

        The reason is sent only if the client cannot mistake it for the response to an earlier request.
        """
        if not self._unanswered or self._has_open_body:
            self._refuse(refusal)
        elif self._end_input():
            return
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn closes every connection
        """Keep a connection whose client has shut down only its sending side until its requests are answered."""
        # asyncio's TLS does not support half-closed connections.
        if self.scheme == "https" or not self._end_input():
            return False
        # A client that has disconnected looks the same, but its system resets the connection when it receives data or a
        # keepalive probe. Other clients ignore an interim response (RFC 9110, 15.2), which HTTP/1.0 does not have.
        if not self._unanswered[0].response_started and self._unanswered[0].scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        keep_alive(self.transport.get_extra_info("socket"))
        self._abort_if_broken()
        return True

    def _end_input(self) -> bool:
        """Ignore further input. Return whether complete requests remain, after which the connection is closed."""
        truncated = [cycle for cycle in self._unanswered if cycle.more_body and not cycle.response_started]
        for cycle in truncated:
            _disconnect(cycle)
        self.pipeline = deque(waiting for waiting in self.pipeline if waiting[0] not in truncated)
        self._unanswered = tuple(cycle for cycle in self._unanswered if cycle not in truncated)
        self._input_ended = True
        if self._unanswered:
            self.cycle = self._unanswered[-1]
            self.cycle.keep_alive = False
        return bool(self._unanswered)

    def _abort_if_broken(self) -> None:
        """Abort the connection if the system reports an error, which the event loop misses after the end of input."""
        if self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(PROBE_SECONDS, self._abort_if_broken)

    def close_if_stalled(self, seconds: float) -> None:
        """Close the connection at shutdown, unless a response is pending or a first request may still arrive.

        An upload has stalled if nothing arrived for `seconds` although its request was waiting for data. The first
        request of a new connection may arrive within `FIRST_REQUEST_SECONDS`.
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
        if self._has_open_body and now - self._last_received >= seconds and not self.transport.is_closing():
            error = NotReady("The service is stopping and did not receive the whole file. Send it again in a moment.")
            retry = {"Retry-After": str(error.retry_after)}
            self._refuse(RefusalResponse(HTTPStatus.SERVICE_UNAVAILABLE, error.slug, str(error), retry))
            self.transport.close()

    def close_if_too_slow(self, limits: SlowClientLimits) -> None:
        """Close the connection if its client is too slow to send a head or a body, or to receive a response."""
        now = self.loop.time()
        if not (unsent := count_unsent(self.transport)):
            self._sending.reset()
        elif self._sending.is_too_low(limits, now, count_acknowledged(self.transport), unsent):
            self.transport.abort()
        if not self._is_waiting_for_client:
            self._receiving.reset()
        elif self._receiving.is_too_low(limits, now, self._received):
            rate = f"{limits.bytes_per_second:g} bytes per second over {limits.window_seconds:g} s"
            self._close_slow_connection(f"The upload is too slow: less than {rate}. Use a faster connection.")
        if not self._unanswered and now - self._head_since >= limits.head_seconds:
            self._close_slow_connection(f"The headers of the request did not arrive within {limits.head_seconds:g} s.")

    def _close_slow_connection(self, reason: str) -> None:
        """Close the connection. Send the reason if the client has begun a request that has no response yet."""
        if self.transport.is_closing():
            return
        if self._has_open_body or (not self._unanswered and self._framing_bytes):
            self._refuse(RefusalResponse(HTTPStatus.REQUEST_TIMEOUT, TooSlow.slug, reason))
        self.transport.close()

    @property
    def eviction_state(self) -> tuple[bool, float] | None:
        """State of a connection that may be closed to make room for a new one; None if closing it would lose work.

        The state is whether closing would interrupt a response, and since when the connection waits for its client.
        """
        if not self._unanswered:
            return count_unsent(self.transport) > 0, self._head_since
        if self._is_waiting_for_client:
            return False, self._last_received
        return (True, self._last_received) if self._unanswered[0].scope["method"] in {"GET", "HEAD"} else None

    @property
    def _is_waiting_for_client(self) -> bool:
        """Whether the connection is waiting for the client to send more of a body."""
        cycle = self.cycle
        return (
            cycle is not None
            and cycle.more_body
            and not (cycle.response_complete or cycle.waiting_for_100_continue or self.flow.read_paused)
        )

    def _abort_if_sent(self, seconds: float) -> None:
        """Abort a closed connection whose client does not end TLS within `seconds` after it received all bytes."""
        now = self.loop.time()
        if count_unsent(self.transport):
            self._sent_all_since = None
        elif self._sent_all_since is None:
            # Not immediately: the system may have sent the last bytes since the previous iteration of the loop.
            self._sent_all_since = now
        elif now - self._sent_all_since >= seconds:
            self.transport.abort()

    @property
    def _has_open_body(self) -> bool:
        """Whether the rest of a body is missing and its response has not started."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline

    def _refuse(self, refusal: RefusalResponse) -> None:
        """Write and log the last response on this connection."""
        request_id = self._request_id()
        if self._has_open_body:
            self.cycle.scope["state"]["closed_status"] = int(refusal.status)
        fields = telemetry.fields(request_id=request_id, problem=refusal.slug)
        log.info("%d %s %s: %s", refusal.status, request_id, refusal.slug, refusal.reason, extra=fields)
        self.transport.write(refusal.encode(request_id, self.server_state.default_headers))

    def _request_id(self) -> str:
        """Return the id of the request that is being read: the id assigned by the application, if any."""
        scope = cast("Scope | None", self.scope)
        if scope is None:
            return choose_request_id("")
        assigned: str | None = scope["state"].get("request_id")
        return assigned or choose_request_id(get_header(scope, b"x-request-id"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all unanswered requests. uvicorn notifies only the last one."""
        for cycle in self._unanswered:
            _disconnect(cycle)
        self._unanswered = ()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Start a request after the parser has read its head. An error raised here closes the connection."""
        self._framing_bytes = 0
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # `_parse` feeds the head again, without the Upgrade header.
            return
        version = self.parser.get_http_version()
        check_head(version, self.parser.get_method(), self.url, self.headers)
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise HeadError(f"More than {MAX_UNANSWERED} requests were sent without waiting for a response.")
        check_headers(version, self.headers)
        if version == "1.0":
            # RFC 9110, 10.1.1: HTTP/1.0 has no interim responses, so the client does not wait for one.
            self.expect_100_continue = False
            self.headers[:] = [header for header in self.headers if header[0] != b"expect"]
        super().on_headers_complete()
        self._unanswered += (self.cycle,)
        self.flow.body_requested = False

    def on_response_complete(self) -> None:
        """Remove answered requests. The rest of their bodies is discarded."""
        self._unanswered = tuple(cycle for cycle in self._unanswered if not cycle.response_complete)
        self._head_since = self.loop.time()
        super().on_response_complete()
        self.flow.body_requested = False

    def on_body(self, body: bytes) -> None:
        """Append a piece of a body to the buffer of its request."""
        self._framing_bytes = 0
        if self.cycle.response_complete:
            return
        buffered: bytes | bytearray = self.cycle.body
        if isinstance(buffered, bytearray) and buffered:
            buffered += body
        else:
            # Usually the buffer is empty, and the piece is not copied.
            self.cycle.body = bytearray(buffered + body) if buffered else body  # type: ignore[assignment]
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Finish the body of a request after the parser has read all of it."""
        self._framing_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()
