"""Watershed in C++ for planes in the memory of a CPU.

Its labels equal those of `watershed.py` with `instances.label_basins`. For a small volume these take hundreds of
operations, each of which costs microseconds and releases the interpreter's lock; the kernel takes one call per part.
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
from service.core.types import Objects, label_dtype

# Argument and result types of each function, in the letters of `CppFunctions`.
SIGNATURES = (
    ("stackseg_watershed", "pifdiq", "p"),
    ("stackseg_free", "p", "-"),
    ("stackseg_planes", "ppippipq", "i"),
    ("stackseg_objects", "pqi", "q"),
    ("stackseg_facts", "pp", "-"),
    ("stackseg_write_labels", "pppi", "-"),
)

# Number of voxels in a block, which takes some megabytes, and of planes, however large these are. A path that leaves a
# block goes on as a piece of its own: plane by plane, a crowd in planes of 1536 x 1536 voxels takes seven times as long
# as in blocks of eight, and 27 bytes a voxel instead of 9.
BLOCK_VOXELS = 2**22
BLOCK_PLANES = 8

# Up to this many voxels memory is allocated and freed within about 30 us.
SMALL_VOXELS = 2**20

# Places in a block are 32-bit integers.
MAX_PLACE = 2**31 - 1

# Probabilities of the foreground are counted in this unit: integers, whose sums have no order.
PROBABILITY_ONE = 65536

CPU = torch.device("cpu")

_Three = ctypes.c_int64 * 3

# Dtypes by their number in `watershed_kernel.cpp`.
HEIGHTS = (torch.float32, torch.bfloat16)
INSIDE = (*HEIGHTS, torch.bool)


# Function that returns whether each object is kept, [N].
ObjectFilter = Callable[[Objects], NDArray[np.bool_]]


def keep_all(objects: Objects) -> NDArray[np.bool_]:
    """Keep all objects."""
    return np.ones(len(objects), bool)


def number_objects(kept: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the new number of each label, int32 [N + 1]; 0 for the background and for objects that are not kept [N].

    Objects that are kept are numbered from 1 in their order.
    """
    return np.append(0, np.where(kept, kept.cumsum(), 0)).astype(np.int32)


class WatershedParameters(NamedTuple):
    """Parameters that decide what an object is.

    threshold  above which a voxel is foreground
    depth      of a pass below the lower of the two peaks that it separates, in units of the distance; above 0
    logits     whether heights are logits of the distance
    """

    threshold: float
    depth: float
    logits: bool


def choose_block(size: Size, *, along_y: bool = False) -> int:
    """Return the number of voxels of a volume (Z, Y, X) that are worked on together, rims of its planes included."""
    plane = (size[not along_y] + 2) * (size[2] + 2)
    largest = MAX_PLACE - 4 * _largest_plane(size)
    return max(BLOCK_VOXELS, min(BLOCK_PLANES * plane, largest))


def _largest_plane(size: Size) -> int:
    """Return the voxels of a plane, with its rim, along the axis, z or y, along which it has more of them."""
    return (max(size[:2]) + 2) * (size[2] + 2)


class WatershedKernel(CppFunctions):
    """Functions of the library with tensors and arrays for arguments."""

    def supports(self, device: torch.device, size: Size = (1, 1, 1), block: int = BLOCK_VOXELS) -> bool:
        """Whether the kernel is there and takes volumes of this size on this device, along either axis."""
        return self.ready and device.type == "cpu" and block + 4 * _largest_plane(size) <= MAX_PLACE

    def start(
        self, size: Size, parameters: WatershedParameters, *, along_y: bool = False, block: int | None = None
    ) -> KernelWatershed:
        """Return a watershed without planes. Raises MemoryError, and ValueError for a size that is not supported.

        size    (Z, Y, X) of the volume
        along_y  planes come along y instead of z, each with all of z; labels are equal
        block   number of voxels that are processed together; None: as `choose_block` has it
        """
        block = choose_block(size, along_y=along_y) if block is None else block
        if min(size) < 1 or not self.supports(CPU, size, block):
            raise ValueError(f"a volume of {size} is not for the kernel")
        return KernelWatershed(
            (self._functions, self._functions_with_gil), size, parameters, along_y=along_y, block=block
        )


class KernelWatershed:
    """Watershed of a height map that arrives in planes; `WatershedKernel.start` makes it."""

    def __init__(
        self,
        kernel: tuple[ctypes.CDLL, ctypes.PyDLL],
        size: Size,
        parameters: WatershedParameters,
        *,
        along_y: bool,
        block: int,
    ) -> None:
        self._size, self._along_y = size, along_y
        self._functions, quick = kernel
        # Allocating much memory takes long, and must not hold the interpreter's lock.
        self._cheap_functions = quick if math.prod(size) <= SMALL_VOXELS else self._functions
        self._left = size[along_y]
        self._handle = self._cheap_functions.stackseg_watershed(_Three(*size), along_y, *parameters, block)
        if self._handle is None:
            raise MemoryError(f"no memory for the landscape of a volume of {size}")

    # `__del__` also runs where `__init__` failed.
    _handle: int | None = None

    def __del__(self) -> None:
        if self._handle is not None:
            self._cheap_functions.stackseg_free(self._handle)

    def add(self, heights: Tensor, inside: Tensor) -> None:
        """Add the next planes, [planes, Y, X] or, along y, [Z, planes, X]. Raises ValueError, MemoryError.

        heights  float32 or bfloat16
        inside   float32 or bfloat16, foreground above the threshold; or bool
        """
        planes = heights.shape[self._along_y]
        shape = list(self._size)
        shape[self._along_y] = planes
        for tensor, kinds in ((heights, HEIGHTS), (inside, INSIDE)):
            if tensor.dtype not in kinds or list(tensor.shape) != shape or tensor.device.type != "cpu":
                raise ValueError(f"{tensor.dtype} {list(tensor.shape)} where planes {shape} must be")
        if planes > self._left:
            raise ValueError(f"{planes} planes where {self._left} are left")
        self._left -= planes
        failed = self._functions.stackseg_planes(
            *(self._handle, heights.data_ptr(), HEIGHTS.index(heights.dtype), self._steps(heights)),
            *(inside.data_ptr(), INSIDE.index(inside.dtype), self._steps(inside), planes),
        )
        if failed:
            raise MemoryError("no memory for the pieces of a landscape")

    def _steps(self, planes: Tensor) -> ctypes.Array[ctypes.c_int64]:
        z, y, x = planes.stride()
        return _Three(y, z, x) if self._along_y else _Three(z, y, x)

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        """Return labels [Z, Y, X], uint16 or uint32, from 1, and the objects, once every plane was added.

        minimum_size  voxels that an object must have
        drop_border   and it must not touch a face of the volume, unless that is one voxel wide there
        keep          returns which of these objects get a label
        """
        if self._left:
            raise ValueError(f"{self._left} planes are missing")
        count = self._functions.stackseg_objects(self._handle, minimum_size, drop_border)
        if count < 0:
            raise MemoryError("no memory for the objects of a landscape")
        facts = np.empty((count, 3))
        self._cheap_functions.stackseg_facts(self._handle, facts.ctypes.data)
        objects = Objects.from_sums(*facts.T)
        kept = keep(objects)
        objects, numbers = objects.select(kept), number_objects(kept)
        labels: NDArray[np.unsignedinteger] = np.empty(self._size, label_dtype(len(objects)))
        self._functions.stackseg_write_labels(self._handle, numbers.ctypes.data, labels.ctypes.data, labels.itemsize)
        return labels, objects


watershed_kernel = WatershedKernel(SIGNATURES)
"""The kernel of this process."""
