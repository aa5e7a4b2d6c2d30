"""Watershed in the memory of a separate device: all planes at once, because each synchronization takes time."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.types import Objects
from service.inference.decoding.basin_merging import Persistence, ShallowPasses, find_shallow_passes, join_basins
from service.inference.decoding.labels import label_basins
from service.inference.decoding.streaming import threshold_mask
from service.inference.decoding.watershed import Basins, Planes, Watershed, foreground_codes
from service.inference.decoding.watershed_kernel import ObjectFilter, keep_all

# Voxels, with the rims of their planes, that a device with memory of its own processes as one block; 36 bytes each.
BLOCK_VOXELS = 2**26

# Voxels whose neighbours such a device inspects in one operation.
NEIGHBOUR_VOXELS = 2**18


class WholeWatershed:
    """A `StreamingWatershed` that gathers all planes on their device, and then works on up to `BLOCK_VOXELS` at once.

    The host waits for the device a few times for each block, however many parts the planes came in, and while basins
    are joined there.
    """

    def __init__(self, planes: Planes, threshold: float, persistence: Persistence, block: int = BLOCK_VOXELS) -> None:
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
        watershed = Watershed(planes, self._persistence.floor, self._block, NEIGHBOUR_VOXELS)
        watershed.add(self._heights, self._inside, self._codes)
        basins = watershed.finish()
        del watershed, self._heights, self._inside, self._codes
        merge = merge_basins_on_device
        return label_basins(basins, self._persistence, minimum_size, drop_border=drop_border, keep=keep, merge=merge)


def watershed_bytes(size: Size) -> int:
    """Estimate the device's memory that the watershed of a volume of `size` (Z, Y, X) takes."""
    plane = (size[1] + 2) * (size[2] + 2)
    block = min(size[0] * plane, BLOCK_VOXELS) + 2 * plane
    # Some nine 32-bit arrays for a block; heights, foreground and its code, pieces and labels of every voxel, and by
    # measurement two bytes for the passes between crowded objects; and the neighbours of some voxels.
    return 36 * block + (8 + 6) * math.prod(size) + 600 * NEIGHBOUR_VOXELS


def merge_basins_on_device(basins: Basins, persistence: Persistence) -> NDArray[np.int64]:
    """Return the object of every basin, int64 [R], from 0: equal to those of `merge_shallow_basins`.

    Torch merges all at once on the device of the basins, instead of pass by pass. The merge tree is built as Borůvka
    built spanning trees: in each round every group of basins joins what lies beyond its highest pass, if that pass is
    shallow to the group's peak. No pass that is taken in this way is left out when passes are taken from the highest
    down, and the other way round: among passes as high as the one that is taken, or higher, none leads out of the
    group, so that the group is whole by then. Its peak can only have been lower.

    The host waits for the device once a round, of which there are at most log2 R.
    """
    peaks = persistence.distance(basins.peaks)
    passes = find_shallow_passes(basins, persistence)
    group, joined = _join_groups(peaks, passes, persistence.depth)
    numbers = torch.arange(len(peaks), device=peaks.device)
    # An object has the number of its highest basin, whose place orders it among the others.
    top = torch.full_like(peaks, -torch.inf).scatter_reduce_(0, group, peaks, "amax")
    highest = peaks == top[group]
    named = torch.full_like(numbers, len(peaks))
    named.scatter_reduce_(0, group, torch.where(highest, numbers, len(peaks)), "amin")
    root = named[group]
    tied = torch.zeros_like(numbers).scatter_add_(0, group, highest.long()) > 1
    between = joined & tied[group[passes.first]]
    if bool(between.any()):
        # Which of several equally high basins that is depends on the order in which they were joined.
        first, second, height = (column[between].cpu().numpy() for column in passes)
        by_order = join_basins(peaks.cpu().numpy(), first, second, height, math.inf)
        root = torch.where(tied[group], torch.from_numpy(by_order).to(root.device), root)
    # Roots become numbers without gaps, in their order.
    rank = torch.zeros_like(numbers).index_fill_(0, root, 1).cumsum(0) - 1
    objects: NDArray[np.int64] = rank[root].cpu().numpy()
    return objects


def _join_groups(peaks: Tensor, passes: ShallowPasses, depth: float) -> tuple[Tensor, Tensor]:
    """Return a basin of each one's group, the same for all of it, int64 [R], and the passes that joined some."""
    last = len(passes.first)
    numbers, ranks = torch.arange(len(peaks), device=peaks.device), torch.arange(last, device=peaks.device)
    group, top, joined = numbers, peaks, torch.zeros(last + 1, dtype=torch.bool, device=peaks.device)
    while last:
        one, other = group[passes.first], group[passes.second]
        outward = torch.where(one == other, last, ranks)
        best = torch.full_like(numbers, last)
        best = best.scatter_reduce_(0, one, outward, "amin").scatter_reduce_(0, other, outward, "amin")
        taken = best.clamp(max=last - 1)
        joins = (best < last) & (top - passes.height[taken] < depth)
        if not bool(joins.any()):
            break
        joined[torch.where(joins, taken, last)] = True
        beyond = torch.where(one[taken] == numbers, other[taken], one[taken])
        parent = torch.where(joins, beyond, numbers)
        # Two groups that take the same pass would follow each other for ever.
        parent = torch.where((parent[parent] == numbers) & (numbers < parent), numbers, parent)
        while not torch.equal(further := parent[parent], parent):
            parent = further
        group = parent[group]
        top = torch.full_like(top, -torch.inf).scatter_reduce_(0, parent, top, "amax")
    return group, joined[:last]
