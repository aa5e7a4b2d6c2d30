"""`stackseg bench --hosts` with actors that are threads of the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live import eager_settings
from thread_actors import make_cluster_settings, make_device_actor

from service.cli.benchmark.hosts import HostsRow, format_row, measure_throughput
from service.core.config import Settings
from service.core.errors import ConfigError
from service.models.repository import read_repository


def connect(settings: Settings) -> Any:
    return lambda: make_device_actor(settings)


def test_every_number_of_workers_is_measured(bands_repository: Path, tmp_path: Path) -> None:
    spec = read_repository(bands_repository)["bands"]
    rows = list(measure_throughput(spec, make_cluster_settings(bands_repository, tmp_path), (16, 32, 56), 2, connect))
    assert [(row.workers, row.windows) for row in rows] == [(1, 4), (2, 8)]
    assert all(row.windows_per_second > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_table_compares_with_one_worker() -> None:
    rows = [HostsRow(1, 100, 10.0), HostsRow(2, 200, 12.5)]
    assert [format_row(row, rows[0]) for row in rows] == ["| 1 | 10.0 | 100% |", "| 2 | 16.0 | 80% |"]


def test_missing_cluster_is_rejected(bands_repository: Path) -> None:
    spec = read_repository(bands_repository)["bands"]
    with pytest.raises(ConfigError, match=r"Set cluster\.address"):
        next(measure_throughput(spec, eager_settings(bands_repository), (16, 32, 32), 1))
