"""The ascent of `service.watershed` in C++, for planes in the memory of a CPU; `ascent.cpp` says how.

The same numbers come out as of torch, bit for bit. A small volume takes hundreds of operations in torch, each of which
costs microseconds however few voxels there are; here they are one pass each, on the thread of the caller.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.kernels import Kernel

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")

# What each function takes and gives, as `Kernel` says.
SIGNATURES = (
    ("stackseg_fill", "pppqqqqqp", "-"),
    ("stackseg_climb", "pqqqipppppp", "q"),
    ("stackseg_settle", "piqppqpqpppp", "-"),
    ("stackseg_search", "piqppqpqpqppp", "q"),
    ("stackseg_label", "pqqppqpi", "-"),
)

# Passes of a block for which there is room at first.
PASSES = 2**16

# Places in a block are 32-bit integers.
MOST = 2**31 - 1


class Block(NamedTuple):
    """Planes with a rim, int32 [z, Y + 2, X + 2], contiguous, whose first and last are only looked at.

    keys    of the voxels
    pieces  of the same planes of the volume
    low     where the block begins in the volume with its rim
    first   number of the block's first piece
    """

    keys: Tensor
    pieces: Tensor
    low: int
    first: int


class Climb(NamedTuple):
    """Where the paths of a block end, int64 [P] each, and where its foreground is, int32 [N].

    link    the piece of the highest neighbour of each end, 0 where it is not yet known; itself at a maximum
    place   where in the volume that neighbour is
    top     its key
    voxels  size of the piece
    """

    link: Tensor
    place: Tensor
    top: Tensor
    voxels: Tensor
    foreground: Tensor


class Ascent(Kernel):
    """The compiled functions, once `prepare` has made them; without a compiler there are none."""

    def __init__(self) -> None:
        super().__init__(SOURCE, FLAGS, SIGNATURES, "Instances are decoded several times as slowly")

    def suits(self, device: torch.device, voxels: int = 0) -> bool:
        """Whether it is there, and can work on blocks of so many voxels on this device."""
        return self._library is not None and device.type == "cpu" and voxels <= MOST

    def fill(self, heights: Tensor, inside: Tensor, codes: Tensor, level: tuple[int, int], keys: Tensor) -> None:
        """Write the keys of heights, float32 [z, Y, X], where `inside`, bool, into `keys`, int32 [z, Y + 2, X + 2].

        codes  int32 [Y, X]: the place of each voxel of a plane modulo 3 along either axis, weighted
        level  the place of the first plane along z, and its weight
        """
        heights, inside, codes = heights.contiguous(), inside.contiguous(), codes.contiguous()
        planes, rows, width = keys.shape
        _check(heights, torch.float32, (planes, rows - 2, width - 2))
        _check(inside, torch.bool, (planes, rows - 2, width - 2))
        _check(codes, torch.int32, (rows - 2, width - 2))
        _check(keys, torch.int32, (planes, rows, width))
        pointers = _pointers(heights, inside, codes)
        self._functions.stackseg_fill(*pointers, planes, rows, width, *level, keys.data_ptr())

    def climb(self, block: Block, steps: Tensor) -> Climb | None:
        """Write the pieces of the block, zeros so far, and say where its paths end. None without any foreground.

        steps  int32 [1024]: from a voxel of one code to its neighbour of another
        """
        planes, rows, width = _checked(block)
        _check(steps, torch.int32, (1024,))
        scratch = torch.empty((4, rows, width), dtype=torch.int32)
        # Of these only as much takes memory as is written.
        foreground, targets = (torch.empty(block.keys.numel(), dtype=torch.int32) for _ in range(2))
        keys, pieces, voxels = block.keys.data_ptr(), block.pieces.data_ptr(), ctypes.c_int64()
        ends = self._functions.stackseg_climb(
            *(keys, planes, rows, width, block.first, *_pointers(steps, scratch), pieces),
            *(foreground.data_ptr(), ctypes.byref(voxels), targets.data_ptr()),
        )
        if not ends:
            return None
        link, place, top, sizes = torch.empty((4, ends), dtype=torch.int64).unbind()
        self._functions.stackseg_settle(
            *(keys, block.first, block.low, pieces, foreground.data_ptr(), voxels, targets.data_ptr(), ends),
            *_pointers(link, place, top, sizes),
        )
        return Climb(link, place, top, sizes, foreground[: voxels.value])

    def search(
        self, block: Block, foreground: Tensor, limits: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """After `climb`: ways to other pieces near the tops, as piece, place and height, int32, int64 and int32 [E].

        limits   int32 [P]: the least key that is near the top of each piece
        offsets  int32 [26]: from a voxel to its neighbours
        """
        _checked(block)
        _check(foreground, torch.int32, (len(foreground),))
        _check(limits, torch.int32, (len(limits),))
        _check(offsets, torch.int32, (26,))
        room, found = 0, PASSES
        while found > room:
            room = found
            here, place, height = (torch.empty(room, dtype=kind) for kind in (torch.int32, torch.int64, torch.int32))
            found = self._functions.stackseg_search(
                *(block.keys.data_ptr(), block.first, block.low, block.pieces.data_ptr()),
                *(foreground.data_ptr(), len(foreground), limits.data_ptr(), len(limits)),
                *(offsets.data_ptr(), room, *_pointers(here, place, height)),
            )
        return here[:found].clone(), place[:found].clone(), height[:found].clone()

    def label(self, pieces: Tensor, numbers: Tensor, labels: NDArray[np.unsignedinteger]) -> None:
        """Write the number, int32 [P], of each piece into labels, uint16 or uint32 [Z, Y, X].

        pieces  int32 [Z, Y, X], of which only the rows must be contiguous
        """
        _check(numbers, torch.int32, (len(numbers),))
        if pieces.dtype != torch.int32 or pieces.stride(2) != 1 or pieces.shape != labels.shape:
            raise ValueError(f"{pieces.dtype} {list(pieces.shape)} cannot be made labels {list(labels.shape)}")
        if labels.dtype not in {np.dtype(np.uint16), np.dtype(np.uint32)} or not labels.flags.c_contiguous:
            raise ValueError(f"labels must be contiguous and uint16 or uint32, not {labels.dtype}")
        self._functions.stackseg_label(
            *(pieces.data_ptr(), pieces.stride(0), pieces.stride(1), (ctypes.c_int64 * 3)(*labels.shape)),
            *(numbers.data_ptr(), len(numbers), labels.ctypes.data, labels.itemsize == 4),
        )


ascent = Ascent()
"""The one of this process; a service prepares it when it starts, so that no request waits for a compiler."""


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _checked(block: Block) -> tuple[int, int, int]:
    """Planes, rows and width of a block; its buffers are as large, or it is a ValueError."""
    planes, rows, width = block.keys.shape
    _check(block.keys, torch.int32, (planes, rows, width))
    _check(block.pieces, torch.int32, (planes, rows, width))
    if planes < 3 or rows < 3 or width < 3 or block.keys.numel() > MOST:
        raise ValueError(f"{(planes, rows, width)} is no block with a rim")
    return planes, rows, width


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError for what must not be read, or written, as if it were such a tensor."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} where {dtype} {list(shape)}, contiguous, must be")
