"""C++ watershed of one block of a volume whose other blocks are computed elsewhere.

`service.inference.blockwise.join` joins the pieces of all blocks. The resulting basins are the same as in
`watershed.py`, no matter how the volume was divided.
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
from service.inference.decoding.watershed_kernel import FOREGROUND_DTYPES, HEIGHT_DTYPES, MAX_INDEX, WatershedParameters

SIGNATURES = (
    ("stackseg_block", "ppfdipippipp", "p"),
    ("stackseg_block_pieces", "p", "q"),
    ("stackseg_block_passes", "p", "q"),
    ("stackseg_block_properties", "ppp", "-"),
    ("stackseg_block_free", "p", "-"),
)


class BlockPieces(NamedTuple):
    """Pieces of one block, numbered from 1; 0 is the background.

    pieces      int32 [Z, Y, X], the piece of every voxel
    properties  int64 [P, 4], for each piece: flat index in the volume of the voxel at which its ascending paths end,
                number of voxels, sum of their foreground probabilities, and key of the end voxel, as in `watershed`. If
                the end voxel lies outside the block, it belongs to a piece of another block
    passes      int32 [E, 3], for each pair of pieces that touch near their peaks: the two numbers in ascending order,
                and the key of their highest pass
    """

    pieces: NDArray[np.int32]
    properties: NDArray[np.int64]
    passes: NDArray[np.int32]


class Block(NamedTuple):
    """A part of a volume; all sizes and positions are (z, y, x).

    size         size of the block
    origin       position of the block's first voxel in the volume
    volume_size  size of the volume
    """

    size: Size
    origin: Size
    volume_size: Size


class BlockKernel(CppFunctions):
    """Python interface to the C++ function that computes the watershed pieces of a block."""

    def find_pieces(
        self, block: Block, heights: Tensor, foreground: Tensor, parameters: WatershedParameters
    ) -> BlockPieces:
        """Return the pieces of a block.

        heights     float32 or bfloat16 [z, y, x] on the CPU, of the block with a one-voxel margin clipped to the volume
        foreground  scores of the same voxels, float32 or bfloat16, which are compared with the threshold; or a bool
                    mask

        Raises OSError if the library is not available, ValueError if the tensors or the block size are not supported,
        and MemoryError if there is not enough memory.
        """
        self.require()
        size, origin, volume_size = block
        margins = [
            int(has_margin)
            for axis in zip(origin, size, volume_size, strict=True)
            for has_margin in _find_margins(*axis)
        ]
        shape = [n + low + high for n, low, high in zip(size, margins[::2], margins[1::2], strict=True)]
        _check_tensor(heights, HEIGHT_DTYPES, shape)
        _check_tensor(foreground, FOREGROUND_DTYPES, shape)
        if int(np.prod([length + 2 for length in size])) > MAX_INDEX:
            raise ValueError(f"a block of {size} voxels is too large for 32-bit indices")
        pieces = np.empty(size, np.int32)
        handle = self._functions.stackseg_block(
            *((ctypes.c_int64 * 9)(*size, *origin, *volume_size), (ctypes.c_int32 * 6)(*margins), *parameters),
            *(heights.data_ptr(), HEIGHT_DTYPES.index(heights.dtype), (ctypes.c_int64 * 3)(*heights.stride())),
            *(
                foreground.data_ptr(),
                FOREGROUND_DTYPES.index(foreground.dtype),
                (ctypes.c_int64 * 3)(*foreground.stride()),
            ),
            pieces.ctypes.data,
        )
        if handle is None:
            raise MemoryError(f"not enough memory for a block of {size} voxels")
        try:
            properties = np.empty((self._functions.stackseg_block_pieces(handle), 4), np.int64)
            passes = np.empty((self._functions.stackseg_block_passes(handle), 3), np.int32)
            self._functions.stackseg_block_properties(handle, properties.ctypes.data, passes.ctypes.data)
        finally:
            self._functions.stackseg_block_free(handle)
        return BlockPieces(pieces, properties, passes)


def _check_tensor(tensor: Tensor, dtypes: Sequence[torch.dtype], shape: list[int]) -> None:
    if tensor.dtype not in dtypes or list(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(
            f"expected a CPU tensor of shape {shape} with a supported data type, got a tensor of type {tensor.dtype}"
            f" with shape {list(tensor.shape)}"
        )


def _find_margins(origin: int, size: int, length: int) -> tuple[bool, bool]:
    return origin > 0, origin + size < length


block_kernel = BlockKernel(SIGNATURES)
"""The block kernel of this process."""
