"""Watershed in C++ of one block of a volume, whose other blocks are worked on elsewhere.

The pieces of all blocks, joined by `service.inference.blockwise.join`, give the basins of `watershed.py`, whichever way
the volume was cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.native.library import CppFunctions
from service.core.quantities import Size
from service.inference.decoding.watershed_kernel import HEIGHTS, INSIDE, MAX_PLACE, WatershedParameters

SIGNATURES = (
    ("stackseg_block", "ppfdipippipp", "p"),
    ("stackseg_block_pieces", "p", "q"),
    ("stackseg_block_passes", "p", "q"),
    ("stackseg_block_facts", "ppp", "-"),
    ("stackseg_block_free", "p", "-"),
)


class BlockPieces(NamedTuple):
    """Pieces of one block, numbered from 1; 0 is the background.

    pieces  int32 [Z, Y, X]
    facts   int64 [P, 4] of each piece: the place of its end, as the index of a voxel in the flat volume, its voxels,
            the sum over these of the foreground's probability, the key at its end. An end behind the border of the
            block belongs to a piece of another block
    passes  int32 [E, 3] of each pair of pieces that touch near their tops: both, the lower number first, and the key
            of the highest pass
    """

    pieces: NDArray[np.int32]
    facts: NDArray[np.int64]
    passes: NDArray[np.int32]


class Block(NamedTuple):
    """A part of a volume, whose size is `volume`: its own size, and its first voxel; (z, y, x) each."""

    size: Size
    origin: Size
    volume: Size


class BlockKernel(CppFunctions):
    """Function of the library with tensors and arrays for arguments."""

    def trace(self, block: Block, heights: Tensor, inside: Tensor, parameters: WatershedParameters) -> BlockPieces:
        """Return the pieces of a block.

        heights  float32 or bfloat16 [z, y, x] on the CPU: of the block and of the voxels around it that the volume has
        inside   the same of the foreground, above the threshold, or bool
        Raises ValueError, MemoryError, and OSError where there is no kernel.
        """
        self.require()
        size, origin, volume = block
        margins = [int(edge) for axis in zip(origin, size, volume, strict=True) for edge in _margins(*axis)]
        shape = [n + low + high for n, low, high in zip(size, margins[::2], margins[1::2], strict=True)]
        _check_block(heights, HEIGHTS, shape)
        _check_block(inside, INSIDE, shape)
        if int(np.prod([edge + 2 for edge in size])) > MAX_PLACE:
            raise ValueError(f"a block of {size} is too large")
        pieces = np.empty(size, np.int32)
        handle = self._functions.stackseg_block(
            *((ctypes.c_int64 * 9)(*size, *origin, *volume), (ctypes.c_int32 * 6)(*margins), *parameters),
            *(heights.data_ptr(), HEIGHTS.index(heights.dtype), (ctypes.c_int64 * 3)(*heights.stride())),
            *(inside.data_ptr(), INSIDE.index(inside.dtype), (ctypes.c_int64 * 3)(*inside.stride())),
            pieces.ctypes.data,
        )
        if handle is None:
            raise MemoryError(f"no memory for a block of {size}")
        try:
            facts = np.empty((self._functions.stackseg_block_pieces(handle), 4), np.int64)
            passes = np.empty((self._functions.stackseg_block_passes(handle), 3), np.int32)
            self._functions.stackseg_block_facts(handle, facts.ctypes.data, passes.ctypes.data)
        finally:
            self._functions.stackseg_block_free(handle)
        return BlockPieces(pieces, facts, passes)


def _check_block(tensor: Tensor, kinds: Sequence[torch.dtype], shape: list[int]) -> None:
    if tensor.dtype not in kinds or list(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} where a block of {shape} must be")


def _margins(origin: int, size: int, length: int) -> tuple[bool, bool]:
    return origin > 0, origin + size < length


block_kernel = BlockKernel(SIGNATURES)
"""The kernel of this process."""
