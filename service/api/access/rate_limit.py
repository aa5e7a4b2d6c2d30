"""Rate limits of callers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.api.messages.headers import ANONYMOUS
from service.core.errors import RateLimited
from service.core.sections.serving import Access


class RateLimit:
    """Token bucket and concurrency limit of one caller. For use in one thread, that of the event loop.

    Args:
        per_minute: requests in a minute, all of which may come at once; 0: any number
        at_once: requests at the same time; 0: any number
    """

    def __init__(self, per_minute: int, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._at_once, self._clock = per_minute, at_once, clock
        self._tokens = float(per_minute)
        self._refilled = clock()
        self._running = 0

    def count_request(self) -> None:
        """Take one token. Raises RateLimited with the seconds until there is one again."""
        if not self._per_minute:
            return
        now, per_second = self._clock(), self._per_minute / 60
        self._tokens = min(self._tokens + (now - self._refilled) * per_second, float(self._per_minute))
        self._refilled = now
        if self._tokens < 1:
            message = f"This key may send {self._per_minute} requests a minute, and has; wait and send it again."
            raise RateLimited(message, math.ceil((1 - self._tokens) / per_second))
        self._tokens -= 1

    @contextmanager
    def hold_slot(self) -> Iterator[None]:
        """Count one running request for the time of the block. Raises RateLimited where too many run."""
        if self._at_once and self._running >= self._at_once:
            message = f"{self._running} requests of this key are being worked on, and no more may; wait for one to end."
            raise RateLimited(message, 1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def make_rate_limits(access: Access) -> dict[str, RateLimit]:
    """Return the rate limit of each caller by its name."""
    limits = access.requests_per_minute, access.requests_at_once
    return {name: RateLimit(*limits) for name in (*access.keys, ANONYMOUS)}
