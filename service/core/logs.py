"""The log: lines for people, or one JSON object per line for programs, with the request's id."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the running task answers; "" outside of requests, and in threads."""

TEXT = "%(asctime)s %(levelname)s %(message)s"


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
