"""Mean of the scores of a window and its mirror images (test-time augmentation)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from service.core.types import Views
from service.models.network import Network

# Views that are averaged with quality=best, as tuples of the axes to mirror. Each view takes the same time.
BEST_QUALITY_VIEWS: Views = ((), (3, 4), (2, 4))


def get_best_quality_views(mirror_axes: Sequence[Literal["z", "y", "x"]] | None) -> Views:
    """Return the views that are averaged with quality=best, for the value of `input.mirror_axes` of a model."""
    if mirror_axes is None:
        return BEST_QUALITY_VIEWS
    axes = sorted({2 + "zyx".index(axis) for axis in mirror_axes})
    return tuple(itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(len(axes) + 1)))


@dataclass(frozen=True)
class ViewAveragingNetwork:
    """Network that returns the mean of another network's scores over several views of each window.

    The raw scores are averaged, before any activation.
    """

    network: Network
    views: Views

    def __call__(self, windows: Tensor) -> Tensor:
        """Return the scores of windows [B, C, z, y, x] in newly allocated memory, float32 [B, K, z, y, x]."""
        score_sum = torch.zeros(())
        for index, axes in enumerate(self.views):
            scores = self._score(windows, axes)
            # Copy the scores, because the network may reuse their memory.
            score_sum = scores.to(torch.float32, copy=True) if not index else score_sum.add_(scores)
        return score_sum.div_(len(self.views))

    def _score(self, windows: Tensor, axes: tuple[int, ...]) -> Tensor:
        if not axes:
            return self.network(windows)
        # Networks are built for one memory layout, which `flip` may not preserve.
        mirrored_windows = torch.empty_like(windows).copy_(windows.flip(axes))
        return self.network(mirrored_windows).flip(axes)


def count_view_bytes(num_channels: int, num_outputs: int, num_voxels: int) -> int:
    """Return the number of bytes that averaging the views of a window needs in addition to those of the network.

    num_channels  number of channels of the network
    num_outputs   number of outputs of the network
    num_voxels    number of voxels of a window
    """
    return 4 * num_voxels * (2 * num_channels + 2 * num_outputs)
