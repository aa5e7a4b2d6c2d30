"""Progress of work that may take long, such as loading a model: told in the log, and to whoever asks meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A step that takes longer is logged, and again whenever its time has doubled.
LONG_SECONDS = 5.0

log = logging.getLogger(__name__)


class Progress:
    """Steps of one piece of work, called `title` in the log. Any thread may ask for the step that is in progress."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._steps: list[tuple[str, float]] = []

    def __str__(self) -> str:
        """Return the steps and the seconds of the innermost: `way 2 of 9: building (for 12 s)`; "" between steps."""
        steps = list(self._steps)
        names = ": ".join(name for name, _began in steps)
        return f"{names} (for {time.monotonic() - steps[-1][1]:.0f} s)" if steps else ""

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Collect every `step` within the block; other threads take part where they run in a copy of its context."""
        token = _followed.set(self)
        try:
            yield
        finally:
            _followed.reset(token)

    @contextmanager
    def step(self, name: str, long_seconds: float = LONG_SECONDS) -> Iterator[None]:
        """Name what the block does."""
        entry, ended = (name, time.monotonic()), threading.Event()
        self._steps.append(entry)
        threading.Thread(target=self._log_while, args=(entry, ended, long_seconds), daemon=True).start()
        try:
            yield
        finally:
            self._steps.remove(entry)
            ended.set()

    def _log_while(self, entry: tuple[str, float], ended: threading.Event, seconds: float) -> None:
        while not ended.wait(seconds):
            # A step within this one tells more.
            if self._steps[-1:] == [entry]:
                log.info("%s", ": ".join(filter(None, (self._title, str(self)))))
            seconds = time.monotonic() - entry[1]


_followed: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name what the block does, for the log once that takes long, and for the `Progress` that is followed."""
    with (_followed.get() or Progress()).step(name):
        yield
