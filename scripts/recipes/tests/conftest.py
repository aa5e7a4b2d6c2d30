from __future__ import annotations

import torch

torch.set_num_threads(1)


def pytest_runtest_setup() -> None:
    """A test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)
