"""Minimum data rates and time limits for clients."""

from __future__ import annotations

import math
from typing import NamedTuple


class SlowClientLimits(NamedTuple):
    """Limits beyond which a client counts as too slow.

    head_seconds      time limit for a TLS handshake, and for a complete request head after connecting or after the
                      previous response
    bytes_per_second  minimum rate at which the client must send a body and receive a response
    window_seconds    time window over which the rate is averaged
    """

    head_seconds: float = 20.0
    bytes_per_second: float = 4096
    window_seconds: float = 30.0


class DataRate:
    """The data rate of one direction of a connection, measured in consecutive time windows."""

    def __init__(self) -> None:
        self._window_start: float | None = None
        self._transferred, self._outstanding = 0, math.inf

    def reset(self) -> None:
        """Start a new window at the next call of `is_too_low`."""
        self._window_start = None

    def is_too_low(
        self, limits: SlowClientLimits, now: float, transferred: int | None, outstanding: float = math.inf
    ) -> bool:
        """Return whether a window has just ended with too few transferred bytes. The next window then begins.

        transferred  total number of bytes transferred so far; None if unknown, then the rate is not judged
        outstanding  bytes still to be transferred; a window that starts with fewer bytes than the minimum rate demands
                     only has to transfer these
        """
        if transferred is None:
            return False
        if self._window_start is None:
            self._window_start, self._transferred, self._outstanding = now, transferred, outstanding
        if now - self._window_start < limits.window_seconds:
            return False
        required_bytes = min(limits.bytes_per_second * limits.window_seconds, self._outstanding)
        is_slow = transferred - self._transferred < required_bytes
        self._window_start, self._transferred, self._outstanding = now, transferred, outstanding
        return is_slow
