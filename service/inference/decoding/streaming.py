"""Watersheds of height maps that arrive in planes, by torch: block by block, or all at once."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.types import Objects
from service.inference.decoding.basin_merging import Persistence, merge_basins_on_device
from service.inference.decoding.labels import label_basins
from service.inference.decoding.watershed import Planes, Watershed, foreground_codes
from service.inference.decoding.watershed_kernel import ObjectFilter, keep_all

# Voxels, with the rims of their planes, that a device with memory of its own processes as one block; 36 bytes each.
WHOLE_VOXELS = 2**26

# Voxels whose neighbours such a device inspects in one operation.
WHOLE_NEIGHBOURS = 2**18


class StreamingWatershed(Protocol):
    """Watershed of a height map that arrives in planes, computed by the C++ kernel or by torch."""

    def add(self, heights: Tensor, inside: Tensor) -> None:
        """Add the next planes; `KernelWatershed.add` states shapes and dtypes."""

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        """Return labels [Z, Y, X] and the objects; `KernelWatershed.labels` documents dtypes and parameters."""


class TorchWatershed:
    """A `StreamingWatershed` on any device, computed by torch."""

    def __init__(self, planes: Planes, threshold: float, persistence: Persistence, block: int | None = None) -> None:
        self._threshold, self._persistence = threshold, persistence
        self._watershed = Watershed(planes, persistence.floor, block)

    def add(self, heights: Tensor, inside: Tensor) -> None:
        self._watershed.add(heights.float(), threshold_mask(inside, self._threshold), foreground_codes(inside))

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        basins = self._watershed.finish()
        return label_basins(basins, self._persistence, minimum_size, drop_border=drop_border, keep=keep)


class WholeWatershed:
    """A `StreamingWatershed` that gathers all planes on their device, and then works on up to `WHOLE_VOXELS` at once.

    The host waits for the device a few times for each block, however many parts the planes came in, and while basins
    are joined there.
    """

    def __init__(self, planes: Planes, threshold: float, persistence: Persistence, block: int = WHOLE_VOXELS) -> None:
        size, device, along_y = planes
        self._threshold, self._persistence, self._planes = threshold, persistence, planes
        self._block, self._axis, self._end = block, int(along_y), 0
        self._heights = torch.empty(size, device=device)
        self._inside = torch.empty(size, dtype=torch.bool, device=device)
        self._codes = torch.empty(size, dtype=torch.uint8, device=device)

    def add(self, heights: Tensor, inside: Tensor) -> None:
        planes = heights.shape[self._axis]
        parts = (
            (self._heights, heights),
            (self._inside, threshold_mask(inside, self._threshold)),
            (self._codes, foreground_codes(inside)),
        )
        for whole, part in parts:
            whole.narrow(self._axis, self._end, planes).copy_(part)
        self._end += planes

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        # All planes are here, so they are added along z.
        planes = self._planes._replace(along_y=False)
        watershed = Watershed(planes, self._persistence.floor, self._block, WHOLE_NEIGHBOURS)
        watershed.add(self._heights, self._inside, self._codes)
        basins = watershed.finish()
        del watershed, self._heights, self._inside, self._codes
        merge = merge_basins_on_device
        return label_basins(basins, self._persistence, minimum_size, drop_border=drop_border, keep=keep, merge=merge)


def threshold_mask(scores: Tensor, threshold: float) -> Tensor:
    """Return where scores exceed the threshold, bool of the same shape; a bool tensor is returned as it is."""
    if scores.dtype == torch.bool:
        return scores
    if scores.device.type != "cpu":
        return scores > threshold
    # NumPy takes a sixth of torch's time on one thread.
    return torch.from_numpy(scores.float().numpy() > np.float32(threshold))


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
