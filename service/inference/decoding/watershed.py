"""Watershed basins of a height map, and the passes between basins, in PyTorch: the reference for the C++ kernel.

A path leads from every voxel to the highest of its 26 neighbors, as in the watershed by topographical distance (Meyer
1994). Heights are compared without their last five bits. Positions break ties, so every path ends. Path ends are found
by pointer jumping (Wyllie 1979) in blocks of planes. A path that leaves its block ends there as a separate piece;
`find_basins` joins the pieces, so that basins and passes do not depend on the blocks. Passes between maxima of the same
plateau have the plateau's height.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.inference.decoding.watershed_kernel import PROBABILITY_ONE

# Key of background voxels: the lowest 32-bit integer, below the key of every height.
BACKGROUND_KEY = -(2**31)
# Maximum number of voxels of a block, including the margins of its planes. Each voxel needs 36 bytes.
MAX_BLOCK_VOXELS = 2**26
# Number of voxels whose neighbors are examined together. Each voxel has 26 neighbors.
NEIGHBOR_BATCH_VOXELS = 2**18
# The last five bits of a key contain the position of the voxel modulo 3 along each axis, to identify neighbors.
POSITION_BITS = 0b11111

# Fixed-point foreground probability of each code. The codes are logits in steps of 1/16 from -8 to 8.
PROBABILITIES = torch.from_numpy(np.rint(PROBABILITY_ONE / (1 + np.exp((128 - np.arange(256)) / 16))).astype(np.int64))


class Passes(NamedTuple):
    """Passes between basins: the numbers of both basins, int64 [E] each, and the height of the pass, float32 [E].

    A pass is a pair of neighboring voxels and has the height of the lower voxel. Rows may repeat a pair of basins, or
    join a basin with itself.
    """

    first: Tensor
    second: Tensor
    height: Tensor


@dataclass(frozen=True)
class Basins:
    """Basins of the whole volume, numbered from 0 in the order of the positions of their maxima.

    basin_of_piece  int64 [P] on the CPU: the basin of each piece; the background is piece 0 and has basin -1
    pieces          int32 [Z, Y, X]: the piece of every voxel
    peaks           float32 [R]: height of each basin's maximum
    voxels          int64 [R] on the CPU: size of each basin
    foreground      int64 [R] on the CPU: sum of the voxels' foreground probabilities, times `PROBABILITY_ONE`
    passes          every pass that reaches the floor of at least one of its two peaks
    """

    basin_of_piece: Tensor
    pieces: Tensor
    peaks: Tensor
    voxels: Tensor
    foreground: Tensor
    passes: Passes


class _Paths(NamedTuple):
    """Foreground voxels of a block in flat memory, int32 [N] each, and the ends of their paths, int32 [P] each.

    row_of_voxel  int32 [L]: 1 + the row of every voxel of the block, 0 for background and for the first and last plane
    position      flat position of each voxel, counted from the plane below the block
    own_key       key of each voxel
    piece         index of the end of its path
    targets       position of the highest neighbor of each end, or of the end itself
    target_keys   key at each target
    """

    row_of_voxel: Tensor
    position: Tensor
    own_key: Tensor
    piece: Tensor
    targets: Tensor
    target_keys: Tensor


class _PaddedMemory(NamedTuple):
    """Flat memory of planes with a background voxel on every side, in which all voxels have neighbors.

    plane, row  distances between planes, and between rows
    offsets     offsets from a voxel to its 26 neighbors, int32 [26]
    steps       offset to a neighbor, int32 [1024], indexed by 32 * own position code + neighbor's code
    """

    plane: int
    row: int
    offsets: Tensor
    steps: Tensor

    @classmethod
    def create(cls, size: torch.Size, device: torch.device) -> _PaddedMemory:
        """Return the description of the memory of a volume of `size` (Z, Y, X)."""
        distances = ((size[1] + 2) * (size[2] + 2), size[2] + 2, 1)
        offsets, steps = torch.zeros(1, dtype=torch.int32), torch.zeros((32, 32), dtype=torch.int32)
        for weight, distance in zip((9, 3, 1), distances, strict=True):
            offsets = (offsets[:, None] + distance * torch.arange(-1, 2)).view(-1)
            digit = torch.arange(32) // weight % 3
            steps += (((digit[None] - digit[:, None] + 1) % 3 - 1) * distance).int()
        offsets = offsets[offsets != 0].int()
        tables = (table.to(device, non_blocking=True) for table in (offsets, steps.view(-1)))
        return cls(*distances[:2], *tables)


def find_basins(
    heights: Tensor,
    mask: Tensor,
    codes: Tensor,
    compute_floors: Callable[[Tensor], Tensor],
    block_voxels: int = MAX_BLOCK_VOXELS,
) -> Basins:
    """Return the basins of a volume.

    heights         float32 [Z, Y, X]
    mask            whether each voxel is foreground, bool
    codes           code of the foreground score of each voxel, uint8; see `encode_foreground`
    compute_floors  returns the lowest height of a relevant pass for each peak, given the peak heights; both float32 [R]
    block_voxels    maximum number of voxels in a block, including the margins of its planes
    """
    device, memory = heights.device, _PaddedMemory.create(heights.shape, heights.device)
    pieces = torch.zeros([length + 2 for length in heights.shape], dtype=torch.int32, device=device)
    flat_pieces, flat_codes = pieces.view(-1), functional.pad(codes, (1, 1, 1, 1, 1, 1)).view(-1)
    ends, passes = [torch.zeros((4, 1), dtype=torch.int64, device=device)], list[Tensor]()
    probabilities = PROBABILITIES.to(device, non_blocking=True)
    num_pieces, step = 1, max(block_voxels // memory.plane, 1)
    for first in range(1, len(pieces) - 1, step):
        keys = _encode_block(heights, mask, first - 1, min(first + step, len(pieces) - 1) + 1)
        if (paths := _trace_paths(keys, memory)) is None:
            continue
        low = (first - 1) * memory.plane
        numbers = torch.cat((paths.piece.new_zeros(1), paths.piece + num_pieces))
        inner = slice(memory.plane, len(keys) - memory.plane)
        torch.index_select(numbers, 0, paths.row_of_voxel[inner], out=flat_pieces[low:][inner])
        block_codes = flat_codes[low:].index_select(0, paths.position)
        ends.append(_measure_pieces(paths, probabilities[block_codes.int()], low))
        limit = _compute_keys(compute_floors(compute_heights(paths.target_keys))).index_select(0, paths.piece)
        near_peaks = (paths.own_key >= limit).nonzero().squeeze(1)
        for rows in torch.split(near_peaks, NEIGHBOR_BATCH_VOXELS):
            voxels, floors = paths.position.index_select(0, rows), limit.index_select(0, rows)
            piece, neighbor, key = _find_passes(keys, flat_pieces[low:], voxels, floors, memory)
            passes.append(torch.stack((piece.long(), low + neighbor.long(), key.long())))
        num_pieces += len(paths.targets)
    return _join_pieces(pieces, torch.cat(ends, 1), passes)


def _measure_pieces(paths: _Paths, probability: Tensor, low: int) -> Tensor:
    """Return the properties of the pieces of a block that begins at the position `low`, int64 [4, P].

    The rows are the position and the key of the voxel where the paths of a piece end, the number of its voxels, and the
    sum of their foreground probabilities, given the `probability` of each voxel.
    """
    num_pieces = len(paths.targets)
    voxels = torch.bincount(paths.piece, minlength=num_pieces)
    foreground = torch.bincount(paths.piece, probability.double(), minlength=num_pieces).long()
    return torch.stack((low + paths.targets.long(), paths.target_keys.long(), voxels, foreground))


def _trace_paths(keys: Tensor, memory: _PaddedMemory) -> _Paths | None:
    """Trace the paths of voxels between the first and the last plane. Returns None if there is no foreground."""
    plane, row = memory.plane, memory.row
    position = (keys[plane:-plane] > BACKGROUND_KEY).nonzero().squeeze(1) + plane
    if not len(position):
        return None
    # Rows are numbered from 1 in the order of their positions. Row 0 represents everything outside the block.
    rows = torch.arange(1, len(position) + 1, dtype=torch.int32, device=keys.device)
    row_of_voxel = torch.zeros_like(keys).index_copy_(0, position, rows)
    position, highest = position.int(), keys
    for step in (1, row, plane):
        pair_maxima = torch.maximum(highest[: -2 * step], highest[step:-step])
        highest = torch.maximum(pair_maxima, highest[2 * step :], out=pair_maxima)
    own_key, highest = keys.index_select(0, position), highest.index_select(0, position - (1 + row + plane))
    code = ((own_key & POSITION_BITS) << 5) | (highest & POSITION_BITS)
    target = position + memory.steps.index_select(0, code)
    parent = row_of_voxel.index_select(0, target)
    parent = torch.where(parent == 0, rows, parent) - 1
    while not torch.equal(grandparent := parent.index_select(0, parent), parent):
        parent = grandparent
    ends = (parent == rows - 1).nonzero().squeeze(1)
    piece_numbers = torch.zeros_like(rows)
    piece_numbers[ends] = torch.arange(len(ends), dtype=torch.int32, device=keys.device)
    piece = piece_numbers.index_select(0, parent)
    return _Paths(row_of_voxel, position, own_key, piece, target.index_select(0, ends), highest.index_select(0, ends))


def _find_passes(
    keys: Tensor, pieces: Tensor, voxels: Tensor, limit: Tensor, memory: _PaddedMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the passes from voxels [N] to neighbors that belong to other pieces and are not below the limit [N].

    The result is the piece, the position of the neighbor, and the key of each pass, int32 [E] each. The pieces of the
    plane above the block are not yet known.
    """
    neighbors = (voxels[:, None] + memory.offsets).view(-1)
    key = keys.index_select(0, neighbors).view(-1, len(memory.offsets))
    selected = (key >= limit[:, None]).view(-1).nonzero().squeeze(1)
    voxels = voxels.index_select(0, selected // len(memory.offsets))
    neighbors, piece = neighbors.index_select(0, selected), pieces.index_select(0, voxels)
    crossing = (pieces.index_select(0, neighbors) != piece).nonzero().squeeze(1)
    voxels, neighbors = voxels.index_select(0, crossing), neighbors.index_select(0, crossing)
    heights = torch.minimum(keys.index_select(0, voxels), keys.index_select(0, neighbors))
    return piece.index_select(0, crossing), neighbors, heights


def _join_pieces(pieces: Tensor, ends: Tensor, passes: list[Tensor]) -> Basins:
    """Return the basins that the pieces belong to.

    pieces  piece of every voxel of the padded volume
    ends    results of `_measure_pieces`
    passes  results of `_find_passes`, with positions in the padded volume, int64 [3, E] each
    """
    # The pieces above a block were not known when its paths were traced. Position 0 of piece 0 is in the padding.
    next_pieces = pieces.view(-1)[ends[0]]
    # NumPy is much faster than PyTorch for such small arrays.
    link, position, keys, voxels, foreground = torch.cat((next_pieces[None], ends)).cpu().numpy()
    maxima = np.flatnonzero(link == np.arange(len(link)))[1:]
    maxima = maxima[position[maxima].argsort()]
    while not np.array_equal(next_link := link[link], link):
        link = next_link
    basin = np.full_like(link, -1)
    basin[maxima] = np.arange(len(maxima))
    basin_of_piece = basin[link]
    sums = np.zeros((2, len(maxima) + 1), np.int64)
    np.add.at(sums[0], basin_of_piece + 1, voxels)
    np.add.at(sums[1], basin_of_piece + 1, foreground)
    peaks = compute_heights(torch.from_numpy(keys[maxima]).int()).to(pieces.device)
    piece, neighbor, key = torch.cat([ends.new_zeros(3, 0), *passes], 1)
    # There are many more passes than basins, so they stay on the device.
    basins = torch.from_numpy(basin_of_piece)
    device_basins = basins.to(pieces.device)
    neighbor_piece = pieces.view(-1)[neighbor].long()
    basin_passes = Passes(device_basins[piece], device_basins[neighbor_piece], compute_heights(key.int()))
    voxels, foreground = torch.from_numpy(sums[:, 1:])
    return Basins(basins, pieces[1:-1, 1:-1, 1:-1], peaks, voxels, foreground, basin_passes)


def encode_foreground(scores: Tensor) -> Tensor:
    """Return the codes in `PROBABILITIES` of foreground logits, uint8. The voxels of a mask have the highest code."""
    if scores.dtype == torch.bool:
        return torch.full(scores.shape, 255, dtype=torch.uint8, device=scores.device)
    return (scores.float() * 16 + 128.5).clamp_(0, 255).nan_to_num_(0).to(torch.uint8)


def _encode_block(heights: Tensor, mask: Tensor, first: int, end: int) -> Tensor:
    """Return the keys of some planes of the padded volume, int32 [L], including their padding."""
    first_plane, end_plane = max(first - 1, 0), min(end - 1, len(heights))
    keys = _compute_keys(heights[first_plane:end_plane])
    lengths = (end_plane - first_plane, *heights.shape[1:])
    z, y, x = (
        (torch.arange(length, dtype=torch.int32, device=keys.device) + start + 1) % 3
        for length, start in zip(lengths, (first_plane, 0, 0), strict=True)
    )
    keys += 9 * z[:, None, None] + 3 * y[:, None] + x
    block = keys.new_full((end - first, *(length + 2 for length in heights.shape[1:])), BACKGROUND_KEY)
    inner = block[first_plane + 1 - first : end_plane + 1 - first, 1:-1, 1:-1]
    torch.where(mask[first_plane:end_plane], keys, keys.new_full((), BACKGROUND_KEY), out=inner)
    return block.view(-1)


def _compute_keys(heights: Tensor) -> Tensor:
    """Map float32 heights to int32 keys of the same order. The position bits are zero."""
    bits = heights.view(torch.int32)
    # Modify in place, because each additional array of a large block would exceed the cache.
    keys = bits >> 31
    keys &= 0x7FFFFFFF
    keys ^= bits
    keys &= ~POSITION_BITS
    return keys


def compute_heights(keys: Tensor) -> Tensor:
    """Invert `_compute_keys`, except for the dropped bits."""
    ordered = keys & ~POSITION_BITS
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
