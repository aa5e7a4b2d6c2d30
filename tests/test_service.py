"""What importing the package sets up."""

import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

FAULTS = """
import resource
import service
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(1)
taken = []
# More than once: where memory is in pieces the system may not have large pages at once.
for _ in range(20):
    before = faults()
    torch.zeros(2**24)
    taken.append(faults() - before)
assert min(taken) < 2**24 * 4 // 4096 // 2, taken
"""


@pytest.mark.skipif(not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no large pages here")
def test_large_tensors_take_large_pages():
    subprocess.run([sys.executable, "-c", FAULTS], check=True, timeout=120)
