"""Smoothing of a height map that arrives in planes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Smoother:
    """Binomial filter (weights 1, 2, 1 along each axis), applied `times` times to planes that arrive in parts.

    The outermost voxel is repeated beyond the faces of the volume. A plane is returned once the following planes that
    it depends on have arrived, so the result does not depend on how the planes were divided.
    """

    def __init__(self, times: int) -> None:
        self._times = times
        self._planes: Tensor | None = None
        self._masks: list[Tensor] = []

    def add(self, heights: Tensor, inside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Add the next planes, float32 heights and any mask [planes, Y, X], and yield the finished planes."""
        if not self._times:
            yield heights, inside
            return
        first = heights[:1].expand(self._times, -1, -1) if self._planes is None else self._planes
        self._planes = torch.cat((first, heights))
        self._masks.append(inside)
        yield from self._pop_finished()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the planes that were waiting for later planes."""
        if self._planes is not None:
            self._planes = torch.cat((self._planes, self._planes[-1:].expand(self._times, -1, -1)))
            yield from self._pop_finished()

    def _pop_finished(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._planes is None or (finished := len(self._planes) - 2 * self._times) < 1:
            return
        heights, masks = self._planes, torch.cat(self._masks)
        for _ in range(self._times):
            heights = (heights[:-2] + heights[2:]) * 0.25 + heights[1:-1] * 0.5
            for axis in (1, 2):
                heights = _smooth_axis(heights, axis)
        self._planes, self._masks = self._planes[finished:], [masks[finished:]]
        yield heights, masks[:finished]


def _smooth_axis(heights: Tensor, axis: int) -> Tensor:
    """Filter [z, y, x] with weights 1, 2, 1 along one axis, repeating the end voxels."""
    last = heights.shape[axis] - 1
    before = torch.cat((heights.narrow(axis, 0, 1), heights.narrow(axis, 0, last)), axis)
    after = torch.cat((heights.narrow(axis, 1, last), heights.narrow(axis, last, 1)), axis)
    return (before + after) * 0.25 + heights * 0.5
