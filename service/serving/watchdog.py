"""Notices that the device's thread is stuck or dead: the service is then not ready, and ends after a while.

A thread that waits in native code for a device that never answers can be neither interrupted nor replaced, and a
CUDA context that is lost stays lost: only a new process helps, and that is for whoever started this one to start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

EXIT_STATUS = 3
INTERVAL_SECONDS = 1.0

# What identifies the step that the device is at, None while nothing runs whose pace is known.
Pulse = Callable[[], Hashable | None]


def end_process(reason: str) -> None:
    """End this process at once, with a last line in the log."""
    log.critical("%s Ending with status %d, to be started again.", reason, EXIT_STATUS)
    logging.shutdown()
    os._exit(EXIT_STATUS)


class Watchdog:
    """Looks every second, in a thread of its own, whether the device's thread lives and gets on.

    Args:
        pulse: what changes with every batch of windows
        alive: whether the device's thread lives
        batch_seconds: how long `pulse` may stay the same before the thread counts as stuck
        grace_seconds: how long that, or its death, may last before `end` is called with the reason
        device: what it is called, where there are several
    """

    def __init__(  # noqa: PLR0913
        self,
        pulse: Pulse,
        alive: Callable[[], bool],
        *,
        batch_seconds: float,
        grace_seconds: float,
        device: str = "the device",
        end: Callable[[str], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pulse, self._alive, self._end, self._clock = pulse, alive, end, clock
        self._device = device
        self._batch_seconds, self._grace_seconds = batch_seconds, grace_seconds
        self._seen: Hashable | None = None
        self._lost = ""
        self._looked = clock()
        self._still = self._troubled = 0.0
        self._problem: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why the device cannot be used, one sentence; None while it can."""
        return self._problem

    @property
    def _name(self) -> str:
        """As a sentence begins."""
        return self._device[0].upper() + self._device[1:]

    def start(self) -> None:
        self._looked = self._clock()
        self._thread.start()

    def stop(self) -> None:
        """Look no more: what happens to the device's thread from now on is meant to."""
        self._stopped.set()

    def give_up(self, reason: str) -> None:
        """The device is known to be lost for this process."""
        self._lost = reason

    def check(self) -> None:
        """Look once."""
        now = self._clock()
        # If the whole process was stopped for a while, the device was as well.
        passed, self._looked = min(now - self._looked, 5 * INTERVAL_SECONDS), now
        trouble = self._trouble(passed)
        if trouble != self._problem and trouble is not None:
            log.error("%s", trouble)
        elif trouble is None and self._problem is not None:
            log.warning("%s gets on again.", self._name)
        self._problem = trouble
        self._troubled = self._troubled + passed if trouble else 0.0
        if trouble and self._troubled >= self._grace_seconds:
            self._end(trouble)

    def _trouble(self, passed: float) -> str | None:
        pulse = self._pulse()
        self._still = self._still + passed if pulse is not None and pulse == self._seen else 0.0
        self._seen = pulse
        if self._lost:
            return self._lost
        if not self._alive():
            return f"The thread that owns {self._device} has died."
        if self._still > self._batch_seconds:
            return f"{self._name} is stuck: one batch of windows has taken more than {self._batch_seconds:g} s."
        return None

    def _loop(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            self.check()
