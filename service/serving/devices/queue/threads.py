"""Threads that run the jobs of a queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error
from service.serving.devices.queue.job import Job

log = logging.getLogger(__name__)


class JobThreads:
    """Threads that run jobs one after the other until `take` returns None. A failed job does not end its thread.

    initializer  function that each thread calls before its first job
    """

    def __init__(
        self,
        name: str,
        take: Callable[[], Job[Any] | None],
        thread_count: int = 1,
        initializer: Callable[[], None] = lambda: None,
    ) -> None:
        self._take, self._initializer = take, initializer
        self._threads = [threading.Thread(target=self._loop, name=name, daemon=True) for _ in range(thread_count)]

    @property
    def is_alive(self) -> bool:
        """Whether any thread is running."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until all threads have ended; return whether they have."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not self.is_alive

    def _loop(self) -> None:
        self._initializer()
        while (job := self._take()) is not None:
            try:
                job.run()
            except StackSegError as error:
                job.fail(error)
            except Exception as error:
                translated_error = translate_error(error)
                if translated_error is error:
                    log.exception("unexpected error in a job")
                job.fail(translated_error)
            # Free the volume and the labels of the job now, because it may be hours until the next job.
            del job
