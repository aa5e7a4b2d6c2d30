"""API keys. The service stores only their hashes.

A key has 256 random bits and cannot be guessed, so one round of SHA-256 is enough. Slow hash functions are necessary
only for weak passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from service.api.messages.headers import ANONYMOUS
from service.core.errors import Unauthorized

KEY_PREFIX = "stackseg_"
HASH_PREFIX = "sha256:"


def generate_key() -> str:
    """Return a new random API key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the hash of a key in the format of the configuration file."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """Configured API keys, as hashes by key name. If there are none, every caller is `anonymous`."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)

    def authenticate(self, key: str | None) -> str:
        """Return the name of an API key. Raises Unauthorized if the key is missing or unknown.

        The hash of the key is compared with every configured hash in constant time, so that the duration of the
        comparison reveals nothing about the configured hashes.
        """
        if not self._hashes:
            return ANONYMOUS
        if key is None:
            raise Unauthorized(
                "This service requires an API key. Send your key as `Authorization: Bearer KEY` or `X-API-Key: KEY`. If"
                " you have no key, ask the operator of the service to create one with `stackseg key NAME`."
            )
        key_hash, caller = hash_key(key), None
        for name, known_hash in self._hashes.items():
            if hmac.compare_digest(key_hash, known_hash):
                caller = name
        if caller is None:
            raise Unauthorized(
                "The API key is unknown. Check the key for typing errors. If there are none, the key may have been"
                " revoked: ask the operator of the service for a new key."
            )
        return caller
