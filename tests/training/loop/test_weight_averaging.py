import copy

import numpy as np
import pytest
import torch
from torch import nn

from service.training.loop.weight_averaging import recompute_statistics, update_average


def test_batch_statistics_are_plain_means_over_batches() -> None:
    norm = torch.nn.BatchNorm3d(1).eval()
    norm.running_mean.fill_(7)
    batches = torch.rand(5, 2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(3)).unbind()
    recompute_statistics(norm, batches)
    assert float(norm.running_mean) == pytest.approx(np.mean([float(images.mean()) for images in batches]), abs=1e-5)
    assert not norm.training
    assert norm.momentum == torch.nn.BatchNorm3d(1).momentum


def test_averaged_statistics_change_more_slowly_than_those_of_the_network() -> None:
    network = nn.BatchNorm3d(1)
    copied, averaged = copy.deepcopy(network), copy.deepcopy(network)
    network.running_mean.fill_(1)
    network.num_batches_tracked.fill_(5)
    update_average(copied, network, 0.9)
    update_average(averaged, network, 0.9, 0.75)
    assert (copied.running_mean.item(), averaged.running_mean.item()) == (1, 0.25)
    assert averaged.num_batches_tracked == 5
