"""Smoothing and watersheds of a height map that arrives plane by plane, as a protocol and as PyTorch code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.types import Objects
from service.inference.decoding.basin_merging import Persistence
from service.inference.decoding.labels import label_basins
from service.inference.decoding.watershed import Planes, Watershed, encode_foreground
from service.inference.decoding.watershed_kernel import ObjectFilter, keep_all_objects
from service.models.decoding_spec import Instances
from service.models.spec import ModelSpec

# Probabilities closer than this to 0 or 1 are treated as this close. Rounding can even exceed 0 or 1.
MIN_PROBABILITY = 1e-6


class StreamingWatershed(Protocol):
    """Watershed of a height map that arrives plane by plane, computed by the C++ kernel or by PyTorch."""

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        """Add the next planes. See `IncrementalWatershed.add` for shapes and dtypes."""

    def label_objects(
        self, minimum_size: int, *, drop_border: bool, object_filter: ObjectFilter = keep_all_objects
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        """Return labels [Z, Y, X] and the objects, as described in `IncrementalWatershed.label_objects`."""


class TorchWatershed:
    """A `StreamingWatershed` on any device, computed by PyTorch."""

    def __init__(
        self, planes: Planes, threshold: float, persistence: Persistence, block_voxels: int | None = None
    ) -> None:
        self._threshold, self._persistence = threshold, persistence
        self._watershed = Watershed(planes, persistence.compute_floors, block_voxels)

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        self._watershed.add(
            heights.float(), compute_foreground_mask(foreground, self._threshold), encode_foreground(foreground)
        )

    def label_objects(
        self, minimum_size: int, *, drop_border: bool, object_filter: ObjectFilter = keep_all_objects
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        basins = self._watershed.finish()
        return label_basins(
            basins, self._persistence, minimum_size, drop_border=drop_border, object_filter=object_filter
        )


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


def compute_foreground_mask(scores: Tensor, threshold: float) -> Tensor:
    """Return a bool mask of the scores above the threshold. A bool tensor is returned unchanged."""
    if scores.dtype == torch.bool:
        return scores
    if scores.device.type != "cpu":
        return scores > threshold
    # On one thread, NumPy is six times as fast as PyTorch.
    return torch.from_numpy(scores.float().numpy() > np.float32(threshold))


def logit(probability: float) -> float:
    """Return the logarithm of the odds of a probability."""
    return math.log(probability / (1 - probability))


def select_foreground_logits(spec: ModelSpec, decoding: Instances, scores: Tensor) -> Tensor:
    """Return the foreground logits [z, y, X] in scores [K, z, y, X].

    If the network itself returns probabilities, they are converted, so that watersheds have to support only logits. The
    result is then float32, and finite even for probabilities of 0 and 1.
    """
    foreground = scores[spec.outputs.index(decoding.foreground)]
    if spec.get_activation(decoding.foreground) == "sigmoid":
        return foreground
    return torch.logit(foreground.float(), eps=MIN_PROBABILITY)


def _smooth_axis(heights: Tensor, axis: int) -> Tensor:
    """Filter heights [z, y, x] with weights 1, 2, 1 along one axis, repeating the voxels at the ends."""
    last = heights.shape[axis] - 1
    previous_voxels = torch.cat((heights.narrow(axis, 0, 1), heights.narrow(axis, 0, last)), axis)
    next_voxels = torch.cat((heights.narrow(axis, 1, last), heights.narrow(axis, last, 1)), axis)
    return (previous_voxels + next_voxels) * 0.25 + heights * 0.5
