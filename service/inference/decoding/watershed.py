"""Watershed basins of a height map that arrives in planes, and the passes between them, by torch on any device.

Planes are processed in blocks that fit into the cache of a processor. Of a finished block, only the piece number of
each voxel is kept. Basins and passes do not depend on how the planes were divided.
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

# Number of voxels whose neighbors are examined together, with one number for each of the 26 neighbors.
NEIGHBOR_BATCH_VOXELS = 2**14

# The last five bits of a key contain the position of the voxel modulo 3 along each axis, which identifies the neighbor.
POSITION_BITS = 0b11111

# Foreground probability by code. The codes are logits in steps of 1/16 from -8 to 8.
PROBABILITIES = torch.from_numpy(np.rint(PROBABILITY_ONE / (1 + np.exp((128 - np.arange(256)) / 16))).astype(np.int64))

NEIGHBORS = tuple((z, y, x) for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1) if (z, y, x) != (0, 0, 0))


class Passes(NamedTuple):
    """Passes between basins: their numbers, int64 [E] each, and heights, float32 [E].

    A pass is a pair of neighboring voxels with the height of the lower one. Rows may repeat a pair of basins, or join a
    basin with itself.
    """

    first: Tensor
    second: Tensor
    height: Tensor


@dataclass(frozen=True)
class Basins:
    """Basins of the whole volume, numbered from 0 in the order of the positions of their maxima.

    basin_of    int64 [P] on the CPU: the basin of each piece; the background is piece 0 and has basin -1
    pieces      int32 [Z, Y, X]: the piece of every voxel
    peaks       float32 [R]: height of each basin's maximum
    voxels      int64 [R] on the CPU: size of each basin
    foreground  int64 [R] on the CPU: sum of the foreground probabilities of its voxels, times `PROBABILITY_ONE`
    passes      every pass that is not below the floor of one of its two peaks
    """

    basin_of: Tensor
    pieces: Tensor
    peaks: Tensor
    voxels: Tensor
    foreground: Tensor
    passes: Passes


class _PieceEnds(NamedTuple):
    """Ends of the steepest-ascent paths of one block, int64 [P] each, one row per piece.

    position    of the highest neighbor of the end, in the volume with its rim; of the end itself if it is a maximum
    top         key at this position
    voxels      size of the piece
    foreground  sum of the foreground probabilities of its voxels
    """

    position: Tensor
    top: Tensor
    voxels: Tensor
    foreground: Tensor


class _BlockPaths(NamedTuple):
    """Foreground voxels of a block in flat memory, int32 [N] each, and the ends of their paths, int32 [P] each.

    row_of    int32 [L]: 1 + the row of every voxel of the block, 0 for background and for the first and last plane
    position  flat position of each voxel, counted from the plane below the block
    own_key   key of each voxel
    piece     index of the end that its path leads to
    targets   position of the highest neighbor of each end, or of the end itself
    tops      key at the target
    """

    row_of: Tensor
    position: Tensor
    own_key: Tensor
    piece: Tensor
    targets: Tensor
    tops: Tensor


class Planes(NamedTuple):
    """Planes of a volume of `size` (Z, Y, X), which arrive on a device along z, or along y with all of z."""

    size: Size
    device: torch.device
    along_y: bool = False


class Watershed:
    """Watershed transform of planes that are added incrementally.

    A path leads from every voxel to the highest of its 26 neighbors, as in the watershed by topographical distance
    (Meyer 1994). Its end is found by pointer jumping (Wyllie 1979) within a block of planes. A path that leaves its
    block ends there as a separate piece; `finish` joins the pieces. Heights are compared without their last five bits.
    Positions break ties, so every path ends. Several maxima of one plateau have passes of the plateau's height.

    planes          of the volume; the basins are the same along y and z
    floor           function from heights of peaks, float32 [R], to the lowest relevant pass of each, float32 [R]
    block           number of voxels that are processed together; None: use `choose_block_voxels`
    neighbor_batch  number of voxels whose neighbors are examined together
    """

    def __init__(
        self,
        planes: Planes,
        floor: Callable[[Tensor], Tensor],
        block: int | None = None,
        neighbor_batch: int = NEIGHBOR_BATCH_VOXELS,
    ) -> None:
        size, device, along_y = planes
        depth, height, width = (size[1], size[0], size[2]) if along_y else size
        self._along_y, self._neighbor_batch = along_y, neighbor_batch
        self._floor, self._device, self._depth = floor, device, depth
        # A rim of background on every side puts the neighbors of all voxels at the same distances in memory.
        self._rows = (height + 2, width + 2)
        self._plane = self._rows[0] * self._rows[1]
        block = choose_block_voxels(size, along_y=along_y) if block is None else block
        self._block_planes = min(max(block // self._plane, 1), depth)
        self._pieces = torch.zeros((depth + 2, *self._rows), dtype=torch.int32, device=device)
        # Position of each voxel modulo 3 along each axis; independent of the direction in which planes arrive.
        self._weights = (3, 9) if along_y else (9, 3)
        self._plane_codes, self._codes = _codes(self._block_planes, *self._rows, self._weights, device)
        # Only CPU tensors are cached: streams would have to be synchronized with a cached tensor on a device.
        self._offsets = _offsets(*self._rows).to(device, non_blocking=True)
        self._steps = _steps(self._plane, self._rows[1], self._weights).to(device, non_blocking=True)
        # The plane below the next block, followed by the plane that waits for the plane above it.
        self._pending = self._empty(1)
        self._pending_codes = torch.zeros_like(self._pending, dtype=torch.uint8)
        self._probabilities = PROBABILITIES.to(device, non_blocking=True)
        # Index of the first plane of the next block, including the rim.
        self._z = 1
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._piece_ends = [_PieceEnds(zero - 1, zero, zero, zero)]
        self._count = 1
        self._candidates: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, heights: Tensor, inside: Tensor, codes: Tensor) -> None:
        """Add float32 heights, mask and foreground codes of the next planes [planes, Y, X]; along y [Z, planes, X]."""
        if self._along_y:
            heights, inside, codes = (each.transpose(0, 1) for each in (heights, inside, codes))
        for low in range(0, len(heights), self._block_planes):
            part = slice(low, low + self._block_planes)
            before, planes = len(self._pending), len(heights[part])
            last = self._z + before - 2 + planes == self._depth
            # The last block includes the background plane at the end, so that a small volume needs only one block.
            block = self._empty(before + planes + last)
            block[:before] = self._pending
            self._fill(heights[part], inside[part], block[before : before + planes])
            block_codes = torch.zeros_like(block, dtype=torch.uint8)
            block_codes[:before] = self._pending_codes
            block_codes[before : before + planes, 1:-1, 1:-1] = codes[part]
            self._advance(block, block_codes)

    def finish(self) -> Basins:
        """Return the basins after all planes were added."""
        ends = torch.cat([torch.stack(each) for each in self._piece_ends], 1)
        # The pieces above a block were not known when its paths were traced. Position -1 of piece 0 is in the rim.
        above = self._pieces.view(-1)[ends[0]]
        # NumPy is much faster than torch for so few numbers.
        link, position, top, voxels, foreground = torch.cat((above[None], ends)).cpu().numpy()
        maxima = np.flatnonzero(link == np.arange(len(link)))[1:]
        maxima = maxima[self._order_by_position(position[maxima]).argsort()]
        while not np.array_equal(next_link := link[link], link):
            link = next_link
        basin = np.full_like(link, -1)
        basin[maxima] = np.arange(len(maxima))
        basin_of = basin[link]
        total = np.zeros((2, len(maxima) + 1), np.int64)
        np.add.at(total[0], basin_of + 1, voxels)
        np.add.at(total[1], basin_of + 1, foreground)
        inner = self._pieces[1:-1, 1:-1, 1:-1]
        inner = inner.transpose(0, 1) if self._along_y else inner
        peaks = heights_of_keys(torch.from_numpy(top[maxima]).int()).to(self._device)
        basin_of_piece, sums = torch.from_numpy(basin_of), torch.from_numpy(total[:, 1:])
        return Basins(basin_of_piece, inner, peaks, sums[0], sums[1], self._passes(basin_of_piece))

    def _order_by_position(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return numbers [N] that sort positions including the rim in the order of the voxels of the volume."""
        if not self._along_y:
            return position
        plane, rest = np.divmod(position, self._plane)
        row, x = np.divmod(rest, self._rows[1])
        return (row * (self._depth + 2) + plane) * self._rows[1] + x

    def _passes(self, basin_of: Tensor) -> Passes:
        if not self._candidates:
            no_indices = torch.zeros(0, dtype=torch.int64, device=self._device)
            return Passes(no_indices, no_indices, no_indices.float())
        here, position, key = (torch.cat(column) for column in zip(*self._candidates, strict=True))
        # There are many more passes than basins, so they stay on the device.
        basin_of_piece, other = basin_of.to(self._device), self._pieces.view(-1)[position]
        return Passes(basin_of_piece[here], basin_of_piece[other], heights_of_keys(key))

    def _empty(self, planes: int) -> Tensor:
        return torch.full((planes, *self._rows), BACKGROUND_KEY, dtype=torch.int32, device=self._device)

    def _fill(self, heights: Tensor, inside: Tensor, block: Tensor) -> None:
        """Write the keys of the next planes inside their rims."""
        z = (self._z - 1 + len(self._pending)) % 3
        keys = _keys(heights)
        keys += self._plane_codes[z : z + len(keys)]
        keys += self._codes
        background = keys.new_full((), BACKGROUND_KEY)
        torch.where(inside, keys, background, out=block[:, 1:-1, 1:-1])

    def _advance(self, block: Tensor, codes: Tensor) -> None:
        """Process the planes whose upper neighbors have arrived. `block` begins with the pending planes."""
        if len(block) > 2:
            if (paths := self._trace_paths(block.view(-1))) is not None:
                self._store_pieces(paths, codes.view(-1))
                self._find_passes(paths, block.view(-1))
            self._z += len(block) - 2
        self._pending, self._pending_codes = block[-2:].clone(), codes[-2:].clone()

    def _trace_paths(self, keys: Tensor) -> _BlockPaths | None:
        """Trace the paths of voxels between the first and the last plane; None if there is no foreground."""
        position = (keys[self._plane : -self._plane] > BACKGROUND_KEY).nonzero().squeeze(1) + self._plane
        if not len(position):
            return None
        # Rows are numbered from 1 in the order of their positions. Row 0 represents everything outside the block.
        rows = torch.arange(1, len(position) + 1, dtype=torch.int32, device=self._device)
        row_of = torch.zeros_like(keys).index_copy_(0, position, rows)
        position = position.int()
        highest, rim = _highest_around(keys, self._plane, self._rows[1])
        own_key, highest = keys.index_select(0, position), highest.index_select(0, position - rim)
        target = position + self._steps.index_select(0, ((own_key & POSITION_BITS) << 5) | (highest & POSITION_BITS))
        parent = row_of.index_select(0, target)
        parent = torch.where(parent == 0, rows, parent) - 1
        while not torch.equal(grandparent := parent.index_select(0, parent), parent):
            parent = grandparent
        ends = (parent == rows - 1).nonzero().squeeze(1)
        numbers = torch.zeros_like(rows)
        numbers[ends] = torch.arange(len(ends), dtype=torch.int32, device=self._device)
        piece = numbers.index_select(0, parent)
        return _BlockPaths(
            row_of, position, own_key, piece, target.index_select(0, ends), highest.index_select(0, ends)
        )

    def _store_pieces(self, paths: _BlockPaths, codes: Tensor) -> None:
        """Write the pieces of a block into the volume, and record their ends."""
        pieces = self._pieces.view(-1)
        low = (self._z - 1) * self._plane
        inner = paths.row_of[self._plane : -self._plane]
        number_of = torch.cat((paths.piece.new_zeros(1), paths.piece + self._count))
        torch.index_select(number_of, 0, inner, out=pieces[low + self._plane :][: len(inner)])
        position = low + paths.targets.long()
        voxels = torch.bincount(paths.piece, minlength=len(paths.targets))
        probability = self._probabilities[codes.index_select(0, paths.position).int()].double()
        foreground = torch.bincount(paths.piece, probability, minlength=len(paths.targets)).long()
        self._piece_ends.append(_PieceEnds(position, paths.tops.long(), voxels, foreground))
        self._count += len(paths.targets)

    def _find_passes(self, paths: _BlockPaths, keys: Tensor) -> None:
        """Find passes near the tops of a block's pieces. The pieces of the plane above are not yet known."""
        # Lowest key of a relevant pass.
        limit = _keys(self._floor(heights_of_keys(paths.tops))).index_select(0, paths.piece)
        near = (paths.own_key >= limit).nonzero().squeeze(1)
        here = paths.piece + (self._count - len(paths.targets))
        for rows in torch.split(near, self._neighbor_batch):
            columns = (paths.position, paths.own_key, limit, here)
            self._collect_passes(keys, *(each.index_select(0, rows) for each in columns))

    def _collect_passes(self, keys: Tensor, index: Tensor, own_key: Tensor, limit: Tensor, here: Tensor) -> None:
        """Record the neighbors of these voxels that belong to other pieces and are not below the limit."""
        around = (index[:, None] + self._offsets).view(-1)
        key = keys.index_select(0, around).view(-1, len(NEIGHBORS))
        hits = (key >= limit[:, None]).view(-1).nonzero().squeeze(1)
        rows = hits // len(NEIGHBORS)
        position = (self._z - 1) * self._plane + around.index_select(0, hits).long()
        others = (self._pieces.view(-1).index_select(0, position) != here.index_select(0, rows)).nonzero().squeeze(1)
        rows, hits = rows.index_select(0, others), hits.index_select(0, others)
        height = torch.minimum(own_key.index_select(0, rows), key.view(-1).index_select(0, hits))
        self._candidates.append((here.index_select(0, rows), position.index_select(0, others), height))


