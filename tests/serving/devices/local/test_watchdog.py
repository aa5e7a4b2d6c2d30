from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from fakes import wait_until
from paths import ROOT

from service.core import config
from service.serving.devices.local.watchdog import EXIT_STATUS, Watchdog


class Device:
    """A fake device thread with a watchdog, and a clock that advances by one second per check."""

    def __init__(self) -> None:
        self.heartbeat: Any = None
        self.is_alive = True
        self.now = 0.0
        self.exit_reasons: list[str] = []
        settings = config.Watchdog(batch_seconds=10, grace_seconds=5)
        self.watchdog = Watchdog(self, settings, on_exit=self.exit_reasons.append, clock=lambda: self.now)

    def advance(self, seconds: int) -> str | None:
        for _ in range(seconds):
            self.now += 1
            self.watchdog.check_thread()
        return self.watchdog.problem


@pytest.fixture
def device() -> Device:
    return Device()


def test_slow_batch_is_reported_and_then_ends_the_process(device: Device) -> None:
    device.heartbeat = (1, 0)
    assert device.advance(11) is None
    assert "more than 10 s" in (device.advance(1) or "")
    assert device.exit_reasons == []
    device.advance(3)
    assert device.exit_reasons == []
    device.advance(1)
    assert len(device.exit_reasons) == 1
    assert "stuck" in device.exit_reasons[0]


def test_device_recovers_when_the_batch_completes(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.heartbeat = (1, 0)
    device.advance(14)
    device.heartbeat = (1, 2)
    with caplog.at_level(logging.WARNING):
        assert device.advance(1) is None
    assert "has recovered" in caplog.text
    assert "stuck" in (device.advance(11) or "")
    assert device.exit_reasons == []


def test_idle_device_and_progressing_batches_cause_no_problem(device: Device) -> None:
    assert device.advance(1000) is None
    for step in range(30):
        device.heartbeat = (1, step)
        assert device.advance(8) is None


def test_dead_thread_is_reported_immediately(device: Device) -> None:
    device.is_alive = False
    assert "died" in (device.advance(1) or "")
    device.advance(4)
    assert len(device.exit_reasons) == 1


def test_lost_device_stays_lost(device: Device) -> None:
    device.watchdog.report_loss("cuda:0 has failed.")
    device.heartbeat = (1, 1)
    assert device.advance(1) == "cuda:0 has failed."
    device.heartbeat = (1, 2)
    device.advance(4)
    assert device.exit_reasons == ["cuda:0 has failed."]


def test_time_while_the_process_was_suspended_does_not_count(device: Device) -> None:
    device.heartbeat = (1, 0)
    device.advance(2)
    device.now += 3600
    assert device.advance(1) is None


def test_watchdog_continues_after_a_failed_check(caplog: pytest.LogCaptureFixture) -> None:
    class WatchedThread:
        is_alive, checks = True, 0

        @property
        def heartbeat(self) -> int:
            self.checks += 1
            if self.checks == 1:
                raise RuntimeError("the driver does not respond")
            return self.checks

    watched = WatchedThread()
    watchdog = Watchdog(watched, config.Watchdog(batch_seconds=1, grace_seconds=1))
    watchdog.start()
    wait_until(lambda: watched.checks > 1)
    watchdog.stop()
    watchdog._thread.join(20)
    assert not watchdog._thread.is_alive()
    assert "the driver does not respond" in caplog.text


STUCK_PROCESS = """
import logging, sys, time
from types import SimpleNamespace
from service.core import config
from service.serving.devices.local.watchdog import Watchdog
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
thread = SimpleNamespace(heartbeat=1, is_alive=True)
Watchdog(thread, config.Watchdog(batch_seconds=0.5, grace_seconds=0.5)).start()
time.sleep(60)
"""


def test_stuck_process_exits_with_its_status_and_a_log_line() -> None:
    command = [sys.executable, "-c", STUCK_PROCESS]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert completed.returncode == EXIT_STATUS
    last_line = completed.stderr.splitlines()[-1]
    assert last_line.startswith("CRITICAL The device is stuck")
    assert "Exiting with status 3" in last_line
