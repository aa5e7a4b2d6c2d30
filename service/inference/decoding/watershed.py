"""Watershed basins of a height map that arrives plane by plane, and the passes between basins, in PyTorch.

Planes are processed in blocks that fit in the cache of a processor; only the piece number of each voxel is retained.
Basins and passes do not depend on how the planes were divided into blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.inference.decoding.watershed_kernel import PROBABILITY_ONE, choose_block_voxels

# Key of background voxels: the lowest 32-bit integer, below the key of every height.
BACKGROUND_KEY = -(2**31)
# Number of voxels whose neighbors are examined together. Each voxel has 26 neighbors.
NEIGHBOR_BATCH_VOXELS = 2**14
# The last five bits of a key contain the position of the voxel modulo 3 along each axis, to identify neighbors.
POSITION_BITS = 0b11111

# Fixed-point foreground probability of each code. The codes are logits in steps of 1/16 from -8 to 8.
PROBABILITIES = torch.from_numpy(np.rint(PROBABILITY_ONE / (1 + np.exp((128 - np.arange(256)) / 16))).astype(np.int64))

NEIGHBORS = tuple((z, y, x) for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1) if (z, y, x) != (0, 0, 0))


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


class _PieceEnds(NamedTuple):
    """Ends of the steepest-ascent paths of one block, int64 [P] each, one row per piece.

    position    position in the padded volume: of the end's highest neighbor, or of the end if it is a maximum
    key         key at this position
    voxels      size of the piece
    foreground  sum of the voxels' foreground probabilities, times `PROBABILITY_ONE`
    """

    position: Tensor
    key: Tensor
    voxels: Tensor
    foreground: Tensor


class _BlockPaths(NamedTuple):
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


class Planes(NamedTuple):
    """Order in which the planes of a volume of `size` (Z, Y, X) arrive on a device: along z, or along y."""

    size: Size
    device: torch.device
    along_y: bool = False


class Watershed:
    """Watershed transform of planes that are added incrementally.

    A path leads from every voxel to the highest of its 26 neighbors, as in the watershed by topographical distance
    (Meyer 1994). Path ends are found by pointer jumping (Wyllie 1979) within a block of planes. A path that leaves its
    block ends there as a separate piece; `finish` joins the pieces. Heights are compared without their last five bits.
    Positions break ties, so every path ends. Passes between maxima of the same plateau have the plateau's height.

    planes          planes of the volume; the basins do not depend on their order
    compute_floors  returns the lowest height of a relevant pass for each peak, given the peak heights; both float32 [R]
    block_voxels    number of voxels that are processed together; None: use `choose_block_voxels`
    neighbor_batch  number of voxels whose neighbors are examined together
    """

    def __init__(
        self,
        planes: Planes,
        compute_floors: Callable[[Tensor], Tensor],
        block_voxels: int | None = None,
        neighbor_batch: int = NEIGHBOR_BATCH_VOXELS,
    ) -> None:
        size, device, along_y = planes
        depth, height, width = (size[1], size[0], size[2]) if along_y else size
        self._along_y, self._neighbor_batch = along_y, neighbor_batch
        self._compute_floors, self._device, self._depth = compute_floors, device, depth
        # Background padding on every side puts the neighbors of all voxels at the same offsets in memory.
        self._shape = (height + 2, width + 2)
        self._plane_step = self._shape[0] * self._shape[1]
        block_voxels = choose_block_voxels(size, along_y=along_y) if block_voxels is None else block_voxels
        self._block_planes = min(max(block_voxels // self._plane_step, 1), depth)
        self._pieces = torch.zeros((depth + 2, *self._shape), dtype=torch.int32, device=device)
        # Weights of the coordinates in position codes. The codes do not depend on the direction in which planes arrive.
        self._weights = (3, 9) if along_y else (9, 3)
        self._plane_codes, self._codes = _encode_positions(self._block_planes, *self._shape, self._weights, device)
        # Only CPU tensors are cached: other streams would have to wait for a cached tensor on a device.
        self._offsets = _compute_neighbor_offsets(*self._shape).to(device, non_blocking=True)
        self._steps = _compute_steps(self._plane_step, self._shape[1], self._weights).to(device, non_blocking=True)
        # The plane below the next block, followed by the plane that waits for the plane above it.
        self._pending = self._make_background(1)
        self._pending_codes = torch.zeros_like(self._pending, dtype=torch.uint8)
        self._probabilities = PROBABILITIES.to(device, non_blocking=True)
        # Index of the first plane of the next block, including the padding.
        self._z = 1
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._piece_ends = [_PieceEnds(zero - 1, zero, zero, zero)]
        self._num_pieces = 1
        self._candidates: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, heights: Tensor, mask: Tensor, codes: Tensor) -> None:
        """Add float32 heights, mask and foreground codes of planes: [planes, Y, X], or [Z, planes, X] along y."""
        if self._along_y:
            heights, mask, codes = (tensor.transpose(0, 1) for tensor in (heights, mask, codes))
        for low in range(0, len(heights), self._block_planes):
            part = slice(low, low + self._block_planes)
            num_pending, num_planes = len(self._pending), len(heights[part])
            is_last = self._z + num_pending - 2 + num_planes == self._depth
            # The last block includes the background plane at the end, so that a small volume needs only one block.
            block = self._make_background(num_pending + num_planes + is_last)
            block[:num_pending] = self._pending
            self._write_keys(heights[part], mask[part], block[num_pending : num_pending + num_planes])
            block_codes = torch.zeros_like(block, dtype=torch.uint8)
            block_codes[:num_pending] = self._pending_codes
            block_codes[num_pending : num_pending + num_planes, 1:-1, 1:-1] = codes[part]
            self._process_block(block, block_codes)

    def finish(self) -> Basins:
        """Return the basins after all planes have been added."""
        ends = torch.cat([torch.stack(columns) for columns in self._piece_ends], 1)
        # The pieces above a block were not known when its paths were traced. Position -1 of piece 0 is in the padding.
        next_pieces = self._pieces.view(-1)[ends[0]]
        # NumPy is much faster than PyTorch for such small arrays.
        link, position, keys, voxels, foreground = torch.cat((next_pieces[None], ends)).cpu().numpy()
        maxima = np.flatnonzero(link == np.arange(len(link)))[1:]
        maxima = maxima[self._order_by_position(position[maxima]).argsort()]
        while not np.array_equal(next_link := link[link], link):
            link = next_link
        basin = np.full_like(link, -1)
        basin[maxima] = np.arange(len(maxima))
        basin_of_piece = basin[link]
        sums_by_basin = np.zeros((2, len(maxima) + 1), np.int64)
        np.add.at(sums_by_basin[0], basin_of_piece + 1, voxels)
        np.add.at(sums_by_basin[1], basin_of_piece + 1, foreground)
        pieces = self._pieces[1:-1, 1:-1, 1:-1]
        pieces = pieces.transpose(0, 1) if self._along_y else pieces
        peaks = compute_heights(torch.from_numpy(keys[maxima]).int()).to(self._device)
        basins, sums = torch.from_numpy(basin_of_piece), torch.from_numpy(sums_by_basin[:, 1:])
        return Basins(basins, pieces, peaks, sums[0], sums[1], self._resolve_passes(basins))

    def _order_by_position(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sort keys [N] that order positions, which include the padding, like the voxels of the volume."""
        if not self._along_y:
            return position
        plane, remainder = np.divmod(position, self._plane_step)
        row, x = np.divmod(remainder, self._shape[1])
        return (row * (self._depth + 2) + plane) * self._shape[1] + x

    def _resolve_passes(self, basin_of_piece: Tensor) -> Passes:
        if not self._candidates:
            no_indices = torch.zeros(0, dtype=torch.int64, device=self._device)
            return Passes(no_indices, no_indices, no_indices.float())
        piece, position, key = (torch.cat(column) for column in zip(*self._candidates, strict=True))
        # There are many more passes than basins, so they stay on the device.
        basin_of_piece, other_piece = basin_of_piece.to(self._device), self._pieces.view(-1)[position]
        return Passes(basin_of_piece[piece], basin_of_piece[other_piece], compute_heights(key))

    def _make_background(self, num_planes: int) -> Tensor:
        return torch.full((num_planes, *self._shape), BACKGROUND_KEY, dtype=torch.int32, device=self._device)

    def _write_keys(self, heights: Tensor, mask: Tensor, block: Tensor) -> None:
        """Write the keys of the next planes inside their padding."""
        z = (self._z - 1 + len(self._pending)) % 3
        keys = _compute_keys(heights)
        keys += self._plane_codes[z : z + len(keys)]
        keys += self._codes
        background = keys.new_full((), BACKGROUND_KEY)
        torch.where(mask, keys, background, out=block[:, 1:-1, 1:-1])

    def _process_block(self, block: Tensor, codes: Tensor) -> None:
        """Process the planes whose upper neighbors have arrived. `block` begins with the pending planes."""
        if len(block) > 2:
            if (paths := self._trace_paths(block.view(-1))) is not None:
                self._store_pieces(paths, codes.view(-1))
                self._find_passes(paths, block.view(-1))
            self._z += len(block) - 2
        self._pending, self._pending_codes = block[-2:].clone(), codes[-2:].clone()

    def _trace_paths(self, keys: Tensor) -> _BlockPaths | None:
        """Trace the paths of voxels between the first and the last plane. Returns None if there is no foreground."""
        position = (keys[self._plane_step : -self._plane_step] > BACKGROUND_KEY).nonzero().squeeze(1) + self._plane_step
        if not len(position):
            return None
        # Rows are numbered from 1 in the order of their positions. Row 0 represents everything outside the block.
        rows = torch.arange(1, len(position) + 1, dtype=torch.int32, device=self._device)
        row_of_voxel = torch.zeros_like(keys).index_copy_(0, position, rows)
        position = position.int()
        highest, num_omitted = _find_highest_neighbors(keys, self._plane_step, self._shape[1])
        own_key, highest = keys.index_select(0, position), highest.index_select(0, position - num_omitted)
        target = position + self._steps.index_select(0, ((own_key & POSITION_BITS) << 5) | (highest & POSITION_BITS))
        parent = row_of_voxel.index_select(0, target)
        parent = torch.where(parent == 0, rows, parent) - 1
        while not torch.equal(grandparent := parent.index_select(0, parent), parent):
            parent = grandparent
        ends = (parent == rows - 1).nonzero().squeeze(1)
        piece_numbers = torch.zeros_like(rows)
        piece_numbers[ends] = torch.arange(len(ends), dtype=torch.int32, device=self._device)
        piece = piece_numbers.index_select(0, parent)
        return _BlockPaths(
            row_of_voxel, position, own_key, piece, target.index_select(0, ends), highest.index_select(0, ends)
        )

    def _store_pieces(self, paths: _BlockPaths, codes: Tensor) -> None:
        """Write the pieces of a block into the volume, and record their ends."""
        pieces = self._pieces.view(-1)
        low = (self._z - 1) * self._plane_step
        rows = paths.row_of_voxel[self._plane_step : -self._plane_step]
        piece_numbers = torch.cat((paths.piece.new_zeros(1), paths.piece + self._num_pieces))
        torch.index_select(piece_numbers, 0, rows, out=pieces[low + self._plane_step :][: len(rows)])
        position = low + paths.targets.long()
        voxels = torch.bincount(paths.piece, minlength=len(paths.targets))
        probability = self._probabilities[codes.index_select(0, paths.position).int()].double()
        foreground = torch.bincount(paths.piece, probability, minlength=len(paths.targets)).long()
        self._piece_ends.append(_PieceEnds(position, paths.target_keys.long(), voxels, foreground))
        self._num_pieces += len(paths.targets)

    def _find_passes(self, paths: _BlockPaths, keys: Tensor) -> None:
        """Find passes near the peaks of a block's pieces. The pieces of the plane above are not yet known."""
        # Lowest key of a relevant pass.
        limit = _compute_keys(self._compute_floors(compute_heights(paths.target_keys))).index_select(0, paths.piece)
        near_peaks = (paths.own_key >= limit).nonzero().squeeze(1)
        pieces = paths.piece + (self._num_pieces - len(paths.targets))
        for rows in torch.split(near_peaks, self._neighbor_batch):
            columns = (paths.position, paths.own_key, limit, pieces)
            self._collect_passes(keys, *(tensor.index_select(0, rows) for tensor in columns))

    def _collect_passes(self, keys: Tensor, voxels: Tensor, own_key: Tensor, limit: Tensor, piece: Tensor) -> None:
        """Record the neighbors of these voxels that belong to other pieces and are not below the limit."""
        neighbors = (voxels[:, None] + self._offsets).view(-1)
        key = keys.index_select(0, neighbors).view(-1, len(NEIGHBORS))
        selected = (key >= limit[:, None]).view(-1).nonzero().squeeze(1)
        rows = selected // len(NEIGHBORS)
        position = (self._z - 1) * self._plane_step + neighbors.index_select(0, selected).long()
        crossing = (self._pieces.view(-1).index_select(0, position) != piece.index_select(0, rows)).nonzero().squeeze(1)
        rows, selected = rows.index_select(0, crossing), selected.index_select(0, crossing)
        height = torch.minimum(own_key.index_select(0, rows), key.view(-1).index_select(0, selected))
        self._candidates.append((piece.index_select(0, rows), position.index_select(0, crossing), height))


