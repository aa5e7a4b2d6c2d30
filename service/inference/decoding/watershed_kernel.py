"""C++ watershed in CPU memory, block by block on several threads.

Its basins and passes are the same as those of `watershed.py`, no matter how the volume was divided. For a small volume,
the PyTorch version needs a hundred operations, each of which takes microseconds and releases the global interpreter
lock. The kernel needs one call per block.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.native.library import CppFunctions
from service.core.quantities import Size
from service.core.types import Array
from service.inference.decoding.pieces import PROBABILITIES, Pieces, WatershedParameters, list_faces

# Argument and result types of each function, as letters of `CppFunctions.CTYPES`.
SIGNATURES = (
    ("stackseg_watershed", "ppifdipp", "p"),
    ("stackseg_free", "p", "-"),
    ("stackseg_block", "ppppi", "i"),
    ("stackseg_pieces", "pppp", "-"),
    ("stackseg_look_up", "pqppii", "-"),
)
# Structures of the kernel.
PIECE = np.dtype([("position", "i8"), ("key", "i4"), ("voxels", "i4"), ("foreground", "i8")])
PASS = np.dtype([("first", "i4"), ("second", "i4"), ("key", "i4")])
SCORES = np.dtype([("addresses", "i8", 2), ("strides", "i8", (2, 3)), ("first", "i8", 3), ("is_bfloat16", "i8")])

# Minimum number of voxels in a block. The arrays of a block of this size use 50 megabytes.
MIN_BLOCK_VOXELS = 2**22

# Minimum number of planes in a block, even if planes are large. Each additional block divides paths into more pieces:
# with one plane of 1536 x 1536 voxels per block, a crowded stack takes seven times as long as with eight planes, and
# uses 27 bytes per voxel instead of 9.
MIN_BLOCK_PLANES = 8

# Positions in a block are 32-bit integers.
MAX_INDEX = 2**31 - 1

# If a slab arrives within this time after the previous slab was processed, slabs arrive faster than they are processed.
MAX_DELAY_SECONDS = 1e-3

# One thread processes a smaller slab in 4 ms. Others would wait up to 5 ms for a core while threads of OpenMP spin.
MIN_PARALLEL_VOXELS = 2**20

CPU = torch.device("cpu")

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
        return KernelWatershed(self._functions, volume_size, box, parameters, options)


class KernelWatershed:
    """Watershed of a height map that arrives plane by plane, created by `WatershedKernel.start`.

    pieces  piece of each voxel in the box, from 1, int32 [Z, Y, X]; 0 is the background
    """

    _handle: int | None = None

    def __init__(
        self, functions: ctypes.CDLL, size: Size, box: Box, parameters: WatershedParameters, options: WatershedOptions
    ) -> None:
        axis = int(options.along_y)
        self._functions, self._size, self._axis, self._threads = functions, size, axis, options.threads
        self._box = np.array(box, np.int64).T.copy()
        # The paths of voxels at the faces of the box may lead to its neighbors in the volume.
        self._scores_box = np.clip(self._box + np.array([[-1], [1]]), 0, size)
        # Ends of the planes that have arrived, and of the planes whose pieces are known.
        self._arrived, self._processed = int(self._scores_box[0, axis]), int(self._box[0, axis])
        self.pieces = np.empty(self._box[1] - self._box[0], np.int32)
        z, y, x = self.pieces.shape
        self._block_planes = options.block_planes or choose_block_planes((z, y, x), along_y=options.along_y)
        block_shape = [min(self._block_planes, n) if i == axis else n for i, n in enumerate((z, y, x))]
        # 13 bytes per voxel, in huge pages: clearing small pages would take a quarter of the time of the watershed.
        self._workspace = np.empty(13 * (math.prod(n + 2 for n in block_shape) + 1), np.uint8)
        self._handle = functions.stackseg_watershed(
            *((ctypes.c_int64 * 3)(*size), self._box.ctypes.data, axis, parameters.threshold, parameters.depth),
            *(parameters.heights_are_logits, PROBABILITIES.ctypes.data, self.pieces.ctypes.data),
        )
        if self._handle is None:
            raise MemoryError(f"not enough memory for the watershed of {self.pieces.shape} voxels")
        self._idle_since = time.monotonic()

    def __del__(self) -> None:
        self._free()

    def _free(self) -> None:
        self._functions.stackseg_free(self._handle)
        self._handle = None

    def add(self, heights: Tensor, foreground: Tensor) -> None:
        """Add the next planes, [planes, Y, X] or, along y, [Z, planes, X], float32 or bfloat16 on the CPU.

        The planes include the neighbors of the box in the volume. Foreground scores are compared with the threshold.
        The last plane is processed after the next plane has arrived. Raises ValueError if the planes do not match the
        box, or if the first planes contain none of the box, and MemoryError if there is not enough memory.
        """
        self._check_planes((heights, foreground))
        if not heights.numel():
            return
        if heights.dtype != foreground.dtype:
            heights, foreground = heights.float(), foreground.float()
        # The kernel reads contiguous rows.
        planes = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (heights, foreground)]
        first = self._scores_box[0].copy()
        first[self._axis] = self._arrived
        addresses, strides = zip(*((tensor.data_ptr(), tensor.stride()) for tensor in planes), strict=True)
        scores = np.array((addresses, strides, first, heights.dtype == torch.bfloat16), SCORES)
        self._arrived += heights.shape[self._axis]
        is_last = self._arrived == self._scores_box[1, self._axis]
        # While a request waits for slabs, other threads need the cores to compute them. Do not compete with them.
        is_urgent = is_last or time.monotonic() - self._idle_since < MAX_DELAY_SECONDS
        end = int(self._box[1, self._axis]) if is_last else self._arrived - 1
        self._process(end, scores, self._threads if is_urgent and heights.numel() >= MIN_PARALLEL_VOXELS else 1)
        self._idle_since = time.monotonic()

    def _process(self, end: int, scores: Array, threads: int) -> None:
        """Process the planes up to `end`, given the new planes as `SCORES`."""
        # If there is no plane to process, an empty block stores the new planes for the next block.
        for first in range(self._processed, max(end, self._processed + 1), self._block_planes):
            block = self._box.copy()
            block[:, self._axis] = first, min(first + self._block_planes, end)
            addresses = (array.ctypes.data for array in (block, scores, self._workspace))
            if self._functions.stackseg_block(self._handle, *addresses, threads):
                raise MemoryError("not enough memory for the pieces of a watershed")
        self._processed = end

    def _check_planes(self, tensors: Sequence[Tensor]) -> None:
        shape = (self._scores_box[1] - self._scores_box[0]).tolist()
        num_missing = self._scores_box[1, self._axis] - self._arrived
        shape[self._axis] = min(tensors[0].shape[self._axis], int(num_missing))
        for tensor in tensors:
            is_supported = tensor.dtype in {torch.float32, torch.bfloat16} and tensor.device.type == "cpu"
            if not is_supported or list(tensor.shape) != shape:
                raise ValueError(
                    f"expected a CPU tensor of shape {shape} with a supported data type, got a tensor of type"
                    f" {tensor.dtype} with shape {list(tensor.shape)}"
                )
        if 0 < shape[self._axis] <= self._processed - self._arrived:
            raise ValueError("the first planes must include a plane of the box")

    def find_pieces(self) -> tuple[Pieces, NDArray[np.int32]]:
        """Return the pieces of the volume and the link of each piece, as in `join_pieces`."""
        pieces = self.collect_pieces()
        self._free()
        return pieces, self.pieces.ravel()[pieces.position] - 1

    def collect_pieces(self) -> Pieces:
        """Return the pieces of the box after all planes have been added. Raises ValueError if planes are missing."""
        if self._processed < self._box[1, self._axis]:
            raise ValueError("planes are missing")
        self._workspace = np.empty(0, np.uint8)
        counts, addresses = (ctypes.c_int64 * 2)(), (ctypes.c_void_p * 2)()
        self._functions.stackseg_pieces(self._handle, counts, addresses, ctypes.byref(addresses, 8))
        pieces, passes = (
            np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype)
            for address, count, dtype in zip(addresses, counts, (PIECE, PASS), strict=True)
        )
        at_face = np.zeros(len(pieces) + 1, np.int64)
        for face in list_faces(self.pieces.shape, self._box[0].tolist(), self._size):
            at_face[self.pieces[face]] = 1
        pairs = passes["first"] - 1, passes["second"] - 1
        sums = np.stack((pieces["voxels"], pieces["foreground"], at_face[1:]))
        return Pieces(pieces["position"], pieces["key"], sums, np.stack((*pairs, passes["key"])))

    def look_up(self, label_of_piece: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """Return the label of each voxel [Z, Y, X], uint16 or uint32, given those of the background and the pieces."""
        labels = np.empty(self.pieces.shape, label_of_piece.dtype)
        self._functions.stackseg_look_up(
            *(self.pieces.ctypes.data, self.pieces.size),
            *(label_of_piece.ctypes.data, labels.ctypes.data, labels.itemsize, self._threads),
        )
        return labels


watershed_kernel = WatershedKernel(SIGNATURES)
"""The watershed kernel of this process."""
