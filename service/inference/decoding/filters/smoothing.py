"""Smoothing filter for a height map that arrives plane by plane."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Smoother:
    """Binomial filter (weights 1, 2, 1 along each axis) for planes that arrive in parts.

    The filter is applied `num_passes` times. The outermost voxels are repeated beyond the faces of the volume. A plane
    is returned once the following planes that it depends on have arrived, so the result does not depend on how the
    planes were divided into parts.
    """

    def __init__(self, num_passes: int) -> None:
        self._num_passes = num_passes
        self._planes: Tensor | None = None
        self._foreground: list[Tensor] = []

    def add(self, heights: Tensor, foreground: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Add the next planes [planes, Y, X], float32 heights and foreground scores, and yield finished planes."""
        if not self._num_passes:
            yield heights, foreground
            return
        previous_planes = heights[:1].expand(self._num_passes, -1, -1) if self._planes is None else self._planes
        self._planes = torch.cat((previous_planes, heights))
        self._foreground.append(foreground)
        yield from self._pop_finished_planes()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the planes that were waiting for later planes."""
        if self._planes is not None:
            self._planes = torch.cat((self._planes, self._planes[-1:].expand(self._num_passes, -1, -1)))
            yield from self._pop_finished_planes()

    def _pop_finished_planes(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._planes is None or (num_finished := len(self._planes) - 2 * self._num_passes) < 1:
            return
        heights, foreground = self._planes, torch.cat(self._foreground)
        for _ in range(self._num_passes):
            heights = (heights[:-2] + heights[2:]) * 0.25 + heights[1:-1] * 0.5
            for axis in (1, 2):
                heights = _smooth_axis(heights, axis)
        self._planes, self._foreground = self._planes[num_finished:], [foreground[num_finished:]]
        yield heights, foreground[:num_finished]


def _smooth_axis(heights: Tensor, axis: int) -> Tensor:
    """Filter heights [z, y, x] with weights 1, 2, 1 along one axis, repeating the voxels at the ends."""
    last = heights.shape[axis] - 1
    previous_voxels = torch.cat((heights.narrow(axis, 0, 1), heights.narrow(axis, 0, last)), axis)
    next_voxels = torch.cat((heights.narrow(axis, 1, last), heights.narrow(axis, last, 1)), axis)
    return (previous_voxels + next_voxels) * 0.25 + heights * 0.5
