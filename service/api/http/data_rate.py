"""Minimum data rates and time limits for clients."""

from __future__ import annotations

import math
from typing import NamedTuple


class SlowClientLimits(NamedTuple):
    """Limits that define which clients are too slow.

    head_seconds      time limit for a TLS handshake, and for receiving a complete request head after the connection was
                      opened or the previous response was sent
    bytes_per_second  minimum rate at which the client must send a body and receive a response
    window_seconds    time window over which the rate is averaged
    """

    head_seconds: float = 20.0
    bytes_per_second: float = 4096
    window_seconds: float = 30.0


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
