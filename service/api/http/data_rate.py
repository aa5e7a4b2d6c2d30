"""Minimum data rates and time limits for clients."""

from __future__ import annotations

import math
from typing import NamedTuple


class SlowClientLimits(NamedTuple):
    """Limits that define which clients are too slow.

    head_seconds      time limit for a TLS handshake, for receiving a complete request head after the connection was
                      opened, and for receiving a later head after its first byte
    bytes_per_second  minimum rate at which the client must send a body and receive a response
    window_seconds    time window over which the rate is averaged
    """

    head_seconds: float = 20.0
    bytes_per_second: float = 4096
    window_seconds: float = 30.0


class HeadTimer:
    """Time limits for the next request head of a connection. All times are those of the event loop clock, in seconds.

    The first head must be complete within `head_seconds` after the connection was opened. A connection that has been
    used may be idle for longer. From the first byte of a later head, the same limit applies as for the first head.

    waiting_since  time at which the connection began to wait for the next request head
    """

    def __init__(self, now: float) -> None:
        self.waiting_since = now
        # Time at which the time limit for the current head began, and time at which the client was last active.
        self._head_start: float | None = now
        self._last_active = now

    def start_waiting(self, now: float, *, has_partial_head: bool) -> None:
        """Begin to wait for the next head after a response. The client may already have sent the first part of it."""
        self.waiting_since = self._last_active = now
        self._head_start = now if has_partial_head else None

    def count_bytes(self, now: float) -> None:
        """Register the arrival of bytes."""
        self._last_active = now
        if self._head_start is None:
            self._head_start = now

    def end_message(self) -> None:
        """Register the end of a request. Bytes that arrive later belong to the next head."""
        self._head_start = None

    def is_expired(self, limits: SlowClientLimits, idle_seconds: float, now: float) -> bool:
        """Return whether the client takes too long to send the next head, or has been idle for `idle_seconds`."""
        if self._head_start is None:
            return now - self._last_active >= idle_seconds
        return now - self._head_start >= limits.head_seconds


class DataRate:
    """Data rate in one direction of a connection, measured in consecutive time windows."""

    def __init__(self) -> None:
        self._window_start: float | None = None
        self._window_start_bytes, self._outstanding_bytes = 0, math.inf

    def reset(self) -> None:
        """Start a new window at the next call to `is_too_low`."""
        self._window_start = None

    def is_too_low(
        self, limits: SlowClientLimits, now: float, transferred_bytes: int | None, outstanding_bytes: float = math.inf
    ) -> bool:
        """Return whether a window has just ended and too few bytes were transferred in it.

        If a window has ended, the next one begins.

        transferred_bytes  total number of bytes transferred so far; None if unknown, in which case the result is False
        outstanding_bytes  number of bytes still to be transferred; if this number is less than the minimum rate
                           requires when a window starts, only these bytes must be transferred
        """
        if transferred_bytes is None:
            return False
        if self._window_start is None:
            self._window_start, self._window_start_bytes, self._outstanding_bytes = (
                now,
                transferred_bytes,
                outstanding_bytes,
            )
        if now - self._window_start < limits.window_seconds:
            return False
        required_bytes = min(limits.bytes_per_second * limits.window_seconds, self._outstanding_bytes)
        is_slow = transferred_bytes - self._window_start_bytes < required_bytes
        self._window_start, self._window_start_bytes, self._outstanding_bytes = (
            now,
            transferred_bytes,
            outstanding_bytes,
        )
        return is_slow
