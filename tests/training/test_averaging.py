from __future__ import annotations

import numpy as np
import pytest
import torch

from service.training.averaging import measure_statistics


def test_batch_statistics_are_plain_means_over_the_batches() -> None:
    norm = torch.nn.BatchNorm3d(1).eval()
    norm.running_mean.fill_(7)
    batches = torch.rand(5, 2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(3)).unbind()
    measure_statistics(norm, batches)
    assert float(norm.running_mean) == pytest.approx(np.mean([float(images.mean()) for images in batches]), abs=1e-5)
    assert not norm.training
    assert norm.momentum == torch.nn.BatchNorm3d(1).momentum
