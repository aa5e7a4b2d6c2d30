"""The memory that jobs of one device may take together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from service.serving.devices.queue.job import FreeMemory, Needs


class JobMemory:
    """Decides whether memory holds a job next to those that run. Not thread-safe: `JobQueue` calls it with its lock.

    ask            returns the free memory; it must not raise, or jobs would wait for ever
    fresh_seconds  how old that answer may be: every job asks several times, and memory given out since counts as used
    """

    def __init__(self, ask: Callable[[], FreeMemory] = FreeMemory, fresh_seconds: float = 0.0) -> None:
        self._ask, self._fresh_seconds = ask, fresh_seconds
        self._free, self._asked = FreeMemory(), -math.inf
        # Free memory when nothing ran.
        self._capacity = FreeMemory()

    def fits(self, needs: Needs, blocked: Needs | None, running: Collection[Needs]) -> bool:
        """Return whether memory holds a job now, and the blocked job as well once the largest running one is over."""
        free = self._read()
        if not running:
            self._capacity = free
            return True
        for kind, (now, capacity) in enumerate(zip(free, self._capacity, strict=True)):
            if now is None or capacity is None:
                continue
            need, held = needs[kind], [taken[kind] for taken in running]
            # Running jobs may not have taken all of their memory yet, and other processes may have taken some.
            if need > now or need + sum(held) > capacity:
                return False
            if blocked is not None and need + blocked[kind] + sum(held) - max(held) > capacity:
                return False
        return True

    def expire(self) -> None:
        """Ask again at the next decision: a job is over, and its memory is free."""
        self._asked = -math.inf

    def _read(self) -> FreeMemory:
        now = time.monotonic()
        if now - self._asked > self._fresh_seconds:
            self._free, self._asked = self._ask(), now
        return self._free
