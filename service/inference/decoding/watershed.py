"""Watershed basins of a height map, and the passes between basins, in PyTorch: the reference for the C++ kernel.

A path leads from every voxel to the highest of its 26 neighbors, as in the watershed by topographical distance (Meyer
1994). Heights are compared without their last five bits. Positions break ties, so every path ends. Path ends are found
by pointer jumping (Wyllie 1979). Passes between maxima of the same plateau have the plateau's height.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.inference.decoding.pieces import (
    POSITION_BITS,
    PROBABILITIES,
    Pieces,
    compute_heights,
    compute_keys,
    list_faces,
)

# Key of background voxels: the lowest 32-bit integer, below the key of every height.
BACKGROUND_KEY = -(2**31)
# Number of voxels whose neighbors are examined together. Each voxel has 26 neighbors.
NEIGHBOR_BATCH_VOXELS = 2**18


def find_basins(
    heights: Tensor, mask: Tensor, codes: Tensor, compute_floors: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Pieces]:
    """Return the basin of each voxel, int32 [Z, Y, X], and the basins in the order of the positions of their maxima.

    Basins are numbered from 1 in the volume, where 0 is the background, and from 0 in `Pieces`. Every pass that reaches
    the floor of at least one of its two peaks is included. Positions are the numbers of the basins.

    heights         float32 [Z, Y, X]
    mask            whether each voxel is foreground, bool
    codes           code of the foreground score of each voxel, uint8; see `encode_foreground`
    compute_floors  returns the lowest height of a relevant pass for each peak, given the peak heights; both float32 [R]
    """
    keys = _encode_heights(heights, mask)
    # Every voxel has 26 neighbors in flat memory, because the volume is padded with a background voxel on every side.
    distances = ((heights.shape[1] + 2) * (heights.shape[2] + 2), heights.shape[2] + 2, 1)
    index = torch.int32 if len(keys) < 2**31 else torch.int64
    offsets, steps = (table.to(keys.device, index, non_blocking=True) for table in _make_offset_tables(distances))
    position = (keys > BACKGROUND_KEY).nonzero().squeeze(1).to(index)
    basin, basins, ends = _follow_paths(position, _find_highest_neighbors(keys, position, distances, steps), len(keys))
    own_key = keys.index_select(0, position)
    peak_keys = own_key.index_select(0, ends)
    limit = compute_keys(compute_floors(compute_heights(peak_keys))).index_select(0, basin - 1)
    near_peaks = (own_key >= limit).nonzero().squeeze(1)
    passes = [
        _find_passes(keys, basins, position.index_select(0, part), limit.index_select(0, part), offsets)
        for part in torch.split(near_peaks, NEIGHBOR_BATCH_VOXELS)
    ]
    volume = basins.view([length + 2 for length in heights.shape])[1:-1, 1:-1, 1:-1]
    voxel_codes = functional.pad(codes, (1, 1, 1, 1, 1, 1)).view(-1).index_select(0, position)
    probability = torch.from_numpy(PROBABILITIES).to(keys.device, torch.float64, non_blocking=True)[voxel_codes.int()]
    sums = (torch.bincount(basin, weights, len(ends) + 1)[1:].long() for weights in (None, probability))
    at_face = torch.zeros(len(ends) + 1, dtype=torch.int64, device=keys.device)
    for face in list_faces(volume.shape, (0, 0, 0), volume.shape):
        at_face.index_fill_(0, volume[face].flatten().long(), 1)
    properties = torch.stack((peak_keys.long(), *sums, at_face[1:])).cpu().numpy()
    highest_passes = _select_highest_passes(torch.cat(passes, 1), len(ends)).cpu().numpy()
    return volume, Pieces(np.arange(len(ends)), properties[0].astype(np.int32), properties[1:], highest_passes)


def _follow_paths(position: Tensor, target: Tensor, num_voxels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the basins, from 1, in which the paths of foreground voxels end, int32.

    position, target  position of each foreground voxel and of its highest neighbor in flat memory, [N]

    The result is the basin of each foreground voxel [N], the basin of every voxel in flat memory [num_voxels], and the
    numbers of the foreground voxels at which paths end [R].
    """
    # Rows of foreground voxels are numbered from 1. Row 0 represents the background.
    rows = torch.arange(1, len(position) + 1, dtype=position.dtype, device=position.device)
    row_of_voxel = position.new_zeros(num_voxels).index_copy_(0, position.long(), rows)
    parent = row_of_voxel.index_select(0, target).sub_(1)
    del target
    while not torch.equal(grandparent := parent.index_select(0, parent), parent):
        parent = grandparent
    ends = (parent == rows - 1).nonzero().squeeze(1)
    numbers = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
    numbers[ends] = torch.arange(1, len(ends) + 1, dtype=torch.int32, device=rows.device)
    basin = numbers.index_select(0, parent)
    return basin, torch.cat((basin.new_zeros(1), basin)).index_select(0, row_of_voxel), ends


