"""The watchdog of a device's thread: if it is stuck or dead, the service is not ready, and ends after a while.

A thread that waits in native code for a device that never answers can be neither interrupted nor replaced, and a lost
CUDA context stays lost: only a new process helps, which the supervisor of this one has to start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from service.core.sections import serving as sections

log = logging.getLogger(__name__)

EXIT_STATUS = 3
INTERVAL_SECONDS = 1.0


def end_process(reason: str) -> None:
    """End this process at once, after a last line in the log."""
    log.critical("%s Ending with status %d, to be started again.", reason, EXIT_STATUS)
    logging.shutdown()
    os._exit(EXIT_STATUS)


class Watched(Protocol):
    """A device's thread, such as that of `WindowBatcher`."""

    @property
    def pulse(self) -> Hashable | None:
        """A value that changes with every batch of windows; None while nothing can be judged by it."""

    @property
    def alive(self) -> bool:
        """Whether the thread is alive."""


class Watchdog:
    """A thread that checks every second whether the device's thread is alive and makes progress.

    `problem` says why the device cannot be used, in one sentence; None while it can.

    Args:
        watched: the device's thread
        settings: how long a batch may take, and how long the thread may be stuck or dead before `end` is called
        device: the device in messages
        end: called with the reason why the process has to end
    """

    def __init__(
        self,
        watched: Watched,
        settings: sections.Watchdog,
        *,
        device: str = "the device",
        end: Callable[[str], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched, self._end, self._clock = watched, end, clock
        self._device, self._subject = device, f"{device[0].upper()}{device[1:]}"
        self._batch_seconds, self._grace_seconds = settings.batch_seconds, settings.grace_seconds
        self._last_pulse: Hashable | None = None
        self._lost = ""
        self._checked = clock()
        self._still_seconds = self._problem_seconds = 0.0
        self.problem: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)

    def start(self) -> None:
        self._checked = self._clock()
        self._thread.start()

    def stop(self) -> None:
        """Check no more: from now on the device's thread ends on purpose."""
        self._stopped.set()

    def report_lost(self, reason: str) -> None:
        """Count the device as lost for this process."""
        self._lost = reason

    def check(self) -> None:
        """Check the device's thread once."""
        now = self._clock()
        # If the whole process was stopped for a while, the device was as well.
        passed, self._checked = min(now - self._checked, 5 * INTERVAL_SECONDS), now
        problem = self._find_problem(passed)
        if problem != self.problem and problem is not None:
            log.error("%s", problem)
        elif problem is None and self.problem is not None:
            log.warning("%s gets on again.", self._subject)
        self.problem = problem
        self._problem_seconds = self._problem_seconds + passed if problem else 0.0
        if problem and self._problem_seconds >= self._grace_seconds:
            self._end(problem)

    def _find_problem(self, passed: float) -> str | None:
        pulse = self._watched.pulse
        still = pulse is not None and pulse == self._last_pulse
        self._still_seconds = self._still_seconds + passed if still else 0.0
        self._last_pulse = pulse
        if self._lost:
            return self._lost
        if not self._watched.alive:
            return f"The thread that owns {self._device} has died."
        if self._still_seconds > self._batch_seconds:
            return f"{self._subject} is stuck: one batch of windows has taken more than {self._batch_seconds:g} s."
        return None

    def _loop(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            try:
                self.check()
            except Exception:
                # Without this thread nothing would notice a device that is stuck.
                log.exception("%s cannot be checked", self._subject)
