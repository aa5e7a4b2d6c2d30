"""Watershed in a device's own memory: merging of basins, and an estimate of the memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.inference.decoding.basin_merging import Persistence, ShallowPasses, find_shallow_passes, join_basins
from service.inference.decoding.watershed import MAX_BLOCK_VOXELS, NEIGHBOR_BATCH_VOXELS, Basins


def estimate_watershed_bytes(size: Size) -> int:
    """Estimate the device memory in bytes for the watershed of a volume of `size` (Z, Y, X)."""
    plane_voxels = (size[1] + 2) * (size[2] + 2)
    block_voxels = min(size[0] * plane_voxels, MAX_BLOCK_VOXELS) + 2 * plane_voxels
    # Each block needs about nine 32-bit arrays. Each voxel needs its height, foreground, code, piece and label, and two
    # bytes (measured) for the passes between crowded objects. The last term is for the neighbors of the voxels in one
    # batch.
    return 36 * block_voxels + (8 + 6) * math.prod(size) + 600 * NEIGHBOR_BATCH_VOXELS


def merge_basins_on_device(basins: Basins, persistence: Persistence) -> NDArray[np.int64]:
    """Return the object of each basin, int64 [R], numbered from 0. The result equals that of `merge_shallow_basins`.

    The merge tree is built on the device of the basins with Borůvka's algorithm for minimum spanning trees. In each
    round, every group of basins joins the group on the other side of its highest pass, if that pass is shallow relative
    to the peak of the group. This selects the same passes as processing all passes in descending order: no other pass
    out of the group is higher than the selected pass. In descending order, the group is therefore also complete before
    the selected pass is reached, and until then, its peak cannot become higher.

    The host waits for the device once per round, at most log2(R) times.
    """
    peaks = persistence.to_distances(basins.peaks)
    passes = find_shallow_passes(basins, persistence)
    groups, is_joined = _join_groups(peaks, passes, persistence.depth)
    basin_numbers = torch.arange(len(peaks), device=peaks.device)
    # Each object gets the number of its highest basin, because the positions of these basins define their order.
    group_peaks = torch.full_like(peaks, -torch.inf).scatter_reduce_(0, groups, peaks, "amax")
    is_highest = peaks == group_peaks[groups]
    highest_basin = torch.full_like(basin_numbers, len(peaks))
    highest_basin.scatter_reduce_(0, groups, torch.where(is_highest, basin_numbers, len(peaks)), "amin")
    roots = highest_basin[groups]
    has_tie = torch.zeros_like(basin_numbers).scatter_add_(0, groups, is_highest.long()) > 1
    is_ambiguous = is_joined & has_tie[groups[passes.first]]
    if bool(is_ambiguous.any()):
        # If several basins are equally high, the order in which they were merged determines which one is the root.
        first, second, height = (column[is_ambiguous].cpu().numpy() for column in passes)
        ordered_roots = join_basins(peaks.cpu().numpy(), first, second, height, math.inf)
        roots = torch.where(has_tie[groups], torch.from_numpy(ordered_roots).to(roots.device), roots)
    # Replace the roots with consecutive numbers in the same order.
    ranks = torch.zeros_like(basin_numbers).index_fill_(0, roots, 1).cumsum(0) - 1
    objects: NDArray[np.int64] = ranks[roots].cpu().numpy()
    return objects


def _join_groups(peaks: Tensor, passes: ShallowPasses, depth: float) -> tuple[Tensor, Tensor]:
    """Return a representative basin for the group of each basin, int64 [R], and whether each pass joined groups."""
    num_passes = len(passes.first)
    numbers, ranks = torch.arange(len(peaks), device=peaks.device), torch.arange(num_passes, device=peaks.device)
    groups, group_peaks, is_joined = numbers, peaks, torch.zeros(num_passes + 1, dtype=torch.bool, device=peaks.device)
    while num_passes:
        first_groups, second_groups = groups[passes.first], groups[passes.second]
        outward_passes = torch.where(first_groups == second_groups, num_passes, ranks)
        highest_passes = torch.full_like(numbers, num_passes)
        highest_passes = highest_passes.scatter_reduce_(0, first_groups, outward_passes, "amin").scatter_reduce_(
            0, second_groups, outward_passes, "amin"
        )
        selected_passes = highest_passes.clamp(max=num_passes - 1)
        is_joining = (highest_passes < num_passes) & (group_peaks - passes.height[selected_passes] < depth)
        if not bool(is_joining.any()):
            break
        is_joined[torch.where(is_joining, selected_passes, num_passes)] = True
        neighbors = torch.where(
            first_groups[selected_passes] == numbers, second_groups[selected_passes], first_groups[selected_passes]
        )
        parents = torch.where(is_joining, neighbors, numbers)
        # Two groups that select the same pass would point to each other, which would cause an endless loop.
        parents = torch.where((parents[parents] == numbers) & (numbers < parents), numbers, parents)
        while not torch.equal(grandparents := parents[parents], parents):
            parents = grandparents
        groups = parents[groups]
        group_peaks = torch.full_like(group_peaks, -torch.inf).scatter_reduce_(0, parents, group_peaks, "amax")
    return groups, is_joined[:num_passes]
