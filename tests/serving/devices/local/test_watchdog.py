from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from fakes import until
from paths import ROOT

from service.core import config
from service.serving.devices.local.watchdog import EXIT_STATUS, Watchdog


class Device:
    """A device as the watchdog sees it, and a clock that moves a second per look."""

    def __init__(self) -> None:
        self.pulse: Any = None
        self.alive = True
        self.now = 0.0
        self.ended: list[str] = []
        settings = config.Watchdog(batch_seconds=10, grace_seconds=5)
        self.watchdog = Watchdog(self, settings, end=self.ended.append, clock=lambda: self.now)

    def pass_seconds(self, seconds: int) -> str | None:
        for _ in range(seconds):
            self.now += 1
            self.watchdog.check()
        return self.watchdog.problem


@pytest.fixture
def device() -> Device:
    return Device()


def test_batch_that_takes_too_long_is_told_and_then_ends_the_process(device: Device) -> None:
    device.pulse = (1, 0)
    assert device.pass_seconds(11) is None
    assert "more than 10 s" in (device.pass_seconds(1) or "")
    assert device.ended == []
    device.pass_seconds(3)
    assert device.ended == []
    device.pass_seconds(1)
    assert len(device.ended) == 1
    assert "stuck" in device.ended[0]


def test_device_that_gets_on_again_is_well(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.pulse = (1, 0)
    device.pass_seconds(14)
    device.pulse = (1, 2)
    with caplog.at_level(logging.WARNING):
        assert device.pass_seconds(1) is None
    assert "gets on again" in caplog.text
    assert "stuck" in (device.pass_seconds(11) or "")
    assert device.ended == []


def test_idle_device_is_no_trouble_nor_is_work_of_any_length_while_it_gets_on(device: Device) -> None:
    assert device.pass_seconds(1000) is None
    for step in range(30):
        device.pulse = (1, step)
        assert device.pass_seconds(8) is None


def test_thread_that_died_is_told_at_once(device: Device) -> None:
    device.alive = False
    assert "died" in (device.pass_seconds(1) or "")
    device.pass_seconds(4)
    assert len(device.ended) == 1


def test_device_that_is_lost_stays_lost(device: Device) -> None:
    device.watchdog.report_lost("cuda:0 has failed.")
    device.pulse = (1, 1)
    assert device.pass_seconds(1) == "cuda:0 has failed."
    device.pulse = (1, 2)
    device.pass_seconds(4)
    assert device.ended == ["cuda:0 has failed."]


def test_time_in_which_the_whole_process_stood_still_does_not_count(device: Device) -> None:
    device.pulse = (1, 0)
    device.pass_seconds(2)
    device.now += 3600
    assert device.pass_seconds(1) is None


def test_watchdog_that_cannot_check_once_checks_again_until_it_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    class Watched:
        alive, looks = True, 0

        @property
        def pulse(self) -> int:
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("the driver does not answer")
            return self.looks

    watched = Watched()
    watchdog = Watchdog(watched, config.Watchdog(batch_seconds=1, grace_seconds=1))
    watchdog.start()
    until(lambda: watched.looks > 1)
    watchdog.stop()
    watchdog._thread.join(20)
    assert not watchdog._thread.is_alive()
    assert "the driver does not answer" in caplog.text


STUCK = """
import logging, sys, time
from types import SimpleNamespace
from service.core import config
from service.serving.devices.local.watchdog import Watchdog
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
thread = SimpleNamespace(pulse=1, alive=True)
Watchdog(thread, config.Watchdog(batch_seconds=0.5, grace_seconds=0.5)).start()
time.sleep(60)
"""


def test_process_really_ends_with_its_status_and_a_last_line() -> None:
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == EXIT_STATUS
    last = done.stderr.splitlines()[-1]
    assert last.startswith("CRITICAL The device is stuck")
    assert "Ending with status 3" in last
