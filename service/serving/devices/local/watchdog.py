"""The watchdog of a device's thread. If the thread is stuck or dead, the service becomes unready and later exits.

A thread that waits in native code for an unresponsive device can be neither interrupted nor replaced, and a lost CUDA
context stays lost. Only a new process can use the device again. The supervisor of this process has to start it.
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
# Time between two checks.
CHECK_INTERVAL_SECONDS = 1.0


def exit_process(reason: str) -> None:
    """Log the reason and exit immediately."""
    log.critical("%s Exiting with status %d, so that the supervisor restarts the service.", reason, EXIT_STATUS)
    logging.shutdown()
    os._exit(EXIT_STATUS)


class WatchedThread(Protocol):
    """The thread of a device, such as that of `WindowBatcher`."""

    @property
    def heartbeat(self) -> Hashable | None:
        """A value that changes with every batch of windows; None while no batch is being processed."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread is alive."""


class Watchdog:
    """A thread that checks every second whether the device's thread is alive and makes progress.

    `problem` explains in one sentence why the device is unavailable; it is None if the device is available.

    Args:
        watched_thread: the device's thread
        settings: maximum duration of a batch, and how long the thread may be stuck or dead before `on_exit` is called
        device: the name of the device in messages, such as "the device cuda:0"
        on_exit: called with the reason if the process has to exit
    """

    def __init__(
        self,
        watched_thread: WatchedThread,
        settings: sections.Watchdog,
        *,
        device: str = "the device",
        on_exit: Callable[[str], None] = exit_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched_thread, self._on_exit, self._clock = watched_thread, on_exit, clock
        self._device, self._subject = device, f"{device[0].upper()}{device[1:]}"
        self._max_batch_seconds, self._grace_seconds = settings.batch_seconds, settings.grace_seconds
        self._last_heartbeat: Hashable | None = None
        self._loss_reason = ""
        self._last_check_time = clock()
        self._stuck_seconds = self._unavailable_seconds = 0.0
        self.problem: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)

    def start(self) -> None:
        self._last_check_time = self._clock()
        self._thread.start()

    def stop(self) -> None:
        """Stop checking, because the device's thread is about to be stopped."""
        self._stopped.set()

    def report_loss(self, reason: str) -> None:
        """Mark the device as lost for the lifetime of this process."""
        self._loss_reason = reason

    def check_thread(self) -> None:
        """Check the device's thread once."""
        now = self._clock()
        # The whole process may have been suspended since the last check. That time must not count as being stuck.
        elapsed_seconds, self._last_check_time = min(now - self._last_check_time, 5 * CHECK_INTERVAL_SECONDS), now
        problem = self._find_problem(elapsed_seconds)
        if problem != self.problem and problem is not None:
            log.error("%s", problem)
        elif problem is None and self.problem is not None:
            log.warning("%s has recovered.", self._subject)
        self.problem = problem
        self._unavailable_seconds = self._unavailable_seconds + elapsed_seconds if problem else 0.0
        if problem and self._unavailable_seconds >= self._grace_seconds:
            self._on_exit(problem)

    def _find_problem(self, elapsed_seconds: float) -> str | None:
        heartbeat = self._watched_thread.heartbeat
        is_unchanged = heartbeat is not None and heartbeat == self._last_heartbeat
        self._stuck_seconds = self._stuck_seconds + elapsed_seconds if is_unchanged else 0.0
        self._last_heartbeat = heartbeat
        if self._loss_reason:
            return self._loss_reason
        if not self._watched_thread.is_alive:
            return f"The thread that owns {self._device} has died."
        if self._stuck_seconds > self._max_batch_seconds:
            return f"{self._subject} is stuck: a batch of windows has taken more than {self._max_batch_seconds:g} s."
        return None

    def _loop(self) -> None:
        while not self._stopped.wait(CHECK_INTERVAL_SECONDS):
            try:
                self.check_thread()
            except Exception:
                # Keep the thread running. Without it, a stuck device would go unnoticed.
                log.exception("%s cannot be checked", self._subject)
