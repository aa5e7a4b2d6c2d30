"""A memory limit that concurrent requests share."""

from __future__ import annotations

import threading


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
