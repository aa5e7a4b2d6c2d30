"""HTTP protocol for uvicorn that reads large bodies with few copies, limits unread bytes and shuts down gracefully.

By default, asyncio reads 256 KiB at a time into new memory, and h11 and uvicorn copy each piece several times. A 33 MB
body then occupies the event loop for 37 ms, compared with 14 ms for this protocol (docs/experiments.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
import weakref
from collections import deque
from http import HTTPStatus
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.api.http.data_rate import DataRate, HeadTimer, SlowClientLimits
from service.api.http.flow_control import READ_AHEAD_BYTES, CloseOnceTransport, ReadFlowControl
from service.api.http.refusals import MAX_HEAD_BYTES, HeadError, RefusalResponse, check_framing_headers, check_head
from service.api.http.sockets import count_acknowledged_bytes, count_unsent_bytes, enable_keepalive
from service.api.messages.error_responses import get_status_code
from service.api.messages.headers import SEND_DEADLINE_KEY, choose_request_id, get_header
from service.core import telemetry
from service.core.errors import Cancelled, NotReady, OutOfMemory, RequestError, TooSlow

log = logging.getLogger("service.access")

# Maximum number of bytes per read, which also limits the number of body bytes that are buffered for a request.
READ_BUFFER_BYTES = 2 * 2**20
# Maximum number of requests that a client may send without waiting for responses, including the one in progress.
MAX_PIPELINED_REQUESTS = 16
# Interval at which a connection is checked for errors after its client has shut down its sending side.
PROBE_SECONDS = 0.2
# Time for which a new connection is kept open at shutdown, so that the client can send its first request.
FIRST_REQUEST_SECONDS = 1.0


class _ReadBuffer(threading.local):
    """Read buffer of an event loop. All connections share it, because the loop processes each read immediately."""

    def __init__(self) -> None:
        # A view instead of a bytearray, because the TLS transport slices it and writes to the slices.
        self.memory = memoryview(bytearray(READ_BUFFER_BYTES))


_READ_BUFFER = _ReadBuffer()


def _notify_of_disconnect(cycle: RequestResponseCycle) -> None:
    """Notify a request and the access log that the client has disconnected, unless the response is complete."""
    cycle.disconnected = not cycle.response_complete
    if not cycle.response_started:
        cycle.scope["state"].setdefault("closed_status", get_status_code(Cancelled))
    cycle.message_event.set()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Connection to a client. The event loop reads into a shared buffer, and bytes go directly to the request."""

    flow: ReadFlowControl
    _framing_bytes = 0  # received bytes of the current request head, chunk header or trailers
    _has_input_ended = False  # whether input has ended, so that further input is ignored
    # Total number of received bytes, and the time at which the last of them arrived (event loop clock).
    _received_bytes, _last_received_at = 0, 0.0
    _all_sent_at: float | None = None  # time at which a closed connection was first found to have no unsent bytes
    # Requests without a complete response, in order. Only the first one is being processed.
    _open_cycles: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn declares this type
        """Start reading."""
        super().connection_made(CloseOnceTransport(transport))  # type: ignore[arg-type] # has all methods that uvicorn uses
        self.flow = ReadFlowControl(transport, weakref.WeakMethod(self._count_unread))
        self._receive_rate, self._send_rate = DataRate(), DataRate()
        self._last_received_at = self.loop.time()
        self._head_timer = HeadTimer(self._last_received_at)

    def fileno(self) -> int:
        """Return the file descriptor of the connection; -1 after the connection is closed."""
        # A TLS transport has no socket after its connection is lost.
        connection_socket = self.transport.get_extra_info("socket")
        return -1 if connection_socket is None else int(connection_socket.fileno())

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        # Incoming bytes belong to the newest request, but only the oldest one may have requested its body.
        is_awaiting_body = (
            self.flow.is_body_requested and not self.pipeline and self.cycle.more_body and not self._count_unread()
        )
        return _READ_BUFFER.memory if is_awaiting_body else _READ_BUFFER.memory[:READ_AHEAD_BYTES]

    def _count_unread(self) -> int:
        """Count body bytes that were read from the socket but have not been received by their requests."""
        return sum(len(cycle.body) for cycle in self._open_cycles)

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the new bytes in the buffer. Pause reading if too many body bytes are unread."""
        if self._has_input_ended:
            return
        self._framing_bytes += nbytes
        self._received_bytes += nbytes
        self._last_received_at = self.loop.time()
        self._head_timer.count_bytes(self._last_received_at)
        with _READ_BUFFER.memory[:nbytes] as data:
            self.data_received(data)  # type: ignore[arg-type] # the parser accepts any buffer
        if self.cycle is not None and self.cycle.more_body and self._count_unread() >= READ_AHEAD_BYTES:
            # Reading resumes when the request has received these bytes. Smaller amounts are usually received in the
            # next iteration of the loop, so pausing would only cost two system calls.
            self.flow.pause_reading()
        if self._framing_bytes > MAX_HEAD_BYTES:
            # An endless request head would fill the memory.
            self.send_400_response(f"The URL and the headers are longer than {MAX_HEAD_BYTES:,} bytes in total.")

    def data_received(self, data: bytes) -> None:
        """Parse received bytes without retaining references to them, because their memory is reused."""
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, MemoryError):
                reason = "The service is out of memory. Try again later."
                self._refuse_further_input(RefusalResponse(HTTPStatus.INSUFFICIENT_STORAGE, OutOfMemory.slug, reason))
                return
            self.send_400_response(str(cause) if isinstance(cause, HeadError) else "The request is not valid HTTP.")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # Java clients send an Upgrade header, which makes the parser expect no body.
            head = self._build_head_without_upgrade()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parse(head)
            self._parse(data[upgrade.args[0] :])

    def _build_head_without_upgrade(self) -> bytes:
        """Return the parsed request head without its Upgrade header, which a server may ignore (RFC 9110, 7.8)."""
        request_line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join((request_line, *headers, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not a valid request, and close the connection."""
        self._refuse_further_input(RefusalResponse(HTTPStatus.BAD_REQUEST, RequestError.slug, msg))

    def _refuse_further_input(self, refusal: RefusalResponse) -> None:
        """Refuse further input, and close the connection after earlier requests have been answered.

        The refusal is sent only if the client cannot mistake it for the response to an earlier request.
        """
        if not self._open_cycles or self._has_open_body:
            self._refuse(refusal)
        elif self._end_input():
            return
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override] # returns None in uvicorn
        """Keep the connection open for pending responses if the client has only shut down its sending side."""
        # asyncio's TLS does not support half-closed connections.
        if self.scheme == "https" or not self._end_input():
            return False
        # A client that has disconnected looks the same, but its system resets the connection when data or a keepalive
        # probe arrives. A connected client ignores an interim response (RFC 9110, 15.2). HTTP/1.0 has none.
        if not self._open_cycles[0].response_started and self._open_cycles[0].scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        enable_keepalive(self.transport.get_extra_info("socket"))
        self._abort_if_broken()
        return True

    def _end_input(self) -> bool:
        """Ignore further input, and close the connection after pending responses. Return whether any are pending."""
        truncated_cycles = [cycle for cycle in self._open_cycles if cycle.more_body and not cycle.response_started]
        for cycle in truncated_cycles:
            _notify_of_disconnect(cycle)
        self.pipeline = deque(entry for entry in self.pipeline if entry[0] not in truncated_cycles)
        self._open_cycles = tuple(cycle for cycle in self._open_cycles if cycle not in truncated_cycles)
        self._has_input_ended = True
        if self._open_cycles:
            self.cycle = self._open_cycles[-1]
            self.cycle.keep_alive = False
        return bool(self._open_cycles)

    def _abort_if_broken(self) -> None:
        """Abort the connection if the system reports an error. The event loop ignores errors after the end of input."""
        if self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(PROBE_SECONDS, self._abort_if_broken)

    def close_if_stalled(self, stalled_seconds: float) -> None:
        """Close the connection at shutdown if it is idle, or if its upload has not progressed for `stalled_seconds`."""
        if self.transport.is_closing():
            self._abort_if_sent(stalled_seconds)
            return
        now = self.loop.time()
        is_new = cast("RequestResponseCycle | None", self.cycle) is None
        if is_new and now - self._head_timer.waiting_since < min(FIRST_REQUEST_SECONDS, stalled_seconds):
            return
        self.shutdown()
        if self.flow.read_paused and stalled_seconds > 0:
            self._last_received_at = now
        if self._has_open_body and now - self._last_received_at >= stalled_seconds and not self.transport.is_closing():
            error = NotReady("The service is shutting down and interrupted the upload. Send the file again shortly.")
            retry_headers = {"Retry-After": str(error.retry_after)}
            self._refuse(RefusalResponse(HTTPStatus.SERVICE_UNAVAILABLE, error.slug, str(error), retry_headers))
            self.transport.close()

    def close_if_too_slow(self, limits: SlowClientLimits) -> None:
        """Close the connection if its client sends a request head or body, or receives a response, too slowly."""
        now = self.loop.time()
        if self._open_cycles and now >= self._open_cycles[0].scope["state"].get(SEND_DEADLINE_KEY, math.inf):
            self.transport.abort()
        if not (unsent_bytes := count_unsent_bytes(self.transport)):
            self._send_rate.reset()
        elif self._send_rate.is_too_low(limits, now, count_acknowledged_bytes(self.transport), unsent_bytes):
            self.transport.abort()
        if not self._is_waiting_for_client:
            self._receive_rate.reset()
        elif self._receive_rate.is_too_low(limits, now, self._received_bytes):
            minimum_rate = f"{limits.bytes_per_second:g} bytes per second over {limits.window_seconds:g} s"
            self._close_slow_connection(f"The upload is slower than {minimum_rate}. Use a faster connection.")
        if not self._open_cycles and self._head_timer.is_expired(limits, self.timeout_keep_alive, now):
            self._close_slow_connection(f"The headers of the request did not arrive within {limits.head_seconds:g} s.")

    def _close_slow_connection(self, reason: str) -> None:
        """Close the connection. If the client has begun a request that has no response yet, send the reason first."""
        if self.transport.is_closing():
            return
        if self._has_open_body or (not self._open_cycles and self._framing_bytes):
            self._refuse(RefusalResponse(HTTPStatus.REQUEST_TIMEOUT, TooSlow.slug, reason))
        self.transport.close()

    @property
    def eviction_state(self) -> tuple[bool, float] | None:
        """State of a connection that may be closed to make room for a new one; None if closing it would lose work.

        The state is a pair: whether closing would interrupt a response, and when the wait for the client began.
        """
        if not self._open_cycles:
            return count_unsent_bytes(self.transport) > 0, self._head_timer.waiting_since
        if self._is_waiting_for_client:
            return False, self._last_received_at
        return (True, self._last_received_at) if self._open_cycles[0].scope["method"] in {"GET", "HEAD"} else None

    @property
    def _is_waiting_for_client(self) -> bool:
        """Whether the connection is waiting for the client to send the rest of a body."""
        cycle = self.cycle
        return (
            cycle is not None
            and cycle.more_body
            and not (cycle.response_complete or cycle.waiting_for_100_continue or self.flow.read_paused)
        )

    def _abort_if_sent(self, seconds: float) -> None:
        """Abort a closed connection if its client has received all bytes but has not ended TLS after `seconds`."""
        now = self.loop.time()
        if count_unsent_bytes(self.transport):
            self._all_sent_at = None
        elif self._all_sent_at is None:
            # Do not abort immediately: the system may have sent the last bytes only a moment ago.
            self._all_sent_at = now
        elif now - self._all_sent_at >= seconds:
            self.transport.abort()

    @property
    def _has_open_body(self) -> bool:
        """Whether the rest of a body is missing and the response to its request has not started."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline

    def _refuse(self, refusal: RefusalResponse) -> None:
        """Write and log the last response on this connection."""
        request_id = self._get_request_id()
        if self._has_open_body:
            self.cycle.scope["state"]["closed_status"] = int(refusal.status)
        client = self.client[0] if self.client else "-"
        fields = telemetry.make_log_fields(request_id=request_id, client=client, problem=refusal.slug)
        log.info("%d %s %s %s: %s", refusal.status, request_id, client, refusal.slug, refusal.reason, extra=fields)
        self.transport.write(refusal.encode(request_id, self.server_state.default_headers))

    def _get_request_id(self) -> str:
        """Return the id of the request that is being read: the one assigned by the application, or else a new one."""
        scope = cast("Scope | None", self.scope)
        if scope is None:
            return choose_request_id("")
        return scope["state"].get("request_id") or choose_request_id(get_header(scope, b"x-request-id"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all unanswered requests that the connection is lost. uvicorn notifies only the last one."""
        for cycle in self._open_cycles:
            _notify_of_disconnect(cycle)
        self._open_cycles = ()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Start a request after the parser has read its head. Raises HeadError to refuse the request."""
        self._framing_bytes = 0
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # `_parse` feeds the head again, without the Upgrade header.
            return
        version = self.parser.get_http_version()
        check_head(version, self.parser.get_method(), self.url, self.headers)
        if len(self._open_cycles) >= MAX_PIPELINED_REQUESTS:
            raise HeadError(f"The connection has more than {MAX_PIPELINED_REQUESTS} unanswered requests.")
        check_framing_headers(version, self.headers)
        if version == "1.0":
            # HTTP/1.0 has no interim responses (RFC 9110, 10.1.1), so the client does not wait for one.
            self.expect_100_continue = False
            self.headers[:] = [header for header in self.headers if header[0] != b"expect"]
        super().on_headers_complete()
        self._open_cycles += (self.cycle,)
        self.flow.is_body_requested = False

    def on_response_complete(self) -> None:
        """Remove answered requests, and discard the rest of their bodies."""
        self._open_cycles = tuple(cycle for cycle in self._open_cycles if not cycle.response_complete)
        self._head_timer.start_waiting(self.loop.time(), has_partial_head=self._framing_bytes > 0)
        super().on_response_complete()
        self.flow.is_body_requested = False

    def on_body(self, body: bytes) -> None:
        """Append a piece of a body to the buffer of its request."""
        self._framing_bytes = 0
        if self.cycle.response_complete:
            return
        buffer: bytes | bytearray = self.cycle.body
        if isinstance(buffer, bytearray) and buffer:
            buffer += body
        else:
            # Usually, the buffer is empty and the piece is not copied.
            self.cycle.body = bytearray(buffer + body) if buffer else body  # type: ignore[assignment]
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Finish the body of a request after the parser has read all of it."""
        self._framing_bytes = 0
        self._head_timer.end_message()
        if not self.parser.should_upgrade():
            super().on_message_complete()
