from __future__ import annotations

import contextvars
import json
import logging
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from fakes import wait_until

from service.core import telemetry
from service.core.telemetry import Progress, step

log = logging.getLogger("test.logs")


def as_json(record: logging.LogRecord) -> dict[str, Any]:
    line = telemetry.JsonFormatter().format(record)
    assert "\n" not in line
    fields: dict[str, Any] = json.loads(line)
    return fields


def test_every_log_line_is_a_json_object_with_the_extra_fields(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("%d windows\nof %s", 3, "nuclei", extra=telemetry.make_log_fields(model="nuclei", stages={"read": 1.5}))
    log.warning("plain")
    first, second = map(as_json, caplog.records)
    assert (first["message"], first["level"], first["logger"]) == ("3 windows\nof nuclei", "warning", "test.logs")
    assert (first["model"], first["stages"]) == ("nuclei", {"read": 1.5})
    assert first["time"].endswith("+00:00")
    assert second.keys() == {"time", "level", "logger", "message"}


def test_log_line_contains_request_id_and_exception(caplog: pytest.LogCaptureFixture) -> None:
    token = telemetry.request_id.set("abc")
    try:
        int("broken")
    except ValueError:
        log.exception("it failed")
    line = as_json(caplog.records[0])
    telemetry.request_id.reset(token)
    assert line["request_id"] == "abc"
    assert "ValueError: invalid literal" in line["exception"]
    assert "Traceback" in line["exception"]


def test_library_warnings_are_logged() -> None:
    code = """
import warnings
from service.core.telemetry import configure_logging
configure_logging("info", "json")
warnings.warn("an option is deprecated", FutureWarning)
"""
    completed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    line = json.loads(completed.stderr)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "FutureWarning: an option is deprecated" in line["message"]


def test_progress_shows_nested_steps_and_the_duration_of_the_innermost():
    progress = Progress()
    assert not str(progress)
    with progress.record_steps():
        with step("racing"):
            assert str(progress) == "racing (for 0 s)"
            with suppress(OSError), step("building"):
                assert str(progress) == "racing: building (for 0 s)"
                raise OSError
            assert str(progress) == "racing (for 0 s)"
        assert not str(progress)


def test_progress_shows_steps_of_threads_that_run_in_a_copy_of_the_context():
    progress, reported = Progress(), []

    def work():
        with step("elsewhere"):
            reported.append(str(progress))

    with progress.record_steps():
        for run in (partial(work), partial(contextvars.copy_context().run, work)):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    with step("not followed"):
        assert not str(progress)
    assert reported == ["", "elsewhere (for 0 s)"]


def test_only_long_innermost_steps_are_logged(caplog):
    caplog.set_level("INFO", "service.core.telemetry")
    with step("short"):
        pass
    progress, prefix = Progress("loading nuclei"), "loading nuclei: outer: inner (for "
    with progress.step("outer", 0.01), progress.step("inner", 0.01):
        wait_until(lambda: sum(message.startswith(prefix) for message in caplog.messages) > 2)
    # On a busy host, the outer step may be logged before the inner step begins.
    first = [message.startswith(prefix) for message in caplog.messages].index(True)
    assert all(message.startswith(prefix) for message in caplog.messages[first:])
    assert not any("short" in message for message in caplog.messages)
