"""C++ watershed of one block of a volume whose other blocks are computed elsewhere.

`service.inference.blockwise.join` joins the pieces of all blocks. The resulting basins equal those of `watershed.py`,
however the volume was divided.
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
from service.inference.decoding.watershed_kernel import HEIGHT_DTYPES, INSIDE_DTYPES, MAX_INDEX, WatershedParameters

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
    facts   int64 [P, 4], for each piece: position of its end as a flat index into the volume, number of voxels, sum of
            their foreground probabilities, and key at the end. An end outside the block belongs to a piece of another
            block
    passes  int32 [E, 3], for each pair of pieces that touch near their tops: the two numbers in ascending order, and
            the key of their highest pass
    """

    pieces: NDArray[np.int32]
    facts: NDArray[np.int64]
    passes: NDArray[np.int32]


class Block(NamedTuple):
    """A part of a volume; all sizes and positions are (z, y, x).

    size    of the block
    origin  position of its first voxel in the volume
    volume  size of the volume
    """

    size: Size
    origin: Size
    volume: Size


class BlockKernel(CppFunctions):
    """Functions of the C++ library that accept tensors and arrays."""

    def trace(self, block: Block, heights: Tensor, inside: Tensor, parameters: WatershedParameters) -> BlockPieces:
        """Return the pieces of a block.

        heights  float32 or bfloat16 [z, y, x] on the CPU, of the block and a margin of one voxel within the volume
        inside   foreground scores of the same voxels, compared with the threshold, or bool

        Raises ValueError, MemoryError, and OSError if the library is not available.
        """
        self.require()
        size, origin, volume = block
        margins = [int(edge) for axis in zip(origin, size, volume, strict=True) for edge in _margins(*axis)]
        shape = [n + low + high for n, low, high in zip(size, margins[::2], margins[1::2], strict=True)]
        _check_block(heights, HEIGHT_DTYPES, shape)
        _check_block(inside, INSIDE_DTYPES, shape)
        if int(np.prod([edge + 2 for edge in size])) > MAX_INDEX:
            raise ValueError(f"a block of {size} voxels is too large for 32-bit indices")
        pieces = np.empty(size, np.int32)
        handle = self._functions.stackseg_block(
            *((ctypes.c_int64 * 9)(*size, *origin, *volume), (ctypes.c_int32 * 6)(*margins), *parameters),
            *(heights.data_ptr(), HEIGHT_DTYPES.index(heights.dtype), (ctypes.c_int64 * 3)(*heights.stride())),
            *(inside.data_ptr(), INSIDE_DTYPES.index(inside.dtype), (ctypes.c_int64 * 3)(*inside.stride())),
            pieces.ctypes.data,
        )
        if handle is None:
            raise MemoryError(f"not enough memory for a block of {size} voxels")
        try:
            facts = np.empty((self._functions.stackseg_block_pieces(handle), 4), np.int64)
            passes = np.empty((self._functions.stackseg_block_passes(handle), 3), np.int32)
            self._functions.stackseg_block_facts(handle, facts.ctypes.data, passes.ctypes.data)
        finally:
            self._functions.stackseg_block_free(handle)
        return BlockPieces(pieces, facts, passes)


def _check_block(tensor: Tensor, dtypes: Sequence[torch.dtype], shape: list[int]) -> None:
    if tensor.dtype not in dtypes or list(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(f"expected a block {shape} on the CPU, got {tensor.dtype} {list(tensor.shape)}")


def _margins(origin: int, size: int, length: int) -> tuple[bool, bool]:
    return origin > 0, origin + size < length


block_kernel = BlockKernel(SIGNATURES)
"""The block kernel of this process."""
