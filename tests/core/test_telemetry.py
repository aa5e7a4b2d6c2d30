from __future__ import annotations

import contextvars
import io
import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from logging.handlers import QueueHandler

import pytest

from service.core import telemetry
from service.core.telemetry import Progress, step


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is written by a logger of its own, in JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(telemetry.JsonFormatter())
    logger = logging.getLogger("test.logs")
    logger.addHandler(handler)
    logger.propagate = False
    yield written
    logger.removeHandler(handler)


def test_every_line_is_an_object_with_what_was_added(stream: io.StringIO) -> None:
    log = logging.getLogger("test.logs")
    log.warning("%d windows\nof %s", 3, "nuclei", extra=telemetry.fields(model="nuclei", stages={"read": 1.5}))
    log.warning("plain")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["logger"]) == ("3 windows\nof nuclei", "warning", "test.logs")
    assert (first["model"], first["stages"]) == ("nuclei", {"read": 1.5})
    assert first["time"].endswith("+00:00")
    assert second.keys() == {"time", "level", "logger", "message"}


def test_line_within_a_request_carries_its_number(stream: io.StringIO) -> None:
    token = telemetry.request_id.set("abc")
    logging.getLogger("test.logs").error("inside")
    telemetry.request_id.reset(token)
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
from service.core.telemetry import configure_logging
configure_logging("info", "json")
warnings.warn("an option is deprecated", FutureWarning)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    line = json.loads(ended.stderr)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "FutureWarning: an option is deprecated" in line["message"]


def test_whoever_asks_is_told_the_steps_and_the_seconds_of_the_innermost():
    progress = Progress()
    assert not str(progress)
    with progress.follow():
        with step("racing"):
            assert str(progress) == "racing (for 0 s)"
            with suppress(OSError), step("building"):
                assert str(progress) == "racing: building (for 0 s)"
                raise OSError
            assert str(progress) == "racing (for 0 s)"
        assert not str(progress)


def test_steps_of_another_thread_are_told_where_it_runs_in_a_copy_of_the_context():
    progress, told = Progress(), []

    def work():
        with step("elsewhere"):
            told.append(str(progress))

    with progress.follow():
        for run in (partial(work), partial(contextvars.copy_context().run, work)):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    with step("not followed"):
        assert not str(progress)
    assert told == ["", "elsewhere (for 0 s)"]


@pytest.fixture
def lines():
    """Hand over the records that the log gets."""
    found = queue.Queue()
    logger, handler = logging.getLogger("service.core.telemetry"), QueueHandler(found)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield found
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_a_long_step_is_logged_while_it_is_the_innermost(lines):
    progress = Progress("loading nuclei")
    with progress.step("outer", 0.01), progress.step("inner", 0.01):
        assert lines.get(timeout=20).getMessage() == "loading nuclei: outer: inner (for 0 s)"
        assert lines.get(timeout=20).getMessage() == "loading nuclei: outer: inner (for 0 s)", "and again later"


def test_a_short_step_is_not_logged(lines):
    with step("short"):
        pass
    assert lines.empty()
