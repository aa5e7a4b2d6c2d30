"""Memory limits that concurrent requests share."""

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


class FairMemoryBudget:
    """A number of bytes that clients share. Thread-safe.

    As in `ScratchSpace`, a client cannot reserve more bytes than it leaves free for other clients.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit_bytes = nbytes
        self._used_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reserve(self, client: str, nbytes: int) -> bool:
        """Reserve bytes until `release` is called. If the client would exceed its share, return False."""
        with self._lock:
            free_bytes = self._limit_bytes - self._used_bytes.total() - nbytes
            if self._used_bytes[client] + nbytes > free_bytes:
                return False
            self._used_bytes[client] += nbytes
            return True

    def release(self, client: str, nbytes: int) -> None:
        """Return bytes that a client has reserved."""
        with self._lock:
            self._used_bytes[client] -= nbytes
            if not self._used_bytes[client]:
                del self._used_bytes[client]
