"""Who may use the service and how much of it: API keys, known by their hashes only, with a rate and a number at a time.

A key is 256 random bits, so one round of SHA-256 hides it: there is nothing to guess that a slow hash would protect.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from service.core.errors import RateLimited, Unauthorized

ANONYMOUS = "anonymous"
PREFIX = "stackseg_"
SCHEME = "sha256:"


def new_key() -> str:
    """A key that nobody has seen."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What the configuration holds of a key."""
    return SCHEME + hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """The keys that are let in, name -> hash. Without any, everyone is let in as `anonymous`."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)

    def caller(self, key: str | None) -> str:
        """The name of the key that was shown. Raises Unauthorized.

        Every known hash is compared, each in constant time: how long it takes tells nothing about any of them.
        """
        if not self._hashes:
            return ANONYMOUS
        if key is None:
            raise Unauthorized(
                "This service asks for an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`. Its operator"
                " makes keys with `stackseg key NAME`."
            )
        shown, found = hash_of(key), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(shown, known):
                found = name
        if found is None:
            raise Unauthorized("The API key is not known here: it was mistyped, or its operator has taken it back.")
        return found


class RateLimit:
    """What one caller may still do. For use in one thread, that of the event loop.

    Args:
        per_minute: requests in a minute, all of which may come at once; 0: any number
        at_once: requests at the same time; 0: any number
    """

    def __init__(self, per_minute: int, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._at_once, self._clock = per_minute, at_once, clock
        self._left = float(per_minute)
        self._seen = clock()
        self._running = 0

    def spend(self) -> None:
        """Count one request. Raises RateLimited with the seconds after which the next one will be let in."""
        if not self._per_minute:
            return
        now, pace = self._clock(), self._per_minute / 60
        self._left = min(self._left + (now - self._seen) * pace, float(self._per_minute))
        self._seen = now
        if self._left < 1:
            message = f"This key may send {self._per_minute} requests a minute, and has; wait and send it again."
            raise RateLimited(message, math.ceil((1 - self._left) / pace))
        self._left -= 1

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count one request that is being worked on, for the time of the block. Raises RateLimited."""
        if self._at_once and self._running >= self._at_once:
            message = f"{self._running} requests of this key are being worked on, and no more may; wait for one to end."
            raise RateLimited(message, 1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
