"""Logging, the progress of long-running steps, and the duration of each stage of a request."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request; "" outside requests, and in threads that do not copy the context of a request."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# A step that takes longer than this is logged, and is logged again each time its duration has doubled.
SLOW_STEP_SECONDS = 5.0

log = logging.getLogger(__name__)


def configure_logging(level: str, format_name: str) -> None:
    """Configure logging, including the warnings of libraries.

    level        name of the lowest level to log, such as "info"
    format_name  "text", or "json" for one JSON object per line
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format_name == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)


def make_log_fields(**values: Any) -> dict[str, Any]:
    """Return an `extra` argument for a logging call. It adds members to the JSON object of the log line."""
    return {"fields": values}


class JsonFormatter(logging.Formatter):
    """A formatter that writes each record as a JSON object.

    The members are the time (UTC), level, logger, message, request id, the values from `make_log_fields`, and the
    exception.
    """

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
    """Steps of one operation, which appears in the log as `title`. Any thread may query the current step."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._steps: list[tuple[str, float]] = []

    def __str__(self) -> str:
        """Format the current steps, such as `candidate 2 of 9: building (for 12 s)`; "" between steps.

        The duration is that of the innermost step.
        """
        steps = list(self._steps)
        names = ": ".join(name for name, _start_time in steps)
        return f"{names} (for {time.monotonic() - steps[-1][1]:.0f} s)" if steps else ""

    @contextmanager
    def record_steps(self) -> Iterator[None]:
        """Record every `step` within the block, including in threads that run in a copy of the block's context."""
        token = _current_progress.set(self)
        try:
            yield
        finally:
            _current_progress.reset(token)

    @contextmanager
    def step(self, name: str, log_after_seconds: float = SLOW_STEP_SECONDS) -> Iterator[None]:
        """Record the block as a step. If the step takes longer than `log_after_seconds`, log it."""
        entry, end_event = (name, time.monotonic()), threading.Event()
        self._steps.append(entry)
        threading.Thread(target=self._log_until, args=(entry, end_event, log_after_seconds), daemon=True).start()
        try:
            yield
        finally:
            self._steps.remove(entry)
            end_event.set()

    def _log_until(self, entry: tuple[str, float], end_event: threading.Event, wait_seconds: float) -> None:
        while not end_event.wait(wait_seconds):
            # Log only the innermost step, which is the most specific.
            if self._steps[-1:] == [entry]:
                log.info("%s", ": ".join(filter(None, (self._title, str(self)))))
            wait_seconds = time.monotonic() - entry[1]


_current_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Record the block as a step of the current `Progress`. If the step takes a long time, log it."""
    with (_current_progress.get() or Progress()).step(name):
        yield


class Stages:
    """Duration of each stage of one request in seconds, in the order of the stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start_time = time.perf_counter()

    @property
    def total_seconds(self) -> float:
        """Seconds since the start of the request."""
        return time.perf_counter() - self._start_time

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the duration of the block as stage `name`."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start_time)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to the duration of stage `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def update(self, seconds: Mapping[str, float]) -> None:
        """Add durations in seconds to several stages. The keys are the names of the stages."""
        for name, stage_seconds in seconds.items():
            self.add(name, stage_seconds)
