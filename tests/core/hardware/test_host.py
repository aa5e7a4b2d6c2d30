from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.core.hardware import host


@pytest.mark.parametrize(
    ("content", "limit"),
    [("150000 100000", 2), ("50000 100000", 1), ("10000000 100000", 10**6), ("max 100000", 10**6), ("", 10**6)],
)
def test_core_count_respects_the_container_quota(tmp_path: Path, content: str, limit: int) -> None:
    (tmp_path / "cpu.max").write_text(content)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert host.count_usable_cores(tmp_path) == min(affinity, limit)


def test_available_memory_respects_the_container_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 200000\nactive_file 100000\n")
    assert host.query_available_memory(tmp_path) == 400000
    # The values are read again on every call.
    (tmp_path / "memory.current").write_text("950000\n")
    assert host.query_available_memory(tmp_path) == 350000


def test_available_memory_is_that_of_the_host_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900000\n")
    missing = tmp_path / "missing"
    earlier, available, later = (host.query_available_memory(folder) for folder in (missing, tmp_path, missing))
    assert (available is None) == (earlier is None)
    if available is not None and earlier is not None and later is not None:
        # Other processes allocate and free memory concurrently.
        assert min(earlier, later) - 2**30 < available < max(earlier, later) + 2**30


@pytest.mark.parametrize(("quota", "limit"), [("150000", 2), ("50000", 1), ("-1", 10**6)])
def test_core_count_respects_the_quota_of_control_groups_version_1(tmp_path: Path, quota: str, limit: int) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert host.count_usable_cores(tmp_path) == min(host.count_usable_cores(tmp_path / "missing"), limit)


def test_memory_respects_the_limit_of_control_groups_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000000\n")
    (folder / "memory.usage_in_bytes").write_text("900000\n")
    (folder / "memory.stat").write_text(
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 200000\ntotal_active_file 100000\n"
    )
    assert host.query_available_memory(tmp_path) == 400000
    assert host.query_total_memory(tmp_path) == 1000000
    # The kernel's value for no limit.
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.query_total_memory(tmp_path) == host.query_total_memory(tmp_path / "missing")


def test_total_memory_respects_the_container_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    assert host.query_total_memory(tmp_path) == 1000000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.query_total_memory(tmp_path) == host.query_total_memory(tmp_path / "missing")


@pytest.mark.parametrize(("error", "status"), [("KeyboardInterrupt", 130), ("SystemExit(143)", 143), ("OSError", 1)])
def test_process_exits_without_finalization(error: str, status: int) -> None:
    """A daemon thread in native code would abort the process."""
    code = f"""
from service.core.hardware import host
class Finalized:
    def __del__(self):
        print("finalized")
finalized = Finalized()
try:
    try:
        print("partial report")
        raise {error}
    finally:
        host.skip_finalization()
except BaseException:
    raise SystemExit(0)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (status, "partial report\n")
