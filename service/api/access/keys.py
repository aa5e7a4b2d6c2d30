"""API keys, of which the service knows only hashes.

A key is 256 random bits, so one round of SHA-256 hides it: there is nothing to guess that a slow hash would protect.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from service.api.messages.headers import ANONYMOUS
from service.core.errors import Unauthorized

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
