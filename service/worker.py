"""The one thread that may touch a device. It takes tasks one after the other and never dies of one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from service.errors import StackSegError

log = logging.getLogger(__name__)


class Task(Protocol):
    """What the worker runs; `fail` receives whatever `run` raised."""

    def run(self) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Worker:
    """Runs what `take` returns, in a thread of its own, until `take` returns None."""

    def __init__(self, name: str, take: Callable[[], Task | None]) -> None:
        self._take = take
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; False if it has not after `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (task := self._take()) is not None:
            _run(task)
            del task  # holds the volume and the labels, and the next task may be hours away


def _run(task: Task) -> None:
    try:
        task.run()
    except StackSegError as error:
        task.fail(error)
    except Exception as error:
        log.exception("unexpected failure on the device")
        task.fail(error)
