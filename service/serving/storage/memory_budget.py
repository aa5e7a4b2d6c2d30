"""A limit of the memory that all requests together take for one purpose."""

from __future__ import annotations

import threading


class MemoryBudget:
    """A number of bytes that requests share. Safe to use from threads."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        """Take bytes from the budget, to be released later; return False, and take none, if there are fewer."""
        with self._lock:
            if nbytes > self._free:
                return False
            self._free -= nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give reserved bytes back."""
        with self._lock:
            self._free += nbytes
