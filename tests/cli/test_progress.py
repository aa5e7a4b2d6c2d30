from __future__ import annotations

import logging
import time

import pytest

from service.cli.progress import ProgressBar, show_progress


def wait_for_line(bar: ProgressBar, caplog: pytest.LogCaptureFixture) -> str:
    """Return the line that is logged for the current step."""
    caplog.clear()
    expected, deadline = bar.describe(), time.monotonic() + 20
    while expected not in caplog.messages:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return expected


def test_progress_is_logged_regularly_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "service.progress"), show_progress(0.01) as bar:
        bar.begin_step("reading")
        assert wait_for_line(bar, caplog) == "reading"
        bar.begin_step("time point 2 of 3")
        bar.show_windows(120, 400)
        assert wait_for_line(bar, caplog) == "time point 2 of 3: 120 of 400 (30%)"
        bar.show_windows(400, 400)
        assert wait_for_line(bar, caplog) == "decoding"
        bar.show_step("joining", 1, 8)
        assert wait_for_line(bar, caplog) == "joining: 1 of 8 (12%)"
    caplog.clear()
    time.sleep(0.05)
    assert caplog.messages == []


def test_progress_is_not_logged_during_the_first_minute_or_on_a_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO), show_progress() as bar:
        bar.show_windows(1, 4)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with caplog.at_level(logging.INFO), show_progress(0.001) as bar:
        bar.show_windows(1, 4)
        time.sleep(0.05)
    assert caplog.messages == []
