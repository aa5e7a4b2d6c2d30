"""Averages of the weights of networks, and their batch normalization statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn


@torch.no_grad()
def update_average(
    averaged_network: nn.Module, network: nn.Module, decay: float, statistics_decay: float = 0.0
) -> None:
    """Update the moving averages of the weights and of the batch statistics.

    Without `statistics_decay`, the statistics are copied. They are means over about the last ten batches, so they vary
    more from step to step than the weights.
    """
    for averaged_weights, weights in zip(averaged_network.parameters(), network.parameters(), strict=True):
        averaged_weights.lerp_(weights, 1 - decay)
    for averaged_statistic, statistic in zip(averaged_network.buffers(), network.buffers(), strict=True):
        if statistic.is_floating_point():
            averaged_statistic.lerp_(statistic, 1 - statistics_decay)
        else:
            averaged_statistic.copy_(statistic)


def interpolate_weights(
    initial: Mapping[str, Tensor], trained: Mapping[str, Tensor], fraction: float
) -> dict[str, Tensor]:
    """Return weights and statistics between the initial ones (fraction 0) and the trained ones (fraction 1).

    Fine-tuned networks lose less of what they could do before if they are averaged with their initial weights (Wortsman
    et al. 2022). Counters are those of the trained network.
    """
    return {
        name: initial[name].lerp(value, fraction) if value.is_floating_point() else value
        for name, value in trained.items()
    }


def recompute_statistics(network: nn.Module, images: Iterable[Tensor]) -> None:
    """Recompute batch normalization statistics as plain means over batches [B, 1, z, y, x] with the current weights.

    The statistics from training are means over about the last ten batches, and were computed with weights that are not
    averaged. These statistics are so noisy that the size of segmented objects fluctuates. Izmailov et al. (2018)
    recompute the statistics for the same reason.
    """
    device = next(network.parameters()).device
    update_bn((batch.to(device, memory_format=torch.channels_last_3d) for batch in images), network)
