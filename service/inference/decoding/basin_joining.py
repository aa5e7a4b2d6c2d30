"""Merging of basins across shallow passes by torch on the device of the basins, all at once instead of pass by pass.

The merge tree is built as Borůvka built spanning trees: in each round every group of basins joins what lies beyond its
highest pass, if that pass is shallow to the group's peak. No pass that is taken in this way is left out when passes are
taken from the highest down, and the other way round: among passes as high as the one that is taken, or higher, none
leads out of the group, so that the group is whole by then. Its peak can only have been lower.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.inference.decoding.basin_merging import Persistence, ShallowPasses, find_shallow_passes, join_basins
from service.inference.decoding.watershed import Basins


def merge_basins_on_device(basins: Basins, persistence: Persistence) -> NDArray[np.int64]:
    """Return the object of every basin, int64 [R], from 0: equal to those of `merge_shallow_basins`.

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
