"""C++ watershed of planes in CPU memory.

Its labels are the same as those of `watershed.py` with `labels.label_basins`. For a small volume, the PyTorch version
needs hundreds of operations, each of which takes microseconds and releases the global interpreter lock. The kernel
needs one call per slab.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
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
    ("stackseg_watershed", "pifdiq", "p"),
    ("stackseg_free", "p", "-"),
    ("stackseg_planes", "ppippipq", "i"),
    ("stackseg_objects", "pqi", "q"),
    ("stackseg_object_properties", "pp", "-"),
    ("stackseg_write_labels", "pppi", "-"),
)

# Minimum number of voxels in a block. A block of this size uses a few megabytes.
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


def choose_block_voxels(size: Size, *, along_y: bool = False) -> int:
    """Return the number of voxels of a volume (Z, Y, X) to process together, including the padding of planes."""
    plane_voxels = (size[not along_y] + 2) * (size[2] + 2)
    max_voxels = MAX_INDEX - 4 * _count_largest_plane_voxels(size)
    return max(MIN_BLOCK_VOXELS, min(MIN_BLOCK_PLANES * plane_voxels, max_voxels))


def _count_largest_plane_voxels(size: Size) -> int:
    """Return the number of voxels in a plane along z or along y, whichever is larger, including the padding."""
    return (max(size[:2]) + 2) * (size[2] + 2)


class WatershedKernel(CppFunctions):
    """Python interface to the C++ functions that compute the watershed of a volume."""

    def supports(self, device: torch.device, size: Size = (1, 1, 1), block_voxels: int = MIN_BLOCK_VOXELS) -> bool:
        """Return whether the kernel is available and supports volumes of this size on this device, along both axes."""
        return (
            self.is_available
            and device.type == "cpu"
            and block_voxels + 4 * _count_largest_plane_voxels(size) <= MAX_INDEX
        )

    def start(
        self, size: Size, parameters: WatershedParameters, *, along_y: bool = False, block_voxels: int | None = None
    ) -> IncrementalWatershed:
        """Return a watershed to which no planes have been added yet.

        Raises ValueError if the size is not supported, and MemoryError if there is not enough memory.

        size          (Z, Y, X) of the volume
        along_y       whether planes arrive along y instead of along z, each with its full extent along z; the labels
                      are the same either way
        block_voxels  number of voxels that are processed together; None: use `choose_block_voxels`
        """
        block_voxels = choose_block_voxels(size, along_y=along_y) if block_voxels is None else block_voxels
        if min(size) < 1 or not self.supports(CPU, size, block_voxels):
            raise ValueError(f"the kernel does not support a volume of {size} voxels")
        return IncrementalWatershed(
            (self._functions, self._functions_with_gil), size, parameters, along_y=along_y, block_voxels=block_voxels
        )


class IncrementalWatershed:
    """Watershed of a height map that arrives plane by plane, created by `WatershedKernel.start`."""

    def __init__(
        self,
        kernel: tuple[ctypes.CDLL, ctypes.PyDLL],
        size: Size,
        parameters: WatershedParameters,
        *,
        along_y: bool,
        block_voxels: int,
    ) -> None:
        self._size, self._along_y = size, along_y
        self._functions, functions_with_gil = kernel
        # Allocating a large amount of memory is slow and must not hold the global interpreter lock.
        self._cheap_functions = functions_with_gil if math.prod(size) <= MAX_SMALL_VOLUME_VOXELS else self._functions
        self._num_missing_planes = size[along_y]
        self._handle = self._cheap_functions.stackseg_watershed(_Int64x3(*size), along_y, *parameters, block_voxels)
        if self._handle is None:
            raise MemoryError(f"not enough memory for the watershed of a volume of {size} voxels")

    # `__del__` also runs if `__init__` failed.
    _handle: int | None = None

    def __del__(self) -> None:
        if self._handle is not None:
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
        for tensor, dtypes in ((heights, HEIGHT_DTYPES), (foreground, FOREGROUND_DTYPES)):
            if tensor.dtype not in dtypes or list(tensor.shape) != shape or tensor.device.type != "cpu":
                raise ValueError(
                    f"expected CPU planes of shape {shape} with a supported data type, got a tensor of type"
                    f" {tensor.dtype} with shape {list(tensor.shape)}"
                )
        if num_planes > self._num_missing_planes:
            raise ValueError(f"{num_planes} planes were added, but only {self._num_missing_planes} planes are missing")
        self._num_missing_planes -= num_planes
        status = self._functions.stackseg_planes(
            *(self._handle, heights.data_ptr(), HEIGHT_DTYPES.index(heights.dtype), self._strides(heights)),
            *(foreground.data_ptr(), FOREGROUND_DTYPES.index(foreground.dtype), self._strides(foreground), num_planes),
        )
        if status:
            raise MemoryError("not enough memory for the pieces of a watershed")

    def _strides(self, planes: Tensor) -> ctypes.Array[ctypes.c_int64]:
        z, y, x = planes.stride()
        return _Int64x3(y, z, x) if self._along_y else _Int64x3(z, y, x)

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
