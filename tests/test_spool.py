"""Jobs in a real server that is killed, and in one with many clients at once."""

from __future__ import annotations

from pathlib import Path

import crash
import load


def test_nothing_is_lost_and_nothing_half_written_when_the_server_is_killed(
    bands_repository: Path, tmp_path: Path
) -> None:
    """`benchmarks/crash.py` kills fifty times; what it checks after each kill it raises as AssertionError."""
    figures = crash.run(2, bands_repository, tmp_path / "service", seed=3)
    assert figures["jobs_accepted"] > 0
    assert figures["results_compared"] >= figures["jobs_done"] > 0


def test_many_clients_some_of_them_rude_get_what_each_gets_alone(bands_repository: Path, tmp_path: Path) -> None:
    """`benchmarks/load.py` does it for longer; wrong labels, a 500 or a file that is left raise AssertionError."""
    figures = load.run(4, 16, bands_repository, tmp_path / "service")
    happened = figures["happened"]
    assert min(happened["labels waited for"], happened["labels fetched later"], happened["hung up"]) > 0
    # A loop that is blocked while a volume runs would take seconds; the benchmark measures on a quiet machine.
    assert figures["health_live_milliseconds"]["p99"] < 1000
