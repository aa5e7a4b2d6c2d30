from __future__ import annotations

import numpy as np
import pytest
import torch
from landscapes import CENTRES, distance_to

from service.inference.diameter.sheets import shows_sheets


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_shells_are_sheets_and_balls_are_not(noise: float) -> None:
    grain = np.random.default_rng(0).normal(0, noise, (48, 48, 48))
    shells = np.exp(-(((distance_to(*CENTRES) - 11) / 1.5) ** 2)) + grain
    balls = np.clip((9 - distance_to(*CENTRES)) / 3, 0, 1) + grain
    assert shows_sheets([torch.from_numpy(shells).float()])
    assert not shows_sheets([torch.from_numpy(balls).float()])
    assert not shows_sheets([torch.zeros(1, 30, 30)])


def test_the_edge_of_something_bright_is_no_sheet() -> None:
    edge = torch.from_numpy(1 / (1 + np.exp(-(np.indices((48, 48, 48))[0] - 24) / 1.5))).float()
    assert shows_sheets([edge]) is False
    assert shows_sheets([edge[:4]]) is None
