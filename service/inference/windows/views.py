"""Scores of a window as the mean over several views of it: mirrored, and smaller (test-time augmentation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from service.models.loader import Network

# Edge of what a smaller view shows, over that of the window.
SMALLER = 0.8


class View(NamedTuple):
    """How a window is shown to the network: mirrored along some of the axes 2 to 4 (z, y, x), and its size."""

    mirrored: tuple[int, ...]
    size: float = 1.0


# Every other view costs as much again as the window itself.
MIRRORED = (View(()), View((3, 4)), View((2, 4)))
TWO_SCALES = (View(()), View((3, 4)), View((2, 4), SMALLER))


@dataclass(frozen=True)
class AveragedViews:
    """Network whose scores are the mean of those of another one over views of each window.

    The mean is that of raw scores, before any activation.
    """

    network: Network
    views: tuple[View, ...]

    def __call__(self, windows: Tensor) -> Tensor:
        """Return scores, float32 [B, K, z, y, x], of windows [B, C, z, y, x]; always new memory."""
        total = torch.zeros(())
        for number, view in enumerate(self.views):
            scores = self._score(windows, view)
            # The network may reuse the memory of its scores.
            total = scores.to(torch.float32, copy=True) if not number else total.add_(scores)
        return total.div_(len(self.views))

    def _score(self, windows: Tensor, view: View) -> Tensor:
        if view == View(()):
            return self.network(windows)
        # Networks are built for one layout of memory.
        shown = torch.empty_like(windows)
        edges = windows.shape[2:]
        inner = [min(2 * max(round(view.size * edge / 2), 1), edge) if view.size < 1 else edge for edge in edges]
        before = [(edge - length) // 2 for edge, length in zip(edges, inner, strict=True)]
        z, y, x = (slice(first, first + length) for first, length in zip(before, inner, strict=True))
        inside = (slice(None), slice(None), z, y, x)
        turned = windows.flip(view.mirrored)
        if view.size < 1:
            # What lies around the window is not known; outside of stacks are zeros, too.
            shown.zero_()
            turned = functional.interpolate(turned.float(), size=inner, mode="trilinear")
        shown[inside] = turned.to(shown.dtype)
        scores = self.network(shown)[inside]
        if view.size < 1:
            scores = functional.interpolate(scores.float(), size=list(edges), mode="trilinear")
        return scores.flip(view.mirrored)


def choose_views(*, scaled: bool) -> tuple[View, ...]:
    """Return the views of `quality=best`; with a smaller one if `scaled`, for models that have a width of objects."""
    return TWO_SCALES if scaled else MIRRORED


def views_bytes(channels: int, outputs: int, voxels: int) -> int:
    """Return the bytes that the views of a window of so many voxels take beside the network."""
    return 4 * voxels * (2 * channels + 3 * outputs)
