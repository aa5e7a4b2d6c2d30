"""A shared memory limit for concurrent requests."""

from __future__ import annotations

import threading


class MemoryBudget:
    """A number of bytes that requests share. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes until `release`. Return False, and reserve nothing, if not enough bytes are left."""
        with self._lock:
            if nbytes > self._free:
                return False
            self._free -= nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Return reserved bytes to the budget."""
        with self._lock:
            self._free += nbytes
