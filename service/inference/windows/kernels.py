"""C++ kernels for windows in the memory of a CPU: normalisation into a batch, and blending of scores.

They compute what torch computes in several passes over the same memory. Normalised pixels are equal to the bit.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.buffers import BufferCache, BufferPool
from service.core.native.library import CppFunctions
from service.core.quantities import Size

# Argument and result types of each function, in the letters of `CppFunctions`.
SIGNATURES = (
    ("stackseg_scale", "pipipffffi", "-"),
    ("stackseg_blend", "pipppppppi", "i"),
)

# Pixel types by their number in `kernels.cpp`.
PIXELS = tuple(map(np.dtype, (np.uint8, np.int8, np.uint16, np.int16, np.float32)))
FLOATS = (torch.float32, torch.bfloat16)

# Buffers of finished means that wait for reuse: one slab is decoded while others come.
IDLE_MEANS = 4

# Bytes of sums and means that wait for the next request: those of 64 x 512 x 512 voxels and two outputs. Fresh memory
# would first be filled with zeros by the system.
BUFFERS = BufferCache(2**26)

# Zero weights behind the edge of a window, because vectors of the kernel may read past it.
WEIGHT_PADDING = 16


class OverlapSums:
    """Weighted sums, float32, of the scores that windows share with later ones.

    outputs     K
    size        edges of the padded volume (Z, Y, X)
    weights     importance by position in a window along z, y and x, float32
    min_weight  lower bound of the product of the three
    starts      first voxels of all windows along each axis
    Raises ValueError for windows that do not cover the volume.

    The sums lie in three buffers, each in the order in which one window reads it:
    columns  of the previous window along x, [z, y, K, x], once to be read and once to be written
    rows     of the previous row, [z, y, K, x] for each window along x
    layer    of the previous layer, [z, y, K, x] for each window along y and x
    """

    def __init__(
        self,
        outputs: int,
        size: Size,
        weights: tuple[Tensor, Tensor, Tensor],
        min_weight: float,
        starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    ) -> None:
        if not all(axis.dtype == torch.float32 and axis.is_cpu for axis in weights):
            raise ValueError("weights must be float32 in the memory of the CPU")
        depth, height, width = map(len, weights)
        self.window_shape, self.volume_width = (outputs, depth, height, width), size[2]
        edges = self.window_shape[1:]
        steps = [_steps(*axis) for axis in zip(starts, edges, size, strict=True)]
        # Leading voxels of every window along each axis that no later one covers.
        self.final = tuple((*axis_steps, edge) for axis_steps, edge in zip(steps, edges, strict=True))
        planes, rows, columns = (edge - min(axis) for axis, edge in zip(self.final, edges, strict=True))
        sizes = depth * height * outputs * columns, depth * height * outputs * columns, depth * rows * outputs * size[2]
        # The layer is not pooled: it is large, and is made once for many windows.
        layer = np.empty(planes * outputs * math.prod(size[1:]), np.float32)
        self._memory: list[NDArray[Any]] = [*(BufferPool(4 * count, 1, BUFFERS).take() for count in sizes), layer]
        self._means = BufferPool(4 * outputs * depth * height * size[2], IDLE_MEANS, BUFFERS)
        padding = torch.zeros(WEIGHT_PADDING)
        # Arguments in the form that the kernel takes.
        self.weights = torch.cat([*weights, padding, torch.full((width,), min_weight), padding])
        self.starts = _int64_array(*itertools.chain(*starts))
        self.shape = _int64_array(*self.window_shape, *map(len, starts), planes, rows, self.volume_width)
        self.buffers = (ctypes.c_void_p * 4)(*(buffer.ctypes.data for buffer in self._memory))

    def empty_means(self, planes: int, rows: int) -> Tensor:
        """Return uninitialised memory for the means that leave with a row of windows, float32 [K, planes, rows, X]."""
        outputs = self.window_shape[0]
        whole = torch.from_numpy(self._means.take()).view(torch.float32)
        return whole[: outputs * planes * rows * self.volume_width].view(outputs, planes, rows, self.volume_width)


class WindowKernels(CppFunctions):
    """Functions of the library with tensors and arrays for arguments."""

    def supports(self, device: torch.device) -> bool:
        """Whether the kernels are there and can blend on this device."""
        return self.ready and device.type == "cpu"

    def can_scale(self, pixels: NDArray[Any], out: Tensor) -> bool:
        """Whether `scale` takes arrays of these dtypes in this memory."""
        fits = pixels.dtype in PIXELS and pixels.flags.aligned and out.dtype in FLOATS
        return fits and out.is_cpu and self.ready

    def scale(
        self, pixels: NDArray[Any], out: Tensor, offset: float, scale: float, limits: tuple[float, float]
    ) -> None:
        """Write (pixels - offset) / scale, clipped to the limits, into `out`.

        pixels  [z, y, x] of a type that `can_scale` allows, with any strides
        out     float32 or bfloat16, of the same shape, with any strides
        """
        if not self.can_scale(pixels, out) or pixels.shape != out.shape or pixels.ndim != 3:
            raise ValueError(f"{pixels.dtype} {pixels.shape} cannot be cut into {out.dtype} {list(out.shape)}")
        self._functions.stackseg_scale(
            *(pixels.ctypes.data, PIXELS.index(pixels.dtype), out.data_ptr(), out.dtype == torch.bfloat16),
            *(_int64_array(*pixels.shape, *pixels.strides, *out.stride()), offset, scale, *limits),
            torch.get_num_threads(),
        )

    def blend(self, sums: OverlapSums, index: Size, window: Tensor, means: Tensor) -> bool:
        """Add the scores of one window, [K, z, y, x] with any strides; return whether all final means are finite.

        index  number of the window along z, y and x; the previous ones were added
        means  of the window's row, [K, planes, rows, X]: the columns that no later window covers are written
        """
        if window.dtype not in FLOATS:
            window = window.float()
        inside = all(0 <= at < len(axis) for at, axis in zip(index, sums.final, strict=True))
        if window.shape != sums.window_shape or not window.is_cpu or not inside:
            raise ValueError(f"scores {list(window.shape)} cannot be added to windows {sums.window_shape} at {index}")
        planes, rows = sums.final[0][index[0]], sums.final[1][index[1]]
        writable = means.dtype == torch.float32 and means.is_cpu and means.is_contiguous()
        if not writable or means.shape != (sums.window_shape[0], planes, rows, sums.volume_width):
            raise ValueError(f"{planes} planes and {rows} rows cannot leave to {means.dtype} {list(means.shape)}")
        failed = self._functions.stackseg_blend(
            *(window.data_ptr(), window.dtype == torch.bfloat16, _int64_array(*window.stride()), sums.shape),
            *(sums.starts, _int64_array(*index), sums.weights.data_ptr()),
            *(sums.buffers, means.data_ptr(), torch.get_num_threads()),
        )
        return not failed


window_kernels = WindowKernels(SIGNATURES)
"""The kernels of this process."""


def _steps(starts: tuple[int, ...], edge: int, length: int) -> list[int]:
    """Return the distances between neighbouring windows. Raises ValueError where windows do not cover the axis."""
    steps = [after - start for start, after in itertools.pairwise(starts)]
    if not starts or (starts[0], starts[-1]) != (0, length - edge) or not all(0 < step <= edge for step in steps):
        raise ValueError(f"windows of {edge} from {starts} on do not cover {length} voxels one after the other")
    return steps


@lru_cache(maxsize=256)
def _int64_array(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """Return a C array, which the kernel only reads. It is cached because consecutive windows hardly differ."""
    return (ctypes.c_int64 * len(values))(*values)
