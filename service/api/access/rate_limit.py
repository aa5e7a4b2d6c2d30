"""API keys, of which the service knows only hashes, and the rate limit of each.

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

from service.api.messages.headers import ANONYMOUS
from service.core.errors import RateLimited, Unauthorized

PREFIX = "stackseg_"
SCHEME = "sha256:"


def generate_key() -> str:
    """Return a new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the hash of a key, as the configuration holds it."""
    return SCHEME + hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """The known keys, as hashes by name. Without any, every caller is `anonymous`."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)

    def authenticate(self, key: str | None) -> str:
        """Return the name of a key. Raises Unauthorized.

        Every known hash is compared, each in constant time, so that the time taken tells nothing about any of them.
        """
        if not self._hashes:
            return ANONYMOUS
        if key is None:
            raise Unauthorized(
                "This service asks for an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`. Its operator"
                " makes keys with `stackseg key NAME`."
            )
        sent, caller = hash_key(key), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(sent, known):
                caller = name
        if caller is None:
            raise Unauthorized("The API key is not known here: it was mistyped, or its operator has taken it back.")
        return caller


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
