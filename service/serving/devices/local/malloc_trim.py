"""Periodic release of freed memory that the C library caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from service.core.hardware import devices

INTERVAL_SECONDS = 30.0
# Minimum CPU time since the last trim. A process that has worked less can have freed only little memory.
MIN_CPU_SECONDS = 1.0


class MallocTrimmer:
    """A thread that periodically returns free pages to the system if the process has worked.

    Requests free arrays between other arrays that remain allocated, and the C library keeps the pages in between.
    Without trimming, an idle process would hold as much memory as at its peak. Using a page again costs a page fault,
    so trimming is rare.

    Args:
        trim: returns free pages to the system
        cpu_seconds: returns the CPU time of this process in seconds
        seconds: seconds between two checks
    """

    def __init__(
        self,
        trim: Callable[[], None] = devices.trim_malloc,
        cpu_seconds: Callable[[], float] = time.process_time,
        seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._trim, self._cpu_seconds, self._seconds = trim, cpu_seconds, seconds
        # 0, so that the first check trims memory that was freed after loading and converting models.
        self._last_cpu_seconds = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="trim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. May be called repeatedly, and without `start`."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Trim if the process has worked since the last trim."""
        if self._cpu_seconds() - self._last_cpu_seconds >= MIN_CPU_SECONDS:
            self._trim()
            self._last_cpu_seconds = self._cpu_seconds()

    def _loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.check()
