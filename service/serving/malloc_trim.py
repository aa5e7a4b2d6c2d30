"""Gives memory that was freed back to the system, which the C library would keep for later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from service.core import hardware

INTERVAL_SECONDS = 30.0
# Processor time since the last time below which hardly anything can have been freed.
WORK_SECONDS = 1.0


class MallocTrimmer:
    """Looks every half minute, in a thread of its own, whether the process has worked, and then gives memory back.

    Requests free arrays of all sizes between others that stay, and what is left free between these is kept: by and by
    the process would come to hold as much as its busiest moment ever took, and keep that through nights without any
    request. Taking the pages again costs each of them a fault, so this is done seldom, and never for nothing.

    Args:
        give_back: what is done
        worked: processor seconds of this process so far
        seconds: between two looks
    """

    def __init__(
        self,
        give_back: Callable[[], None] = hardware.return_pages,
        worked: Callable[[], float] = time.process_time,
        seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._give_back, self._worked, self._seconds = give_back, worked, seconds
        # Starting is work too, which has loaded and converted models.
        self._seen = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="trim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. To be called once or more, also if it was never started."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Look once."""
        if self._worked() - self._seen >= WORK_SECONDS:
            self._give_back()
            self._seen = self._worked()

    def _loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.check()
