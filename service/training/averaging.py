"""Moving average of a network's weights, and the statistics of batch normalisation that fit it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn


@torch.no_grad()
def update_average(average: nn.Module, network: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the network's; batch statistics are averages already and are copied."""
    for averaged, current in zip(average.parameters(), network.parameters(), strict=True):
        averaged.lerp_(current, 1 - decay)
    for statistic, latest in zip(average.buffers(), network.buffers(), strict=True):
        statistic.copy_(latest)


def measure_statistics(network: nn.Module, images: Iterable[Tensor]) -> None:
    """Set the statistics of batch normalisation to plain means over batches [B, 1, z, y, x], for the current weights.

    Training accumulates means over about the last ten batches, of weights that were not averaged. They are so noisy
    that outlines grow and shrink from one minute to the next (Izmailov et al. 2018 measure anew for the same reason).
    """
    device = next(network.parameters()).device
    update_bn((batch.to(device, memory_format=torch.channels_last_3d) for batch in images), network)
