from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from service.core import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is written by a logger of its own, in JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JsonFormatter())
    logger = logging.getLogger("test.logs")
    logger.addHandler(handler)
    logger.propagate = False
    yield written
    logger.removeHandler(handler)


def test_every_line_is_an_object_with_what_was_added(stream: io.StringIO) -> None:
    log = logging.getLogger("test.logs")
    log.warning("%d windows\nof %s", 3, "nuclei", extra=logs.fields(model="nuclei", stages={"read": 1.5}))
    log.warning("plain")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["logger"]) == ("3 windows\nof nuclei", "warning", "test.logs")
    assert (first["model"], first["stages"]) == ("nuclei", {"read": 1.5})
    assert first["time"].endswith("+00:00")
    assert second.keys() == {"time", "level", "logger", "message"}


def test_line_within_a_request_carries_its_number(stream: io.StringIO) -> None:
    token = logs.request_id.set("abc")
    logging.getLogger("test.logs").error("inside")
    logs.request_id.reset(token)
    assert json.loads(stream.getvalue())["request_id"] == "abc"


def test_exception_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        int("broken")
    except ValueError:
        logging.getLogger("test.logs").exception("it failed")
    line = json.loads(stream.getvalue())
    assert "ValueError: invalid literal" in line["exception"]
    assert "Traceback" in line["exception"]


def test_warning_of_a_library_is_a_line_as_well() -> None:
    code = """
import warnings
from service.core.logs import configure_logging
configure_logging("info", "json")
warnings.warn("an option is deprecated", FutureWarning)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    line = json.loads(ended.stderr)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "FutureWarning: an option is deprecated" in line["message"]
