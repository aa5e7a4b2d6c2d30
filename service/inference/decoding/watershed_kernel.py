"""C++ watershed in CPU memory, block by block on several threads.

Its basins and passes are the same as those of `watershed.py`, no matter how the volume was divided. For a small volume,
the PyTorch version needs a hundred operations, each of which takes microseconds and releases the global interpreter
lock. The kernel needs one call per slab.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.native.library import CppFunctions
from service.core.quantities import Size
from service.inference.decoding.pieces import Pieces, find_pieces_at_faces

# Argument and result types of each function, as letters of `CppFunctions.CTYPES`.
SIGNATURES = (
    ("stackseg_watershed", "pifdiqip", "p"),
    ("stackseg_free", "p", "-"),
    ("stackseg_slab", "ppippipq", "i"),
    ("stackseg_block", "ppippipp", "i"),
    ("stackseg_counts", "pp", "-"),
    ("stackseg_properties", "ppp", "-"),
    ("stackseg_look_up", "pqppii", "-"),
)

# Minimum number of voxels in a block. The arrays of a block of this size use 50 megabytes.
MIN_BLOCK_VOXELS = 2**22

# Minimum number of planes in a block, even if planes are large. Each additional block divides paths into more pieces:
# with one plane of 1536 x 1536 voxels per block, a crowded stack takes seven times as long as with eight planes, and
# uses 27 bytes per voxel instead of 9.
MIN_BLOCK_PLANES = 8

# Positions in a block are 32-bit integers.
MAX_INDEX = 2**31 - 1

CPU = torch.device("cpu")

Box = Sequence[tuple[int, int]]
"""First index and exclusive end index along (z, y, x)."""

_Int64x3 = ctypes.c_int64 * 3

# Dtypes, in the order of their numbers in `watershed_kernel.cpp`.
DTYPES = (torch.float32, torch.bfloat16)


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
    ) -> KernelWatershed:
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
        pieces = np.empty(size, np.int32)
        arguments = (_Int64x3(*size), along_y, *parameters, block_planes, threads)
        return KernelWatershed(self._functions, pieces, arguments)

    def find_pieces(
        self, box: Box, volume_size: Size, heights: Tensor, foreground: Tensor, parameters: WatershedParameters
    ) -> tuple[NDArray[np.int32], Pieces]:
        """Return the piece of each voxel in a box of a volume, from 1, and the pieces. The background is 0.

        If the end of a piece lies outside the box, the paths continue in a piece of another box.

        heights     float32 or bfloat16 [z, y, x] on the CPU, of the box with a one-voxel margin clipped to the volume
        foreground  scores of the same voxels, float32 or bfloat16, which are compared with the threshold

        Raises OSError if the library is not available, ValueError if the tensors or the size of the box are not
        supported, and MemoryError if there is not enough memory.
        """
        self.require()
        first, end = zip(*box, strict=True)
        size = [last - start for start, last in box]
        first_score = [max(start - 1, 0) for start in first]
        shape = [min(last + 1, n) - start for last, n, start in zip(end, volume_size, first_score, strict=True)]
        if math.prod(length + 2 for length in size) > MAX_INDEX:
            raise ValueError(f"a block of {size} voxels is too large for 32-bit indices")
        pieces = np.empty(size, np.int32)
        arguments = (_Int64x3(*volume_size), False, *parameters, 0, 1)
        watershed = KernelWatershed(self._functions, pieces, arguments)
        watershed.call("stackseg_block", heights, foreground, shape, (ctypes.c_int64 * 9)(*first, *end, *first_score))
        return pieces, watershed.collect_pieces(first, volume_size)


class KernelWatershed:
    """Watershed of a height map that arrives plane by plane, created by `WatershedKernel.start`.

    pieces     memory for the piece of each voxel, int32 [Z, Y, X]
    arguments  arguments of `stackseg_watershed`, without the pieces
    """

    def __init__(self, functions: ctypes.CDLL, pieces: NDArray[np.int32], arguments: tuple[Any, ...]) -> None:
        self._functions, self._pieces = functions, pieces
        _, self._along_y, *_, self._threads = arguments
        self._num_missing_planes = pieces.shape[self._along_y]
        self._handle = functions.stackseg_watershed(*arguments, pieces.ctypes.data)
        if self._handle is None:
            raise MemoryError(f"not enough memory for the watershed of {pieces.shape} voxels")

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        """Free the memory of the kernel."""
        self._functions.stackseg_free(self._handle)
        self._handle = None

    def call(self, name: str, heights: Tensor, foreground: Tensor, shape: Sequence[int], argument: object) -> None:
        """Call the function that adds scores of this shape. Raises ValueError and MemoryError as `add`."""
        for tensor in (heights, foreground):
            if tensor.dtype not in DTYPES or list(tensor.shape) != list(shape) or tensor.device.type != "cpu":
                raise ValueError(
                    f"expected a CPU tensor of shape {list(shape)} with a supported data type, got a tensor of type"
                    f" {tensor.dtype} with shape {list(tensor.shape)}"
                )
        # The kernel reads contiguous rows.
        tensors = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (heights, foreground)]
        values = ((tensor.data_ptr(), DTYPES.index(tensor.dtype), _Int64x3(*tensor.stride())) for tensor in tensors)
        if getattr(self._functions, name)(self._handle, *itertools.chain(*values), argument):
            raise MemoryError("not enough memory for the pieces of a watershed")

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        """Add the next planes, [planes, Y, X] or, along y, [Z, planes, X].

        Raises ValueError if the planes do not match the volume, and MemoryError if there is not enough memory.

        heights     float32 or bfloat16
        foreground  float32 or bfloat16 scores, which are compared with the threshold
        """
        num_planes = heights.shape[self._along_y]
        shape = list(self._pieces.shape)
        shape[self._along_y] = num_planes
        if num_planes > self._num_missing_planes:
            raise ValueError(f"{num_planes} planes were added, but only {self._num_missing_planes} planes are missing")
        self.call("stackseg_slab", heights, foreground, shape, num_planes)
        self._num_missing_planes -= num_planes

    def find_pieces(self) -> tuple[Pieces, NDArray[np.int32]]:
        """Return the pieces and the link of each piece, as in `join_pieces`, after all planes have been added."""
        if self._num_missing_planes:
            raise ValueError(f"{self._num_missing_planes} planes are missing")
        pieces = self.collect_pieces()
        self.free()
        return pieces, self._pieces.ravel()[pieces.position] - 1

    def collect_pieces(self, origin: Sequence[int] = (0, 0, 0), volume_size: Sequence[int] = ()) -> Pieces:
        """Return the pieces of all planes, or of the box that has been added; see `find_pieces_at_faces`."""
        counts = (ctypes.c_int64 * 2)()
        self._functions.stackseg_counts(self._handle, counts)
        properties, passes = np.empty((4, counts[0]), np.int64), np.empty((3, counts[1]), np.int32)
        self._functions.stackseg_properties(self._handle, properties.ctypes.data, passes.ctypes.data)
        touches_face = find_pieces_at_faces(self._pieces, counts[0], origin, volume_size)
        return Pieces(properties[0], properties[1].astype(np.int32), properties[2:], touches_face, passes)

    def look_up(self, label_of_piece: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """Return the label of each voxel [Z, Y, X], uint16 or uint32, given those of the background and the pieces."""
        labels = np.empty(self._pieces.shape, label_of_piece.dtype)
        self._functions.stackseg_look_up(
            *(self._pieces.ctypes.data, self._pieces.size),
            *(label_of_piece.ctypes.data, labels.ctypes.data, labels.itemsize, self._threads),
        )
        return labels


watershed_kernel = WatershedKernel(SIGNATURES)
"""The watershed kernel of this process."""
