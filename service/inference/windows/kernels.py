"""Counting pixels, cutting windows and blending their scores in C++, in the memory of a CPU; `stitching.cpp` says how.

The same comes out as of torch, which takes several passes over the same memory. Cutting is exact to the bit.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.buffers import BufferCache, BufferPool
from service.core.cpp_extension import OPENMP_FLAGS, CppExtension

SOURCE = Path(__file__).with_suffix(".cpp")

# What each function takes and gives, as `CppExtension` says.
SIGNATURES = (
    ("stackseg_count", "pqpp", "q"),
    ("stackseg_rank", "pqqp", "q"),
    ("stackseg_cut", "pipipffffi", "-"),
    ("stackseg_blend", "pipppppppi", "i"),
    ("stackseg_finite", "piq", "i"),
)

PIXELS = tuple(map(np.dtype, (np.uint8, np.int8, np.uint16, np.int16, np.float32)))
FLOATS = (torch.float32, torch.bfloat16)

# Bytes that are read through in some 30 us.
BRIEF = 2**20

# Of what has left, so many wait to be used again: as many as there are where one is decoded while others come.
IDLE = 4

# Of a request's sums and means, so many bytes wait for the next one: those of 64 x 512 x 512 voxels and two outputs.
SPARE = BufferCache(2**26)

# Voxels beyond the edge of a window that the kernel may look at, whose weight is nothing.
BEYOND = 16

# What 16 bits can hold.
VALUES = 2**16


class Margins:
    """Sums of what windows have in common with later ones, float32.

    outputs  K
    size     edges of the padded volume (Z, Y, X)
    weights  importance of a voxel by its place in a window along z, y and x, float32; the product is at least `least`
    starts   of all windows along each axis
    Raises ValueError for what does not fit together.

    columns  of the window before along x, twice [z, y, K, x], as it is read and as it is written
    rows     of the row before, [z, y, K, x] for each window along x
    layer    of the layer before, [z, y, K, x] for each window along y and x
    What one window needs lies together in the order in which it is read.
    """

    def __init__(
        self,
        outputs: int,
        size: tuple[int, int, int],
        weights: tuple[Tensor, Tensor, Tensor],
        least: float,
        starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    ) -> None:
        if not all(one.dtype == torch.float32 and one.is_cpu for one in weights):
            raise ValueError("weights must be float32 in the memory of the CPU")
        depth, height, across = map(len, weights)
        self.edges, self.width = (outputs, depth, height, across), size[2]
        steps = [_steps(*axis) for axis in zip(starts, self.edges[1:], size, strict=True)]
        # First voxels of every window along each axis that no later one reaches.
        self.leaving = tuple((*along, edge) for along, edge in zip(steps, self.edges[1:], strict=True))
        planes, rows, columns = (edge - min(along) for along, edge in zip(self.leaving, self.edges[1:], strict=True))
        sizes = depth * height * outputs * columns, depth * height * outputs * columns, depth * rows * outputs * size[2]
        # A layer is large, and there are many windows to one.
        layer = np.empty(planes * outputs * math.prod(size[1:]), np.float32)
        self._memory: list[NDArray[Any]] = [*(BufferPool(4 * count, 1, SPARE).take() for count in sizes), layer]
        self._means = BufferPool(4 * outputs * depth * height * size[2], IDLE, SPARE)
        beyond = torch.zeros(BEYOND)
        # As the kernel takes it.
        self.every_weight = torch.cat([*weights, beyond, torch.full((across,), least), beyond])
        self.every_start = _integers(*itertools.chain(*starts))
        self.shape = _integers(*self.edges, *map(len, starts), planes, rows, self.width)
        self.sums = (ctypes.c_void_p * 4)(*(one.ctypes.data for one in self._memory))

    def means(self, planes: int, rows: int) -> Tensor:
        """Room for what leaves with a row of windows, [K, planes, rows, X]."""
        outputs = self.edges[0]
        whole = torch.from_numpy(self._means.take()).view(torch.float32)
        return whole[: outputs * planes * rows * self.width].view(outputs, planes, rows, self.width)


class Stitching(CppExtension):
    """The compiled functions, once `prepare` has made them; without a compiler there are none."""

    def __init__(self) -> None:
        super().__init__(SOURCE, OPENMP_FLAGS, SIGNATURES, "Windows are cut and blended several times as slowly")

    def suits(self, device: torch.device) -> bool:
        """Whether it is there, and can blend on this device."""
        return self.ready and device.type == "cpu"

    def counts(self, values: NDArray[Any]) -> bool:
        """Whether it can count these."""
        return self.ready and values.dtype == np.uint16

    def count(self, values: NDArray[np.uint16]) -> NDArray[np.int64]:
        """How often each value occurs, int64 [highest + 1], as `numpy.bincount` gives it of one value at least.

        values  [N]
        """
        if not self.counts(values) or not values.size or values.ndim != 1:
            raise ValueError(f"{values.dtype} {values.shape} cannot be counted")
        values = np.require(values, requirements=("C", "A"))
        scratch, counts = np.empty(4 * VALUES, np.uint32), np.empty(VALUES, np.int64)
        length = self._functions.stackseg_count(
            values.ctypes.data, values.size, scratch.ctypes.data, counts.ctypes.data
        )
        return counts[:length]

    def rank(self, counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
        """The value that would have this rank, from 0, if all that were counted were sorted, and how many are less."""
        if counts.dtype != np.int64 or counts.ndim != 1 or not counts.flags.c_contiguous:
            raise ValueError(f"{counts.dtype} {counts.shape} are no counts")
        less = ctypes.c_int64()
        value: int = self._functions_with_gil.stackseg_rank(counts.ctypes.data, len(counts), rank, ctypes.byref(less))
        return value, less.value

    def cuts(self, pixels: NDArray[Any], out: Tensor) -> bool:
        """Whether it can make `out` of these pixels."""
        fits = pixels.dtype in PIXELS and pixels.flags.aligned and out.dtype in FLOATS
        return fits and out.is_cpu and self.ready

    def cut(self, pixels: NDArray[Any], out: Tensor, offset: float, scale: float, limits: tuple[float, float]) -> None:
        """Write (pixels - offset) / scale, within the limits, into `out`.

        pixels  [z, y, x] of a type that `cuts` allows, with any strides
        out     float32 or bfloat16, of the same shape, with any strides
        """
        if not self.cuts(pixels, out) or pixels.shape != out.shape or pixels.ndim != 3:
            raise ValueError(f"{pixels.dtype} {pixels.shape} cannot be cut into {out.dtype} {list(out.shape)}")
        self._functions.stackseg_cut(
            *(pixels.ctypes.data, PIXELS.index(pixels.dtype), out.data_ptr(), out.dtype == torch.bfloat16),
            *(_integers(*pixels.shape, *pixels.strides, *out.stride()), offset, scale, *limits),
            torch.get_num_threads(),
        )

    def blend(self, margins: Margins, index: tuple[int, int, int], window: Tensor, means: Tensor) -> bool:
        """Add the scores of one window, [K, z, y, x] with any strides; whether all that leaves is finite.

        index  of its start along z, y and x; those before it were added
        means  of its row: those of the columns that no later window reaches are written
        """
        if window.dtype not in FLOATS:
            window = window.float()
        inside = all(0 <= at < len(along) for at, along in zip(index, margins.leaving, strict=True))
        if window.shape != margins.edges or not window.is_cpu or not inside:
            raise ValueError(f"scores {list(window.shape)} cannot be added to windows {margins.edges} at {index}")
        outputs, planes, rows = margins.edges[0], margins.leaving[0][index[0]], margins.leaving[1][index[1]]
        capacity = means.dtype == torch.float32 and means.is_cpu and means.is_contiguous()
        if not capacity or means.shape != (outputs, planes, rows, margins.width):
            raise ValueError(f"{planes} planes and {rows} rows cannot leave to {means.dtype} {list(means.shape)}")
        threads = torch.get_num_threads()
        failed = self._functions.stackseg_blend(
            *(window.data_ptr(), window.dtype == torch.bfloat16, _integers(*window.stride()), margins.shape),
            *(margins.every_start, _integers(*index), margins.every_weight.data_ptr()),
            *(margins.sums, means.data_ptr(), threads),
        )
        return not failed

    def tells(self, scores: Tensor) -> bool:
        """Whether it can tell if these are finite: float32 or bfloat16 [B, K, z, y, x] without gaps, on the CPU."""
        dense = scores.is_contiguous() or scores.is_contiguous(memory_format=torch.channels_last_3d)
        return dense and self.suits(scores.device) and scores.dtype in FLOATS

    def finite(self, scores: Tensor) -> bool:
        """Whether all scores are, of a tensor that `tells` allows."""
        if not self.tells(scores):
            raise ValueError(f"{scores.dtype} {list(scores.shape)} cannot be looked through")
        # What takes some 30 us is done before another thread would have given the interpreter's lock back.
        functions = self._functions_with_gil if scores.nbytes <= BRIEF else self._functions
        return bool(functions.stackseg_finite(scores.data_ptr(), scores.dtype == torch.bfloat16, scores.numel()))


stitching = Stitching()
"""The one of this process; what runs windows on a CPU prepares it when it starts."""


def _steps(starts: tuple[int, ...], edge: int, length: int) -> list[int]:
    """From window to window along one axis. Raises ValueError."""
    steps = [after - start for start, after in itertools.pairwise(starts)]
    if not starts or (starts[0], starts[-1]) != (0, length - edge) or not all(0 < step <= edge for step in steps):
        raise ValueError(f"windows of {edge} from {starts} on do not cover {length} voxels one after the other")
    return steps


@lru_cache(maxsize=256)
def _integers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """As the kernel takes them, which only reads them: of one window they are hardly ever others than of the last."""
    return (ctypes.c_int64 * len(values))(*values)
