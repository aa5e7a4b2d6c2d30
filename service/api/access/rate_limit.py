"""Rate and concurrency limits for each caller."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.api.messages.headers import ANONYMOUS
from service.core.errors import RateLimited
from service.core.sections.serving import Access


class RateLimit:
    """Token bucket and concurrency limit for one caller. Not thread-safe: use it only in the event loop.

    per_minute      maximum number of requests per minute, which may arrive in one burst; 0 for no limit
    max_concurrent  maximum number of requests that may run at the same time; 0 for no limit
    clock           function that returns the time in seconds
    """

    def __init__(self, per_minute: int, max_concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._max_concurrent, self._clock = per_minute, max_concurrent, clock
        self._tokens = float(per_minute)
        self._refilled_at = clock()
        self._running_count = 0

    def count_request(self) -> None:
        """Consume one token. Raises RateLimited with the seconds until the next token if no token is available."""
        if not self._per_minute:
            return
        now, tokens_per_second = self._clock(), self._per_minute / 60
        self._tokens = min(self._tokens + (now - self._refilled_at) * tokens_per_second, float(self._per_minute))
        self._refilled_at = now
        if self._tokens < 1:
            message = (
                f"Too many requests: at most {self._per_minute} per minute are allowed. Wait a moment, then try again."
            )
            raise RateLimited(message, math.ceil((1 - self._tokens) / tokens_per_second))
        self._tokens -= 1

    @contextmanager
    def hold_slot(self) -> Iterator[None]:
        """Count one running request for the duration of the block. Raises RateLimited if too many are running."""
        if self._max_concurrent and self._running_count >= self._max_concurrent:
            message = (
                f"{self._running_count} requests are already in progress, which is the maximum. Wait until one"
                " of them has finished, then try again."
            )
            raise RateLimited(message, 1)
        self._running_count += 1
        try:
            yield
        finally:
            self._running_count -= 1


def make_rate_limits(access: Access) -> dict[str, RateLimit]:
    """Return a rate limit for each caller, by caller name."""
    limits = access.requests_per_minute, access.requests_at_once
    return {name: RateLimit(*limits) for name in (*access.keys, ANONYMOUS)}
