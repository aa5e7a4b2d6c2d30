"""C++ watershed in CPU memory, block by block on several threads.

Its labels are the same as those of `watershed.py` with `labels.label_basins`, no matter how the volume was divided. For
a small volume, the PyTorch version needs hundreds of operations, each of which takes microseconds and releases the
global interpreter lock. The kernel needs one call per slab.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.native.library import CppFunctions
from service.core.quantities import Size
from service.core.types import Objects, choose_label_dtype

# Argument and result types of each function, as letters of `CppFunctions.KINDS`.
SIGNATURES = (
    ("stackseg_watershed", "pifdiqi", "p"),
    ("stackseg_free", "p", "-"),
    ("stackseg_slab", "ppippipq", "i"),
    ("stackseg_objects", "pqi", "q"),
    ("stackseg_object_properties", "pp", "-"),
    ("stackseg_write_labels", "pppi", "-"),
    ("stackseg_block", "pfdipippipp", "p"),
    ("stackseg_block_pieces", "p", "q"),
    ("stackseg_block_passes", "p", "q"),
    ("stackseg_block_properties", "ppp", "-"),
    ("stackseg_block_free", "p", "-"),
)

# Minimum number of voxels in a block. The arrays of a block of this size use 50 megabytes.
MIN_BLOCK_VOXELS = 2**22

# Minimum number of planes in a block, even if planes are large. Each additional block divides paths into more pieces:
# with one plane of 1536 x 1536 voxels per block, a crowded stack takes seven times as long as with eight planes, and
# uses 27 bytes per voxel instead of 9.
MIN_BLOCK_PLANES = 8

# Maximum number of voxels of a volume whose memory is allocated and freed within about 30 us.
MAX_SMALL_VOLUME_VOXELS = 2**20

# Positions in a block are 32-bit integers.
MAX_INDEX = 2**31 - 1

# Fixed-point representation of a foreground probability of 1. Integer sums do not depend on the order of the terms.
PROBABILITY_ONE = 65536

CPU = torch.device("cpu")

_Int64x3 = ctypes.c_int64 * 3

# Dtypes, in the order of their numbers in `watershed_kernel.cpp`.
HEIGHT_DTYPES = (torch.float32, torch.bfloat16)
FOREGROUND_DTYPES = (*HEIGHT_DTYPES, torch.bool)


# Function that returns a mask [N] of the objects to keep.
ObjectFilter = Callable[[Objects], NDArray[np.bool_]]


def keep_all_objects(objects: Objects) -> NDArray[np.bool_]:
    """Return a mask that keeps all objects."""
    return np.ones(len(objects), bool)


def number_objects(is_kept: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the new number of each label, int32 [N + 1]; 0 for the background and for removed objects.

    Objects whose entry in `is_kept` [N] is true are numbered from 1 in order.
    """
    return np.append(0, np.where(is_kept, is_kept.cumsum(), 0)).astype(np.int32)


class WatershedParameters(NamedTuple):
    """Parameters that define objects.

    threshold           score above which a voxel is foreground
    depth               minimum depth of a pass (saddle) below the lower of the two peaks that it connects, in units of
                        the distance; above 0
    heights_are_logits  whether heights are logits of the distance
    """

    threshold: float
    depth: float
    heights_are_logits: bool


class Block(NamedTuple):
    """A part of a volume; all sizes and positions are (z, y, x).

    size         size of the block
    origin       position of the block's first voxel in the volume
    volume_size  size of the volume
    """

    size: Size
    origin: Size
    volume_size: Size


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


