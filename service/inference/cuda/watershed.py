"""Watershed in a device's own memory. It processes all planes together, because each synchronization takes time."""

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

# Maximum number of voxels, with the margins of their planes, in one block on the device; each needs 36 bytes.
BLOCK_VOXELS = 2**26

# Number of voxels whose neighbors are inspected in one operation on the device.
NEIGHBOR_VOXELS = 2**18


class WholeWatershed:
    """Variant of `StreamingWatershed` that collects all planes on their device, and then processes large blocks.

    The host waits for the device a few times per block of up to `block` voxels, however many parts the planes arrived
    in, and while the basins are merged there.
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
        for collected, part in parts:
            collected.narrow(self._axis, self._end, planes).copy_(part)
        self._end += planes

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        # All planes have been collected, so they can be added along z.
        planes = self._planes._replace(along_y=False)
        watershed = Watershed(planes, self._persistence.floor, self._block, NEIGHBOR_VOXELS)
        watershed.add(self._heights, self._inside, self._codes)
        basins = watershed.finish()
        del watershed, self._heights, self._inside, self._codes
        merge = merge_basins_on_device
        return label_basins(basins, self._persistence, minimum_size, drop_border=drop_border, keep=keep, merge=merge)


def watershed_bytes(size: Size) -> int:
    """Estimate the device memory in bytes for the watershed of a volume of `size` (Z, Y, X)."""
    plane = (size[1] + 2) * (size[2] + 2)
    block = min(size[0] * plane, BLOCK_VOXELS) + 2 * plane
    # Per block, about nine 32-bit arrays. Per voxel, the height, foreground, code, piece and label; and, as measured,
    # two bytes for the passes between crowded objects. Plus the neighbors of some voxels.
    return 36 * block + (8 + 6) * math.prod(size) + 600 * NEIGHBOR_VOXELS


def merge_basins_on_device(basins: Basins, persistence: Persistence) -> NDArray[np.int64]:
    """Return the object of each basin, int64 [R] from 0, equal to the result of `merge_shallow_basins`.

    The merge tree is built on the device of the basins like a minimum spanning tree by Borůvka's algorithm, not pass by
    pass. In each round, every group of basins joins the group beyond its highest pass, if that pass is shallow relative
    to the peak of the group. This selects the same passes as processing all passes in descending order. No pass out of
    the group is higher than the selected one, so the group is complete when that pass is reached, and its peak can only
    have been lower before.

    The host waits for the device once per round, at most log2(R) times.
    """
    peaks = persistence.distance(basins.peaks)
    passes = find_shallow_passes(basins, persistence)
    group, joined = _join_groups(peaks, passes, persistence.depth)
    numbers = torch.arange(len(peaks), device=peaks.device)
    # The number of an object is that of its highest basin, whose position defines the order of the objects.
    top = torch.full_like(peaks, -torch.inf).scatter_reduce_(0, group, peaks, "amax")
    highest = peaks == top[group]
    named = torch.full_like(numbers, len(peaks))
    named.scatter_reduce_(0, group, torch.where(highest, numbers, len(peaks)), "amin")
    root = named[group]
    has_tie = torch.zeros_like(numbers).scatter_add_(0, group, highest.long()) > 1
    ambiguous = joined & has_tie[group[passes.first]]
    if bool(ambiguous.any()):
        # Which of several equally high basins is the root depends on the order in which they were merged.
        first, second, height = (column[ambiguous].cpu().numpy() for column in passes)
        by_order = join_basins(peaks.cpu().numpy(), first, second, height, math.inf)
        root = torch.where(has_tie[group], torch.from_numpy(by_order).to(root.device), root)
    # Convert roots to consecutive numbers, in the same order.
    rank = torch.zeros_like(numbers).index_fill_(0, root, 1).cumsum(0) - 1
    objects: NDArray[np.int64] = rank[root].cpu().numpy()
    return objects


def _join_groups(peaks: Tensor, passes: ShallowPasses, depth: float) -> tuple[Tensor, Tensor]:
    """Return a representative basin of the group of each basin, int64 [R], and the passes that joined groups."""
    last = len(passes.first)
    numbers, ranks = torch.arange(len(peaks), device=peaks.device), torch.arange(last, device=peaks.device)
    group, top, joined = numbers, peaks, torch.zeros(last + 1, dtype=torch.bool, device=peaks.device)
    while last:
        ones, other = group[passes.first], group[passes.second]
        outward = torch.where(ones == other, last, ranks)
        best = torch.full_like(numbers, last)
        best = best.scatter_reduce_(0, ones, outward, "amin").scatter_reduce_(0, other, outward, "amin")
        selected = best.clamp(max=last - 1)
        joins = (best < last) & (top - passes.height[selected] < depth)
        if not bool(joins.any()):
            break
        joined[torch.where(joins, selected, last)] = True
        neighbor = torch.where(ones[selected] == numbers, other[selected], ones[selected])
        parent = torch.where(joins, neighbor, numbers)
        # Two groups that select the same pass would point to each other in an endless loop.
        parent = torch.where((parent[parent] == numbers) & (numbers < parent), numbers, parent)
        while not torch.equal(grandparent := parent[parent], parent):
            parent = grandparent
        group = parent[group]
        top = torch.full_like(top, -torch.inf).scatter_reduce_(0, parent, top, "amax")
    return group, joined[:last]
