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
before = faults()
torch.zeros(2**24)
assert faults() - before < 2**24 * 4 // 4096 // 2, faults() - before
"""


@pytest.mark.skipif(not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no large pages here")
def test_large_tensors_take_large_pages():
    subprocess.run([sys.executable, "-c", FAULTS], check=True, timeout=120)