def _make_offset_tables(distances: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the offsets to the 26 neighbors, and the offset to a neighbor by 32 * own position code + its code."""
    offsets = torch.cartesian_prod(*(distance * torch.arange(-1, 2) for distance in distances)).sum(1)
    steps = torch.zeros((32, 32), dtype=torch.int64)
    for weight, distance in zip((9, 3, 1), distances, strict=True):
        digit = torch.arange(32) // weight % 3
        steps += ((digit[None] - digit[:, None] + 1) % 3 - 1) * distance
    return offsets[offsets != 0], steps.view(-1)


def _find_highest_neighbors(keys: Tensor, position: Tensor, distances: tuple[int, int, int], steps: Tensor) -> Tensor:
    """Return the position of the highest voxel among each voxel and its neighbors, given the positions [N]."""
    highest = keys
    for distance in reversed(distances):
        pair_maxima = torch.maximum(highest[: -2 * distance], highest[distance:-distance])
        highest = torch.maximum(pair_maxima, highest[2 * distance :], out=pair_maxima)
    codes = keys.index_select(0, position), highest.index_select(0, position - sum(distances))
    own_code, highest_code = (code & POSITION_BITS for code in codes)
    return position + steps.index_select(0, own_code << 5 | highest_code)


def _find_passes(keys: Tensor, basins: Tensor, voxels: Tensor, limit: Tensor, offsets: Tensor) -> Tensor:
    """Return the passes from voxels [N] to neighbors in other basins that are not below the limit [N].

    The result is the numbers of the two basins from 0, the lower one first, and the key of each pass, int32 [3, E].
    """
    neighbors = (voxels[:, None] + offsets).view(-1)
    key = keys.index_select(0, neighbors).view(-1, len(offsets))
    selected = (key >= limit[:, None]).view(-1).nonzero().squeeze(1)
    voxels, neighbors = voxels.index_select(0, selected // len(offsets)), neighbors.index_select(0, selected)
    crossing = (basins.index_select(0, voxels) != basins.index_select(0, neighbors)).nonzero().squeeze(1)
    ends = torch.stack((voxels.index_select(0, crossing), neighbors.index_select(0, crossing))).view(-1)
    pairs, pair_keys = basins.index_select(0, ends).view(2, -1) - 1, keys.index_select(0, ends).view(2, -1)
    return torch.stack((pairs.amin(0), pairs.amax(0), pair_keys.amin(0)))


def _select_highest_passes(passes: Tensor, num_basins: int) -> Tensor:
    """Return the highest pass of each pair of basins, int64 [3, E]."""
    pairs, inverse = torch.unique(passes[0].long() * num_basins + passes[1], return_inverse=True)
    highest = passes.new_full((len(pairs),), BACKGROUND_KEY).scatter_reduce_(0, inverse, passes[2], "amax")
    return torch.stack((pairs // max(num_basins, 1), pairs % max(num_basins, 1), highest))


def encode_foreground(scores: Tensor) -> Tensor:
    """Return the codes in `PROBABILITIES` of foreground logits, uint8."""
    return (scores.float() * 16 + 128.5).clamp_(0, 255).nan_to_num_(0).to(torch.uint8)


def _encode_heights(heights: Tensor, mask: Tensor) -> Tensor:
    """Return the keys of a volume that is padded by one background voxel on every side, int32 [L]."""
    keys = compute_keys(heights)
    for axis, (weight, length) in enumerate(zip((9, 3, 1), heights.shape, strict=True)):
        digits = (torch.arange(length, dtype=torch.int32, device=keys.device) + 1) % 3 * weight
        keys += digits.view([-1 if index == axis else 1 for index in range(3)])
    return functional.pad(keys.masked_fill_(~mask, BACKGROUND_KEY), (1, 1, 1, 1, 1, 1), value=BACKGROUND_KEY).view(-1)
