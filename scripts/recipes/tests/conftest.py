from __future__ import annotations

import torch

torch.set_num_threads(1)


def pytest_runtest_setup() -> None:
    """Seed torch before each test, so that results do not depend on the order of the tests."""
    torch.manual_seed(0)
