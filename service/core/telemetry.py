"""What the process reports of its work: the log, the progress of long steps, and the seconds of each stage."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the running task answers; "" outside of requests, and in threads."""

TEXT = "%(asctime)s %(levelname)s %(message)s"
# A step that takes longer is logged, and again whenever its time has doubled.
LONG_SECONDS = 5.0

log = logging.getLogger(__name__)


def configure_logging(level: str, form: str, stream: IO[str] | None = None) -> None:
    """Write the log, and the warnings of libraries, to `stream` (None: standard error), as `text` or `json`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)


def fields(**values: Any) -> dict[str, Any]:
    """Return the `extra=` of a logging call that adds members to the JSON object of its line."""
    return {"fields": values}


class JsonFormatter(logging.Formatter):
    """Formats time (UTC), level, logger, message, the request's id, the members from `fields`, and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identifier := request_id.get():
            line["request_id"] = identifier
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


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


class Stages:
    """Seconds that each stage of one request took, in the order in which they happened."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self._began

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to stage `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def update(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of several stages."""
        for name, value in seconds.items():
            self.add(name, value)
