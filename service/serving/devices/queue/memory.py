"""Admission control for the jobs of one device, based on the memory that they need."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from service.serving.devices.queue.job import FreeMemory, ResourceNeeds


class JobMemory:
    """Decides whether a job fits in memory together with the running jobs.

    Not thread-safe: `JobQueue` calls all methods with its lock held.

    query_free_memory  returns the free memory; it must not raise an exception, or jobs would wait forever
    max_age_seconds    time for which a measurement is reused, because each decision needs it several times; the needs
                       of jobs that start in the meantime are still considered
    """

    def __init__(self, query_free_memory: Callable[[], FreeMemory] = FreeMemory, max_age_seconds: float = 0.0) -> None:
        self._query_free_memory, self._max_age_seconds = query_free_memory, max_age_seconds
        self._free_memory, self._measurement_time = FreeMemory(), -math.inf
        # Free memory while no job was running.
        self._memory_capacity = FreeMemory()

    def fits(
        self, needs: ResourceNeeds, blocked_needs: ResourceNeeds | None, running_needs: Collection[ResourceNeeds]
    ) -> bool:
        """Return whether a job fits in memory.

        blocked_needs  needs of an earlier job that is waiting for memory, if any; that job must still fit when the
                       largest running job has ended
        running_needs  needs of each running job
        """
        free_memory = self._get_free_memory()
        if not running_needs:
            self._memory_capacity = free_memory
            return True
        for kind, (free_bytes, capacity_bytes) in enumerate(zip(free_memory, self._memory_capacity, strict=True)):
            if free_bytes is None or capacity_bytes is None:
                continue
            needed_bytes, running_bytes = needs[kind], [other[kind] for other in running_needs]
            # Check both limits, because running jobs may not have allocated all of their memory yet, and other
            # processes may have allocated some.
            if needed_bytes > free_bytes or needed_bytes + sum(running_bytes) > capacity_bytes:
                return False
            if (
                blocked_needs is not None
                and needed_bytes + blocked_needs[kind] + sum(running_bytes) - max(running_bytes) > capacity_bytes
            ):
                return False
        return True

    def invalidate(self) -> None:
        """Measure the free memory again at the next decision, because a job has ended."""
        self._measurement_time = -math.inf

    def _get_free_memory(self) -> FreeMemory:
        now = time.monotonic()
        if now - self._measurement_time > self._max_age_seconds:
            self._free_memory, self._measurement_time = self._query_free_memory(), now
        return self._free_memory