def encode_foreground(scores: Tensor) -> Tensor:
    """Return the codes in `PROBABILITIES` of foreground logits, uint8. The voxels of a mask have the highest code."""
    if scores.dtype == torch.bool:
        return torch.full(scores.shape, 255, dtype=torch.uint8, device=scores.device)
    return (scores.float() * 16 + 128.5).clamp_(0, 255).nan_to_num_(0).to(torch.uint8)


def _find_highest_neighbors(keys: Tensor, plane_step: int, row_step: int) -> tuple[Tensor, int]:
    """Return the highest key of each voxel and its 26 neighbors, and the number of voxels omitted at each end."""
    for step in (1, row_step, plane_step):
        pair_maxima = torch.maximum(keys[: -2 * step], keys[step:-step])
        keys = torch.maximum(pair_maxima, keys[2 * step :], out=pair_maxima)
    return keys, 1 + row_step + plane_step


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


def _encode_positions(
    depth: int, height: int, width: int, weights: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return codes of positions modulo 3 along planes, int32 [depth + 2, 1, 1], and within a plane, [Y, X]."""
    z, y, x = (torch.arange(length, dtype=torch.int32, device=device) % 3 for length in (depth + 2, height, width))
    return weights[0] * z[:, None, None], weights[1] * y[1:-1, None] + x[1:-1]


@lru_cache(maxsize=16)
def _compute_neighbor_offsets(num_rows: int, width: int) -> Tensor:
    """Return the offsets, int32 [26] on the CPU, from a voxel to its neighbors in flat memory."""
    return torch.tensor([(z * num_rows + y) * width + x for z, y, x in NEIGHBORS], dtype=torch.int32)


@lru_cache(maxsize=16)
def _compute_steps(plane_step: int, row_step: int, weights: tuple[int, int]) -> Tensor:
    """Return the offset to a neighbor, int32 [1024] on the CPU, indexed by 32 * own code + neighbor's code."""
    code = torch.arange(32)
    steps = torch.zeros(32, 32, dtype=torch.int64)
    for weight, step in ((weights[0], plane_step), (weights[1], row_step), (1, 1)):
        digit = code // weight % 3
        steps += ((digit[None] - digit[:, None] + 1) % 3 - 1) * step
    return steps.view(-1).int()
