"""Scores of a window as the mean over mirror images of it (test-time augmentation)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.core.types import Views
from service.models.network import Network

# Every other view costs as much again as the window itself.
BEST: Views = ((), (3, 4), (2, 4))


@dataclass(frozen=True)
class AveragedViews:
    """Network whose scores are the mean of those of another one over views of each window.

    The mean is that of raw scores, before any activation.
    """

    network: Network
    views: Views

    def __call__(self, windows: Tensor) -> Tensor:
        """Return scores, float32 [B, K, z, y, x], of windows [B, C, z, y, x]; always new memory."""
        total = torch.zeros(())
        for number, axes in enumerate(self.views):
            scores = self._score(windows, axes)
            # The network may reuse the memory of its scores.
            total = scores.to(torch.float32, copy=True) if not number else total.add_(scores)
        return total.div_(len(self.views))

    def _score(self, windows: Tensor, axes: tuple[int, ...]) -> Tensor:
        if not axes:
            return self.network(windows)
        # Networks are built for one layout of memory.
        mirrored = torch.empty_like(windows).copy_(windows.flip(axes))
        return self.network(mirrored).flip(axes)


def views_bytes(channels: int, outputs: int, voxels: int) -> int:
    """Return the bytes that the views of a window of so many voxels take beside the network."""
    return 4 * voxels * (2 * channels + 2 * outputs)
