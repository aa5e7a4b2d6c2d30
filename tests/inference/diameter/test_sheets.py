import numpy as np
import pytest
import torch
from landscapes import CENTERS, compute_distances

from service.inference.diameter.sheets import contains_sheets

SHELLS = torch.from_numpy(np.exp(-(((compute_distances(*CENTERS) - 11) / 1.5) ** 2))).float()[None]
BALLS = torch.from_numpy(np.clip((9 - compute_distances(*CENTERS)) / 3, 0, 1)).float()[None]


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_shells_are_sheets_but_balls_and_bright_edges_are_not(noise: float) -> None:
    noisy = noise * torch.randn(48, 48, 48)
    assert contains_sheets([SHELLS[0] + noisy])
    assert not contains_sheets([BALLS[0] + noisy])
    assert not contains_sheets([torch.zeros(1, 30, 30)])
    edge = torch.sigmoid((torch.arange(48.0)[:, None, None].expand(48, 48, 48) - 24) / 1.5)
    assert contains_sheets([edge]) is False
    assert contains_sheets([edge[:4]]) is None


def test_blobs_that_are_few_planes_deep_are_not_sheets() -> None:
    """Their curvature is strong only along z, but the membranes of cells also curve across other directions."""
    z, y, x = torch.meshgrid(*(torch.arange(float(n)) for n in (20, 64, 64)), indexing="ij")
    heights = ((z % 10 - 4.5) / 1.5) ** 2 + ((y % 32 - 15.5) / 12) ** 2 + ((x % 32 - 15.5) / 12) ** 2
    blobs = torch.exp(-heights)
    assert contains_sheets([blobs]) is False
    assert contains_sheets([blobs.transpose(0, 1).contiguous()])
