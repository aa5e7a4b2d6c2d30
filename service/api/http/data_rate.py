"""Times and rates that clients must keep."""

from __future__ import annotations

import math
from typing import NamedTuple


class Patience(NamedTuple):
    """Limits of the time that clients are waited for.

    head_seconds      for a TLS handshake, and for a whole head after the connection or the previous answer
    bytes_per_second  of a body that is awaited, and of an answer that is sent
    window_seconds    over which these are averaged
    """

    head_seconds: float = 20.0
    bytes_per_second: float = 4096
    window_seconds: float = 30.0


class DataRate:
    """Bytes that have moved since the beginning of a window of time."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._moved, self._owed = 0, math.inf

    def reset(self) -> None:
        """Begin the next window with the next look."""
        self._began = None

    def is_too_low(self, patience: Patience, now: float, moved: int | None, owed: float = math.inf) -> bool:
        """Return whether a window has ended in which too little has moved; the next one begins then.

        `moved` counts all bytes so far; None where that is not known. Who had less to move, `owed` bytes at the
        beginning, must have moved those.
        """
        if moved is None:
            return False
        if self._began is None:
            self._began, self._moved, self._owed = now, moved, owed
        if now - self._began < patience.window_seconds:
            return False
        wanted = min(patience.bytes_per_second * patience.window_seconds, self._owed)
        slow = moved - self._moved < wanted
        self._began, self._moved, self._owed = now, moved, owed
        return slow
