"""The threads in which the jobs of a queue run."""

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
    """Threads that run jobs, one after the other, until `take` returns None. A failed job ends no thread.

    begin  runs first in each thread
    """

    def __init__(
        self,
        name: str,
        take: Callable[[], Job[Any] | None],
        threads: int = 1,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._take, self._begin = take, begin
        self._threads = [threading.Thread(target=self._loop, name=name, daemon=True) for _ in range(threads)]

    @property
    def alive(self) -> bool:
        """Whether any thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended; return False if one has not after `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not self.alive

    def _loop(self) -> None:
        self._begin()
        while (job := self._take()) is not None:
            try:
                job.run()
            except StackSegError as error:
                job.fail(error)
            except Exception as error:
                known = translate_error(error)
                if known is error:
                    log.exception("unexpected failure of a request")
                job.fail(known)
            del job  # holds the volume and the labels, and the next job may be hours away
