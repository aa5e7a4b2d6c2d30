"""C++ kernels for windows in CPU memory: normalization into a batch, and blending of scores.

Each kernel does in one pass what torch does in several. Normalized pixels are bitwise equal to those computed by torch.
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

# Argument and result types of each function, as type codes of `CppFunctions`.
SIGNATURES = (
    ("stackseg_scale", "pipipffffi", "-"),
    ("stackseg_blend", "pipppppppi", "i"),
)

# Pixel types, indexed by their number in `kernels.cpp`.
PIXEL_DTYPES = tuple(map(np.dtype, (np.uint8, np.int8, np.uint16, np.int16, np.float32)))
# Dtypes of batches and scores that the kernels support.
FLOAT_DTYPES = (torch.float32, torch.bfloat16)

# Maximum number of idle buffers for finished means. One slab is decoded while the next ones are computed.
MAX_IDLE_MEANS_BUFFERS = 4

# Cache of the buffers for sums and means, which later requests reuse. 64 MiB is enough for 64 x 512 x 512 voxels and
# two outputs. Reuse saves time, because the operating system fills newly allocated memory with zeros.
BUFFER_CACHE = BufferCache(2**26)

# Number of zeros after the weights of an axis. Vector instructions in the kernel may read past the last weight.
WEIGHT_PADDING = 16


class OverlapSums:
    """Weighted sums, float32, of the scores of voxels that windows share with later windows.

    num_outputs  number of outputs K
    size         edge lengths of the padded volume (Z, Y, X)
    weights      float32 weights by position in a window along z, y and x; the weight of a voxel is their product
    min_weight   lower bound of the product
    starts       first voxels of all windows along each axis

    The sums are stored in the order in which a window reads them:
    columns  sums from the previous window along x, [z, y, K, x], in two buffers: one is read while the other is written
    rows     sums from the previous row, [z, y, K, x] for each window along x
    layer    sums from the previous layer, [z, y, K, x] for each window along y and x

    Raises ValueError if the weights are not float32 on the CPU, or if the windows do not cover the volume.
    """

    def __init__(
        self,
        num_outputs: int,
        size: Size,
        weights: tuple[Tensor, Tensor, Tensor],
        min_weight: float,
        starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    ) -> None:
        if not all(axis.dtype == torch.float32 and axis.is_cpu for axis in weights):
            raise ValueError("weights must be float32 tensors on the CPU")
        depth, height, width = map(len, weights)
        self.window_shape, self.volume_width = (num_outputs, depth, height, width), size[2]
        window_lengths = self.window_shape[1:]
        steps = [_compute_steps(*axis) for axis in zip(starts, window_lengths, size, strict=True)]
        # Number of leading voxels of each window along each axis that no later window covers.
        self.final_lengths = tuple(
            (*axis_steps, window_length) for axis_steps, window_length in zip(steps, window_lengths, strict=True)
        )
        num_shared_planes, num_shared_rows, num_shared_columns = (
            window_length - min(axis) for axis, window_length in zip(self.final_lengths, window_lengths, strict=True)
        )
        buffer_lengths = (
            depth * height * num_outputs * num_shared_columns,
            depth * height * num_outputs * num_shared_columns,
            depth * num_shared_rows * num_outputs * size[2],
        )
        # The buffer of the layer is not pooled, because it is large and allocated only once for many windows.
        layer = np.empty(num_shared_planes * num_outputs * math.prod(size[1:]), np.float32)
        self._arrays: list[NDArray[Any]] = [
            *(BufferPool(4 * count, 1, BUFFER_CACHE).take() for count in buffer_lengths),
            layer,
        ]
        self._means_buffers = BufferPool(
            4 * num_outputs * depth * height * size[2], MAX_IDLE_MEANS_BUFFERS, BUFFER_CACHE
        )
        padding = torch.zeros(WEIGHT_PADDING)
        # Kernel arguments, converted to the types that the kernel expects.
        self.weights = torch.cat([*weights, padding, torch.full((width,), min_weight), padding])
        self.starts = _make_int64_array(*itertools.chain(*starts))
        self.shape = _make_int64_array(
            *self.window_shape, *map(len, starts), num_shared_planes, num_shared_rows, self.volume_width
        )
        self.buffers = (ctypes.c_void_p * 4)(*(buffer.ctypes.data for buffer in self._arrays))

    def allocate_means(self, num_planes: int, num_rows: int) -> Tensor:
        """Allocate uninitialized memory for the means that a row of windows completes, float32 [K, z, y, X]."""
        num_outputs = self.window_shape[0]
        buffer = torch.from_numpy(self._means_buffers.take()).view(torch.float32)
        return buffer[: num_outputs * num_planes * num_rows * self.volume_width].view(
            num_outputs, num_planes, num_rows, self.volume_width
        )


class WindowKernels(CppFunctions):
    """C++ functions that normalize windows and blend scores. They accept tensors and arrays as arguments."""

    def supports(self, device: torch.device) -> bool:
        """Return whether the kernels are available and can blend on this device."""
        return self.is_available and device.type == "cpu"

    def can_scale(self, pixels: NDArray[Any], out: Tensor) -> bool:
        """Return whether `scale` supports these dtypes and this memory."""
        is_supported = pixels.dtype in PIXEL_DTYPES and pixels.flags.aligned and out.dtype in FLOAT_DTYPES
        return is_supported and out.is_cpu and self.is_available

    def scale(
        self, pixels: NDArray[Any], out: Tensor, offset: float, scale: float, limits: tuple[float, float]
    ) -> None:
        """Write (pixels - offset) / scale, clipped to the limits, to `out`.

        pixels  [z, y, x] of a dtype that `can_scale` accepts, with any strides
        out     float32 or bfloat16, of the same shape, with any strides
        """
        if not self.can_scale(pixels, out) or pixels.shape != out.shape or pixels.ndim != 3:
            raise ValueError(
                f"cannot scale {pixels.dtype} pixels of shape {pixels.shape} to {out.dtype} of shape {list(out.shape)}"
            )
        self._functions.stackseg_scale(
            *(pixels.ctypes.data, PIXEL_DTYPES.index(pixels.dtype), out.data_ptr(), out.dtype == torch.bfloat16),
            *(_make_int64_array(*pixels.shape, *pixels.strides, *out.stride()), offset, scale, *limits),
            torch.get_num_threads(),
        )

    def blend(self, sums: OverlapSums, index: Size, window: Tensor, means: Tensor) -> bool:
        """Add the scores of one window, [K, z, y, x] with any strides. Return whether all final means are finite.

        index  zero-based index of the window along z, y and x; all previous windows must have been added
        means  memory for the means of the window's row, [K, z, y, X]; columns that no later window covers are written
        """
        if window.dtype not in FLOAT_DTYPES:
            window = window.float()
        is_valid_index = all(
            0 <= axis_index < len(lengths) for axis_index, lengths in zip(index, sums.final_lengths, strict=True)
        )
        if window.shape != sums.window_shape or not window.is_cpu or not is_valid_index:
            raise ValueError(
                f"cannot add scores of shape {list(window.shape)} to windows of shape {sums.window_shape} at {index}"
            )
        num_planes, num_rows = sums.final_lengths[0][index[0]], sums.final_lengths[1][index[1]]
        is_writable = means.dtype == torch.float32 and means.is_cpu and means.is_contiguous()
        if not is_writable or means.shape != (sums.window_shape[0], num_planes, num_rows, sums.volume_width):
            raise ValueError(
                f"cannot write {num_planes} planes and {num_rows} rows to {means.dtype} means of shape"
                f" {list(means.shape)}"
            )
        has_nonfinite_means = self._functions.stackseg_blend(
            *(window.data_ptr(), window.dtype == torch.bfloat16, _make_int64_array(*window.stride()), sums.shape),
            *(sums.starts, _make_int64_array(*index), sums.weights.data_ptr()),
            *(sums.buffers, means.data_ptr(), torch.get_num_threads()),
        )
        return not has_nonfinite_means


window_kernels = WindowKernels(SIGNATURES)
"""The kernels of this process, which are used unless a caller passes other kernels."""


def _compute_steps(starts: tuple[int, ...], window_length: int, length: int) -> list[int]:
    """Return the distances between adjacent windows. Raises ValueError if the windows do not cover the axis."""
    steps = [next_start - start for start, next_start in itertools.pairwise(starts)]
    if (
        not starts
        or (starts[0], starts[-1]) != (0, length - window_length)
        or not all(0 < step <= window_length for step in steps)
    ):
        raise ValueError(f"windows of length {window_length} at {starts} do not cover an axis of {length} voxels")
    return steps


@lru_cache(maxsize=256)
def _make_int64_array(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """Return a read-only C array. Arrays are cached because consecutive windows use almost the same values."""
    return (ctypes.c_int64 * len(values))(*values)
