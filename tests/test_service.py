"""Tests of the process settings that importing `service` changes."""

import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

COUNT_PAGE_FAULTS = """
import resource
import service
import torch
def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(1)
counts = []
# Several attempts: if memory is fragmented, the system may not have huge pages immediately.
for _ in range(20):
    before = count_faults()
    torch.zeros(2**24)
    counts.append(count_faults() - before)
assert min(counts) < 2**24 * 4 // 4096 // 2, counts
"""


@pytest.mark.skipif(
    not HUGE_PAGES_SETTING.exists() or "[never]" in HUGE_PAGES_SETTING.read_text(),
    reason="transparent huge pages are disabled",
)
def test_large_tensors_use_huge_pages():
    subprocess.run([sys.executable, "-c", COUNT_PAGE_FAULTS], check=True, timeout=120)
