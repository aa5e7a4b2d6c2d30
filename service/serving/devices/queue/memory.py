"""Memory admission for the jobs of one device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from service.serving.devices.queue.job import FreeMemory, ResourceNeeds


class JobMemory:
    """Decides whether a job fits into memory with the running jobs. Not thread-safe: `JobQueue` calls it with its lock.

    ask            returns the free memory; it must not raise, or jobs would wait forever
    fresh_seconds  how long a value is reused, as each job needs it several times; jobs that begin meanwhile are counted
    """

    def __init__(self, ask: Callable[[], FreeMemory] = FreeMemory, fresh_seconds: float = 0.0) -> None:
        self._ask, self._fresh_seconds = ask, fresh_seconds
        self._free, self._measured = FreeMemory(), -math.inf
        # Free memory while no job was running.
        self._capacity = FreeMemory()

    def fits(self, needs: ResourceNeeds, blocked: ResourceNeeds | None, running: Collection[ResourceNeeds]) -> bool:
        """Return whether a job fits into memory.

        blocked  an earlier job that waits for memory, if any; it must still fit when the largest running job has ended
        """
        free = self._read()
        if not running:
            self._capacity = free
            return True
        for kind, (now, capacity) in enumerate(zip(free, self._capacity, strict=True)):
            if now is None or capacity is None:
                continue
            need, reserved = needs[kind], [running_needs[kind] for running_needs in running]
            # Check both, because running jobs may not have allocated all of their memory yet, and other processes may
            # have allocated some.
            if need > now or need + sum(reserved) > capacity:
                return False
            if blocked is not None and need + blocked[kind] + sum(reserved) - max(reserved) > capacity:
                return False
        return True

    def invalidate(self) -> None:
        """Measure the free memory again at the next decision, because a job has ended."""
        self._measured = -math.inf

    def _read(self) -> FreeMemory:
        now = time.monotonic()
        if now - self._measured > self._fresh_seconds:
            self._free, self._measured = self._ask(), now
        return self._free
