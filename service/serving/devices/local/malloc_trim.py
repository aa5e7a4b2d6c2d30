"""Memory that was freed, and that the C library keeps, goes back to the system."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from service.core.hardware import devices

INTERVAL_SECONDS = 30.0
# Processor time since the last time below which hardly anything can have been freed.
WORK_SECONDS = 1.0


class MallocTrimmer:
    """A thread that checks every half minute whether the process has worked, and then returns free pages.

    Requests free arrays between others that stay, and the C library keeps the pages between these. Without trimming the
    process would hold as much as its busiest moment took, also when idle. Each page that is used again costs a page
    fault, so trimming is rare.

    Args:
        trim: returns free pages to the system
        cpu_seconds: returns the processor seconds of this process so far
        seconds: between two checks
    """

    def __init__(
        self,
        trim: Callable[[], None] = devices.return_pages,
        cpu_seconds: Callable[[], float] = time.process_time,
        seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._trim, self._cpu_seconds, self._seconds = trim, cpu_seconds, seconds
        # The first check trims what loading and converting models has freed.
        self._last_cpu_seconds = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="trim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. May be called twice, and without `start`."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Trim if the process has worked since the last time."""
        if self._cpu_seconds() - self._last_cpu_seconds >= WORK_SECONDS:
            self._trim()
            self._last_cpu_seconds = self._cpu_seconds()

    def _loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.check()
