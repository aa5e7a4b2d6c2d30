"""Jobs in a real server that is killed, in one with many clients at once, and in one that is given a large stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import chaos
import large
import load


def test_nothing_is_lost_and_nothing_half_written_when_the_server_is_killed() -> None:
    """`benchmarks/chaos.py` does it for longer, with other faults as well; a broken promise is status 1."""
    command = [sys.executable, chaos.__file__, "--minutes", "0.2", "--seed", "3", "--faults", "restart"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert "jobs accepted" in ended.stdout


def test_many_clients_some_of_them_rude_get_what_each_gets_alone(bands_repository: Path, tmp_path: Path) -> None:
    """`benchmarks/load.py` does it for longer; wrong labels, a 500 or a file that is left raise AssertionError."""
    figures = load.run(4, 16, bands_repository, tmp_path / "service")
    happened = figures["happened"]
    assert min(happened["labels waited for"], happened["labels fetched later"], happened["hung up"]) > 0
    # A loop that is blocked while a volume runs would take seconds; the benchmark measures on a quiet machine.
    assert figures["health_live_milliseconds"]["p99"] < 1000
    # What one request, one hang-up or one cancelled job left behind would be there 16 times. Pools of threads fill up.
    before, after = figures["idle"]["before"], figures["idle"]["after"]
    assert after["descriptors"] < before["descriptors"] + 16
    assert after["threads"] < before["threads"] + 64


def test_stack_on_the_host_becomes_labels_on_the_host(tmp_path: Path) -> None:
    """`benchmarks/large.py` does it with 20 GB; wrong labels or too much memory raise AssertionError."""
    (figures,) = large.run([0.05], tmp_path)
    assert figures["shape"] == [6, *large.PLANE]
    assert figures["peak_anonymous_bytes"] > 0