def foreground_codes(scores: Tensor) -> Tensor:
    """Return the codes in `PROBABILITIES` of foreground logits, uint8; voxels of a mask have the highest code."""
    if scores.dtype == torch.bool:
        return torch.full(scores.shape, 255, dtype=torch.uint8, device=scores.device)
    return (scores.float() * 16 + 128.5).clamp_(0, 255).nan_to_num_(0).to(torch.uint8)


def _highest_around(keys: Tensor, plane: int, row: int) -> tuple[Tensor, int]:
    """Return the highest key of each voxel and its 26 neighbors, and the number of voxels missing at each end."""
    for step in (1, row, plane):
        two = torch.maximum(keys[: -2 * step], keys[step:-step])
        keys = torch.maximum(two, keys[2 * step :], out=two)
    return keys, 1 + row + plane


def _keys(heights: Tensor) -> Tensor:
    """Map float32 heights to int32 keys of the same order. The position bits are zero."""
    bits = heights.view(torch.int32)
    # In place, because each additional array of a large block would exceed the cache.
    keys = bits >> 31
    keys &= 0x7FFFFFFF
    keys ^= bits
    keys &= ~POSITION_BITS
    return keys


def heights_of_keys(keys: Tensor) -> Tensor:
    """Invert `_keys`, except for the dropped bits."""
    ordered = keys & ~POSITION_BITS
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _codes(planes: int, rows: int, row: int, weights: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return codes of positions modulo 3 along planes, int32 [planes + 2, 1, 1], and within a plane, [Y, X]."""
    z, y, x = (torch.arange(edge, dtype=torch.int32, device=device) % 3 for edge in (planes + 2, rows, row))
    return weights[0] * z[:, None, None], weights[1] * y[1:-1, None] + x[1:-1]


@lru_cache(maxsize=16)
def _offsets(rows: int, row: int) -> Tensor:
    """Return the offsets, int32 [26] on the CPU, from a voxel to its neighbors in flat memory."""
    return torch.tensor([(z * rows + y) * row + x for z, y, x in NEIGHBORS], dtype=torch.int32)


@lru_cache(maxsize=16)
def _steps(plane: int, row: int, weights: tuple[int, int]) -> Tensor:
    """Return the offset to a neighbor for each 32 * own + neighbor position code, int32 [1024] on the CPU."""
    code = torch.arange(32)
    steps = torch.zeros(32, 32, dtype=torch.int64)
    for weight, step in ((weights[0], plane), (weights[1], row), (1, 1)):
        digit = code // weight % 3
        steps += ((digit[None] - digit[:, None] + 1) % 3 - 1) * step
    return steps.view(-1).int()
