"""Watersheds of a height map that arrives plane by plane: the common interface, and its implementation in PyTorch."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.types import Objects
from service.inference.decoding.basin_merging import MergeFunction, Persistence, merge_shallow_basins
from service.inference.decoding.labels import label_basins
from service.inference.decoding.watershed import MAX_BLOCK_VOXELS, encode_foreground, find_basins
from service.inference.decoding.watershed_kernel import ObjectFilter, keep_all_objects
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

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


class Planes(NamedTuple):
    """Order in which the planes of a volume of `size` (Z, Y, X) arrive on a device: along z, or along y."""

    size: Size
    device: torch.device
    along_y: bool = False


class TorchWatershed:
    """A `StreamingWatershed` on any device, computed by PyTorch after all planes have been collected.

    On a GPU, the host waits a few times per block of up to `block_voxels` voxels, and while basins are merged. The
    number of parts in which the planes arrive does not affect how often the host waits.

    merge  returns the object of every basin
    """

    def __init__(
        self,
        planes: Planes,
        threshold: float,
        persistence: Persistence,
        *,
        block_voxels: int = MAX_BLOCK_VOXELS,
        merge: MergeFunction = merge_shallow_basins,
    ) -> None:
        size, device, along_y = planes
        self._threshold, self._persistence, self._merge = threshold, persistence, merge
        self._block_voxels, self._axis, self._num_collected = block_voxels, int(along_y), 0
        self._heights = torch.empty(size, device=device)
        self._foreground = torch.empty(size, dtype=torch.bool, device=device)
        self._codes = torch.empty(size, dtype=torch.uint8, device=device)

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        num_planes = heights.shape[self._axis]
        parts = (
            (self._heights, heights),
            (self._foreground, compute_foreground_mask(foreground, self._threshold)),
            (self._codes, encode_foreground(foreground)),
        )
        for target, part in parts:
            target.narrow(self._axis, self._num_collected, num_planes).copy_(part)
        self._num_collected += num_planes

    def label_objects(
        self, minimum_size: int, *, drop_border: bool, object_filter: ObjectFilter = keep_all_objects
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        compute_floors = self._persistence.compute_floors
        basins = find_basins(self._heights, self._foreground, self._codes, compute_floors, self._block_voxels)
        del self._heights, self._foreground, self._codes
        return label_basins(
            *(basins, self._persistence, minimum_size),
            drop_border=drop_border,
            object_filter=object_filter,
            merge=self._merge,
        )


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
