"""Progress of a command on standard error: a bar on a terminal, otherwise a log line per minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger("service.progress")

LOG_INTERVAL_SECONDS = 60.0


class ProgressBar:
    """Progress bar that shows the current step and its progress."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        # Name, completed parts and number of parts of the current step. The number is 0 if the progress is unknown.
        self._state = ("starting", 0, 0)

    def describe(self) -> str:
        """Return the current step, and its progress if known."""
        name, done, total = self._state
        return f"{name}: {done} of {total} ({done / total:.0%})" if total else name

    def begin_step(self, name: str) -> None:
        """Show a step whose progress is unknown."""
        self._state = (name, 0, 0)
        self._bar.bar_format = "{desc} ({elapsed})"
        self._bar.reset()
        self._bar.set_description_str(name)

    def show_windows(self, done: int, total: int) -> None:
        """Show the number of completed windows, and then the decoding step, whose progress is unknown."""
        if done == total:
            self.begin_step("decoding")
            return
        self._state = (self._state[0], done, total)
        self._bar.bar_format, self._bar.total = None, total
        self._bar.update(done - self._bar.n)

    def show_step(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a step are complete."""
        if done == 0 or self._bar.total != total:
            self.begin_step(name)
        self._state = (name, done, total)
        self._bar.bar_format, self._bar.total = None, total
        self._bar.update(done - self._bar.n)


@contextmanager
def show_progress(log_interval_seconds: float = LOG_INTERVAL_SECONDS) -> Iterator[ProgressBar]:
    """Show a progress bar for the duration of the context. Log records are printed above it.

    If standard error is not a terminal, log the progress regularly instead, with level info.
    """
    ended = threading.Event()
    with tqdm(disable=None, leave=False) as bar, logging_redirect_tqdm():
        progress = ProgressBar(bar)

        def log_regularly() -> None:
            while not ended.wait(log_interval_seconds):
                log.info("%s", progress.describe())

        thread = threading.Thread(target=log_regularly, name="progress", daemon=True)
        if bar.disable:
            thread.start()
        try:
            yield progress
        finally:
            ended.set()
            if bar.disable:
                thread.join()
