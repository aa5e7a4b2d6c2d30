"""The threads in which requests are worked on. Each takes tasks one after the other and never dies of one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from service.core.errors import StackSegError

log = logging.getLogger(__name__)


class Task(Protocol):
    """What the worker runs; `fail` receives whatever `run` raised."""

    def run(self) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Worker:
    """Runs what `take` returns, in so many threads of its own, each until `take` returns None.

    Each thread calls `begin` first.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[], Task | None],
        threads: int = 1,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._take, self._begin = take, begin
        self._threads = [threading.Thread(target=self._loop, name=name, daemon=True) for _ in range(threads)]

    @property
    def alive(self) -> bool:
        """Whether any thread still is."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended; False if one has not after `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not self.alive

    def _loop(self) -> None:
        self._begin()
        while (task := self._take()) is not None:
            _run(task)
            del task  # holds the volume and the labels, and the next task may be hours away


def _run(task: Task) -> None:
    try:
        task.run()
    except StackSegError as error:
        task.fail(error)
    except Exception as error:
        log.exception("unexpected failure of a request")
        task.fail(error)
