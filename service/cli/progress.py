"""Progress of a command, on standard error where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class ProgressBar:
    """One line that tells what is being done, and how much of it is."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def begin(self, name: str) -> None:
        """Show a step of which no end can be told yet."""
        self._bar.bar_format = "{desc} ({elapsed})"
        self._bar.reset()
        self._bar.set_description_str(name)

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` windows are done; decoding follows, of which no end can be told."""
        if done == total:
            self.begin("decoding")
            return
        self._bar.bar_format, self._bar.total = None, total
        self._bar.update(done - self._bar.n)

    def count(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a step are done."""
        if done == 0 or self._bar.total != total:
            self.begin(name)
        self._bar.bar_format, self._bar.total = None, total
        self._bar.update(done - self._bar.n)


@contextmanager
def show_progress() -> Iterator[ProgressBar]:
    """Show a bar, which is gone after the block; log records appear above it."""
    with tqdm(disable=None, leave=False) as bar, logging_redirect_tqdm():
        yield ProgressBar(bar)
