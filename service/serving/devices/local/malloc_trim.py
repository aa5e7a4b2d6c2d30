"""Periodic release of freed memory that the C library caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from service.core.hardware import devices

# Time between two checks.
CHECK_INTERVAL_SECONDS = 30.0
# Minimum CPU time since the last trim. A process that has used less CPU time cannot have freed much memory.
MIN_CPU_SECONDS = 1.0


class MallocTrimmer:
    """A thread that periodically returns free pages to the operating system if the process has used CPU time.

    Arrays that requests release lie between arrays that remain allocated, so the C library retains their pages. Without
    trimming, an idle process would hold as much memory as at its peak. Trimming is infrequent, because using a trimmed
    page again costs a page fault.

    Args:
        trim: returns free pages to the operating system
        get_cpu_seconds: returns the CPU time of this process in seconds
        interval_seconds: time between two checks
    """

    def __init__(
        self,
        trim: Callable[[], None] = devices.trim_malloc,
        get_cpu_seconds: Callable[[], float] = time.process_time,
        interval_seconds: float = CHECK_INTERVAL_SECONDS,
    ) -> None:
        self._trim, self._get_cpu_seconds, self._interval_seconds = trim, get_cpu_seconds, interval_seconds
        # 0, so that the first check trims memory that was freed after loading and converting models.
        self._last_cpu_seconds = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="trim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. May be called repeatedly, even if `start` has not been called."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def trim_if_needed(self) -> None:
        """Trim if the process has used enough CPU time since the last trim."""
        if self._get_cpu_seconds() - self._last_cpu_seconds >= MIN_CPU_SECONDS:
            self._trim()
            self._last_cpu_seconds = self._get_cpu_seconds()

    def _loop(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            self.trim_if_needed()