def choose_block_planes(size: Size, *, along_y: bool = False) -> int:
    """Return how many planes of a volume of `size` (Z, Y, X) to process together; 0 if a plane is too large."""
    plane_voxels = (size[not along_y] + 2) * (size[2] + 2)
    # A block has a margin of one plane on either side.
    return max(min(max(MIN_BLOCK_VOXELS // plane_voxels, MIN_BLOCK_PLANES), MAX_INDEX // plane_voxels - 3), 0)


class WatershedKernel(CppFunctions):
    """Python interface to the C++ functions that compute the watershed of a volume, or the pieces of one block."""

    def supports(self, device: torch.device, size: Size = (1, 1, 1)) -> bool:
        """Return whether the kernel is available and supports volumes of this size on this device, along both axes."""
        planes = min(choose_block_planes(size), choose_block_planes(size, along_y=True))
        return self.is_available and device.type == "cpu" and planes > 0

    def start(
        self,
        size: Size,
        parameters: WatershedParameters,
        *,
        along_y: bool = False,
        block_planes: int | None = None,
        threads: int = 1,
    ) -> IncrementalWatershed:
        """Return a watershed to which no planes have been added yet.

        Raises ValueError if the size is not supported, and MemoryError if there is not enough memory.

        size          (Z, Y, X) of the volume
        along_y       whether planes arrive along y instead of along z, each with its full extent along z
        block_planes  number of planes that are processed together; None: use `choose_block_planes`
        threads       maximum number of threads

        The labels are the same for any direction, number of planes and number of threads.
        """
        block_planes = choose_block_planes(size, along_y=along_y) if block_planes is None else block_planes
        if min(size) < 1 or not self.supports(CPU, size):
            raise ValueError(f"the kernel does not support a volume of {size} voxels")
        # Allocating a large amount of memory is slow and must not hold the global interpreter lock.
        is_small = math.prod(size) <= MAX_SMALL_VOLUME_VOXELS
        functions = self._functions_with_gil if is_small else self._functions
        handle = functions.stackseg_watershed(_Int64x3(*size), along_y, *parameters, block_planes, threads)
        if handle is None:
            raise MemoryError(f"not enough memory for the watershed of a volume of {size} voxels")
        return IncrementalWatershed(handle, self._functions, functions, size, along_y=along_y)

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
        end = [first + length for first, length in zip(origin, size, strict=True)]
        first_score = [max(first - 1, 0) for first in origin]
        shape = [
            min(last + 1, length) - first for last, length, first in zip(end, volume_size, first_score, strict=True)
        ]
        values = (*_describe(heights, HEIGHT_DTYPES, shape), *_describe(foreground, FOREGROUND_DTYPES, shape))
        if math.prod(length + 2 for length in size) > MAX_INDEX:
            raise ValueError(f"a block of {size} voxels is too large for 32-bit indices")
        pieces = np.empty(size, np.int32)
        geometry = (ctypes.c_int64 * 12)(*origin, *end, *volume_size, *first_score)
        handle = self._functions.stackseg_block(geometry, *parameters, *values, pieces.ctypes.data)
        if handle is None:
            raise MemoryError(f"not enough memory for a block of {size} voxels")
        try:
            properties = np.empty((self._functions.stackseg_block_pieces(handle), 4), np.int64)
            passes = np.empty((self._functions.stackseg_block_passes(handle), 3), np.int32)
            self._functions.stackseg_block_properties(handle, properties.ctypes.data, passes.ctypes.data)
        finally:
            self._functions.stackseg_block_free(handle)
        return BlockPieces(pieces, properties, passes)


def _describe(
    tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int]
) -> tuple[int, int, ctypes.Array[ctypes.c_int64]]:
    """Return the address, the number of the dtype and the strides of a tensor. Raises ValueError if it does not fit."""
    if tensor.dtype not in dtypes or list(tensor.shape) != list(shape) or tensor.device.type != "cpu":
        raise ValueError(
            f"expected a CPU tensor of shape {list(shape)} with a supported data type, got a tensor of type"
            f" {tensor.dtype} with shape {list(tensor.shape)}"
        )
    return tensor.data_ptr(), dtypes.index(tensor.dtype), _Int64x3(*tensor.stride())


class IncrementalWatershed:
    """Watershed of a height map that arrives plane by plane, created by `WatershedKernel.start`."""

    def __init__(
        self, handle: int, functions: ctypes.CDLL, cheap_functions: ctypes.CDLL, size: Size, *, along_y: bool
    ) -> None:
        self._handle, self._size, self._along_y = handle, size, along_y
        self._functions, self._cheap_functions = functions, cheap_functions
        self._num_missing_planes = size[along_y]

    def __del__(self) -> None:
        self._cheap_functions.stackseg_free(self._handle)

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        """Add the next planes, [planes, Y, X] or, along y, [Z, planes, X].

        Raises ValueError if the planes do not match the volume, and MemoryError if there is not enough memory.

        heights     float32 or bfloat16
        foreground  float32 or bfloat16 scores, which are compared with the threshold; or a bool mask
        """
        num_planes = heights.shape[self._along_y]
        shape = list(self._size)
        shape[self._along_y] = num_planes
        values = (*_describe(heights, HEIGHT_DTYPES, shape), *_describe(foreground, FOREGROUND_DTYPES, shape))
        if num_planes > self._num_missing_planes:
            raise ValueError(f"{num_planes} planes were added, but only {self._num_missing_planes} planes are missing")
        self._num_missing_planes -= num_planes
        if self._functions.stackseg_slab(self._handle, *values, num_planes):
            raise MemoryError("not enough memory for the pieces of a watershed")

    def label_objects(
        self, minimum_size: int, *, drop_border: bool, object_filter: ObjectFilter = keep_all_objects
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        """Return labels [Z, Y, X] from 1, uint16 or uint32, and the objects, after all planes have been added.

        minimum_size   minimum number of voxels of an object
        drop_border    whether to remove objects that touch a face of the volume; axes that are only one voxel long
                       have no faces
        object_filter  selects which of the remaining objects get a label
        """
        if self._num_missing_planes:
            raise ValueError(f"{self._num_missing_planes} planes are missing")
        num_objects = self._functions.stackseg_objects(self._handle, minimum_size, drop_border)
        if num_objects < 0:
            raise MemoryError("not enough memory for the objects of a watershed")
        properties = np.empty((num_objects, 3))
        self._cheap_functions.stackseg_object_properties(self._handle, properties.ctypes.data)
        objects = Objects.from_sums(*properties.T)
        is_kept = object_filter(objects)
        objects, label_numbers = objects.select(is_kept), number_objects(is_kept)
        labels: NDArray[np.unsignedinteger] = np.empty(self._size, choose_label_dtype(len(objects)))
        self._functions.stackseg_write_labels(
            self._handle, label_numbers.ctypes.data, labels.ctypes.data, labels.itemsize
        )
        return labels, objects


watershed_kernel = WatershedKernel(SIGNATURES)
"""The watershed kernel of this process."""
