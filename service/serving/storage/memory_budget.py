"""Limits on memory and disk space that concurrent requests share."""

from __future__ import annotations

import threading
from collections import Counter


class MemoryBudget:
    """A limited number of bytes that concurrent requests share. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._free_bytes = nbytes
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes until `release` is called. If too few bytes are left, reserve nothing and return False."""
        with self._lock:
            if nbytes > self._free_bytes:
                return False
            self._free_bytes -= nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Return reserved bytes to the budget."""
        with self._lock:
            self._free_bytes += nbytes


class ClientShares:
    """The bytes of a limited resource that each client uses. Not thread-safe.

    A client cannot use more bytes than it leaves free for other clients (dynamic thresholds, Choudhury and Hahne 1998).
    A single client gets at most half of the bytes, so there are always some for another client.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes: Counter[str] = Counter()

    def has_room(self, client: str, nbytes: int) -> bool:
        """Return whether a client can use another `nbytes`."""
        free_bytes = self.limit_bytes - self.used_bytes.total() - nbytes
        return self.used_bytes[client] + nbytes <= free_bytes

    def add(self, client: str, nbytes: int) -> None:
        """Count bytes that a client begins to use. Pass a negative number for bytes that the client releases."""
        self.used_bytes[client] += nbytes
        if not self.used_bytes[client]:
            del self.used_bytes[client]


class FairMemoryBudget:
    """A number of bytes that clients share. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._shares = ClientShares(nbytes)
        self._lock = threading.Lock()

    def reserve(self, client: str, nbytes: int) -> bool:
        """Reserve bytes until `release` is called. If the client would exceed its share, return False."""
        with self._lock:
            if not self._shares.has_room(client, nbytes):
                return False
            self._shares.add(client, nbytes)
            return True

    def release(self, client: str, nbytes: int) -> None:
        """Return bytes that a client has reserved."""
        with self._lock:
            self._shares.add(client, -nbytes)
