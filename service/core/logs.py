"""The log: lines for people, or one JSON object per line for programs, with the number of the request it is about."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

# The number of the request that the running task answers; "" outside of requests, and in threads.
request_id: ContextVar[str] = ContextVar("request_id", default="")

TEXT = "%(asctime)s %(levelname)s %(message)s"


def set_up(level: str, form: str, stream: IO[str] | None = None) -> None:
    """Send what is logged to `stream` (None: standard error), as `text` or `json`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=` of a logging call: members of the JSON object, beside those that every line has."""
    return {"fields": values}


class Json(logging.Formatter):
    """time (UTC), level, logger, message; request_id within a request; exception; and what `fields` added."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if number := request_id.get():
            line["request_id"] = number
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
