"""Progress bar of a command, shown on standard error only if standard error is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class ProgressBar:
    """Progress bar that shows the current step and its progress."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def begin_step(self, name: str) -> None:
        """Show a step whose progress is unknown."""
        self._bar.bar_format = "{desc} ({elapsed})"
        self._bar.reset()
        self._bar.set_description_str(name)

    def show_windows(self, done: int, total: int) -> None:
        """Show the number of completed windows, and then the decoding step, whose progress is unknown."""
        if done == total:
            self.begin_step("decoding")
            return
        self._bar.bar_format, self._bar.total = None, total
        self._bar.update(done - self._bar.n)

    def show_step(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a step are complete."""
        if done == 0 or self._bar.total != total:
            self.begin_step(name)
        self._bar.bar_format, self._bar.total = None, total
        self._bar.update(done - self._bar.n)


@contextmanager
def show_progress() -> Iterator[ProgressBar]:
    """Show a progress bar for the duration of the context. Log records are printed above it."""
    with tqdm(disable=None, leave=False) as bar, logging_redirect_tqdm():
        yield ProgressBar(bar)
