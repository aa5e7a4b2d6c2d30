"""C++ watershed in CPU memory, block by block on several threads.

Its basins and passes are the same as those of `watershed.py`, no matter how the volume was divided. For a small volume,
the PyTorch version needs a hundred operations, each of which takes microseconds and releases the global interpreter
lock. The kernel needs one call per slab.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.native.library import CppFunctions
from service.core.quantities import Size
from service.core.types import Array
from service.inference.decoding.pieces import Pieces, WatershedParameters, find_pieces_at_faces

# Argument and result types of each function, as letters of `CppFunctions.CTYPES`.
SIGNATURES = (
    ("stackseg_watershed", "ppifdiqip", "p"),
    ("stackseg_free", "p", "-"),
    ("stackseg_slab", "pppppiq", "i"),
    ("stackseg_pieces", "pppp", "-"),
    ("stackseg_look_up", "pqppii", "-"),
)
# Structures of the kernel.
PIECE = np.dtype([("position", "i8"), ("key", "i4"), ("voxels", "i4"), ("foreground", "i8")])
PASS = np.dtype([("first", "i4"), ("second", "i4"), ("key", "i4")])

# Minimum number of voxels in a block. The arrays of a block of this size use 50 megabytes.
MIN_BLOCK_VOXELS = 2**22

# Minimum number of planes in a block, even if planes are large. Each additional block divides paths into more pieces:
# with one plane of 1536 x 1536 voxels per block, a crowded stack takes seven times as long as with eight planes, and
# uses 27 bytes per voxel instead of 9.
MIN_BLOCK_PLANES = 8

# Positions in a block are 32-bit integers.
MAX_INDEX = 2**31 - 1

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)

Box = Sequence[tuple[int, int]]
"""First index and exclusive end index along (z, y, x)."""


class WatershedOptions(NamedTuple):
    """How a volume is processed, which does not affect the labels.

    along_y       whether planes arrive along y instead of along z, each with its full extent along z
    block_planes  number of planes that are processed together; None: use `choose_block_planes`
    threads       maximum number of threads
    """

    along_y: bool = False
    block_planes: int | None = None
    threads: int = 1


DEFAULT_OPTIONS = WatershedOptions()


def choose_block_planes(size: Size, *, along_y: bool = False) -> int:
    """Return how many planes of a volume of `size` (Z, Y, X) to process together; 0 if a plane is too large."""
    plane_voxels = (size[not along_y] + 2) * (size[2] + 2)
    # A block has a margin of one plane on either side.
    return max(min(max(MIN_BLOCK_VOXELS // plane_voxels, MIN_BLOCK_PLANES), MAX_INDEX // plane_voxels - 3), 0)


class WatershedKernel(CppFunctions):
    """Python interface to the C++ functions that compute the watershed of a volume or of a box in it."""

    def supports(self, device: torch.device, size: Size = (1, 1, 1)) -> bool:
        """Return whether the kernel is available and supports volumes of this size on this device, along both axes."""
        planes = min(choose_block_planes(size), choose_block_planes(size, along_y=True))
        return self.is_available and device.type == "cpu" and planes > 0

    def start(
        self,
        volume_size: Size,
        parameters: WatershedParameters,
        options: WatershedOptions = DEFAULT_OPTIONS,
        box: Box | None = None,
    ) -> KernelWatershed:
        """Return a watershed of a volume of `volume_size` (Z, Y, X), to which no planes have been added yet.

        box  box in the volume whose pieces are computed; None: the whole volume

        Raises OSError if the library is not available, ValueError if the size is not supported, and MemoryError if
        there is not enough memory.
        """
        self.require()
        box = [(0, length) for length in volume_size] if box is None else box
        z, y, x = (end - first for first, end in box)
        if min(z, y, x) < 1 or not self.supports(CPU, (z, y, x)):
            raise ValueError(f"the kernel does not support a volume of {(z, y, x)} voxels")
        if options.block_planes is None:
            options = options._replace(block_planes=choose_block_planes((z, y, x), along_y=options.along_y))
        return KernelWatershed(self._functions, volume_size, box, parameters, options)


class KernelWatershed:
    """Watershed of a height map that arrives plane by plane, created by `WatershedKernel.start`.

    pieces  piece of each voxel in the box, from 1, int32 [Z, Y, X]; 0 is the background
    """

    _handle: int | None = None

    def __init__(
        self,
        functions: ctypes.CDLL,
        volume_size: Size,
        box: Box,
        parameters: WatershedParameters,
        options: WatershedOptions,
    ) -> None:
        self._functions, self._volume_size, (self._along_y, block_planes, self._threads) = (
            functions,
            volume_size,
            options,
        )
        self._origin = [first for first, _ in box]
        # The paths of voxels at the faces of the box may lead to its neighbors in the volume.
        self._shape = [min(end + 1, n) - max(first - 1, 0) for (first, end), n in zip(box, volume_size, strict=True)]
        self._num_missing_planes = self._shape[self._along_y]
        self.pieces = np.empty([end - first for first, end in box], np.int32)
        bounds = (ctypes.c_int64 * 6)(*self._origin, *(end for _, end in box))
        self._handle = functions.stackseg_watershed(
            *((ctypes.c_int64 * 3)(*volume_size), bounds, self._along_y, parameters.threshold, parameters.depth),
            *(parameters.heights_are_logits, block_planes, self._threads, self.pieces.ctypes.data),
        )
        if self._handle is None:
            raise MemoryError(f"not enough memory for the watershed of {self.pieces.shape} voxels")

    def __del__(self) -> None:
        self._free()

    def _free(self) -> None:
        self._functions.stackseg_free(self._handle)
        self._handle = None

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        """Add the next planes, [planes, Y, X] or, along y, [Z, planes, X], float32 or bfloat16 on the CPU.

        The planes include the neighbors of the box in the volume. Foreground scores are compared with the threshold.
        Raises ValueError if the planes do not match the box, and MemoryError if there is not enough memory.
        """
        num_planes = heights.shape[self._along_y]
        self._check_planes((heights, foreground), num_planes)
        if heights.dtype != foreground.dtype:
            heights, foreground = heights.float(), foreground.float()
        # The kernel reads contiguous rows.
        tensors = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (heights, foreground)]
        arguments = [item for tensor in tensors for item in (tensor.data_ptr(), (ctypes.c_int64 * 3)(*tensor.stride()))]
        if self._functions.stackseg_slab(self._handle, *arguments, heights.dtype == torch.bfloat16, num_planes):
            raise MemoryError("not enough memory for the pieces of a watershed")
        self._num_missing_planes -= num_planes

    def _check_planes(self, tensors: Sequence[Tensor], num_planes: int) -> None:
        if num_planes > self._num_missing_planes:
            raise ValueError(f"{num_planes} planes were added, but only {self._num_missing_planes} planes are missing")
        self._shape[self._along_y] = num_planes
        for tensor in tensors:
            if tensor.dtype not in DTYPES or list(tensor.shape) != self._shape or tensor.device.type != "cpu":
                raise ValueError(
                    f"expected a CPU tensor of shape {self._shape} with a supported data type, got a tensor of type"
                    f" {tensor.dtype} with shape {list(tensor.shape)}"
                )

    def find_pieces(self) -> tuple[Pieces, NDArray[np.int32]]:
        """Return the pieces of the volume and the link of each piece, as in `join_pieces`."""
        pieces = self.collect_pieces()
        self._free()
        return pieces, self.pieces.ravel()[pieces.position] - 1

    def collect_pieces(self) -> Pieces:
        """Return the pieces of the box after all planes have been added. Raises ValueError if planes are missing."""
        if self._num_missing_planes:
            raise ValueError(f"{self._num_missing_planes} planes are missing")
        counts, addresses = (ctypes.c_int64 * 2)(), (ctypes.c_void_p * 2)()
        self._functions.stackseg_pieces(self._handle, counts, addresses, ctypes.byref(addresses, 8))
        pieces, passes = (
            _copy_array(address, count, dtype)
            for address, count, dtype in zip(addresses, counts, (PIECE, PASS), strict=True)
        )
        at_face = find_pieces_at_faces(self.pieces, len(pieces), self._origin, self._volume_size)
        pairs = passes["first"] - 1, passes["second"] - 1
        sums = np.stack((pieces["voxels"], pieces["foreground"], at_face))
        return Pieces(pieces["position"], pieces["key"], sums, np.stack((*pairs, passes["key"])))

    def look_up(self, label_of_piece: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """Return the label of each voxel [Z, Y, X], uint16 or uint32, given those of the background and the pieces."""
        labels = np.empty(self.pieces.shape, label_of_piece.dtype)
        self._functions.stackseg_look_up(
            *(self.pieces.ctypes.data, self.pieces.size),
            *(label_of_piece.ctypes.data, labels.ctypes.data, labels.itemsize, self._threads),
        )
        return labels


def _copy_array(address: int | None, count: int, dtype: np.dtype[Any]) -> Array:
    """Return a copy of an array of structures in the memory of the kernel."""
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize) if address else b"", dtype)


watershed_kernel = WatershedKernel(SIGNATURES)
"""The watershed kernel of this process."""
