"""Counting pixels, cutting windows and blending their scores in C++, in the memory of a CPU; `stitching.cpp` says how.

The same comes out as of torch, which takes several passes over the same memory. Cutting is exact to the bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.arrays import Pool
from service.kernels import Kernel

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")

# What each function takes and gives, as `Kernel` says.
SIGNATURES = (
    ("stackseg_count", "pqpp", "q"),
    ("stackseg_rank", "pqqp", "q"),
    ("stackseg_cut", "pipipffffi", "-"),
    ("stackseg_add", "pipppfqqqpi", "-"),
    ("stackseg_leave", "pppfppqqqqqpqqppi", "i"),
    ("stackseg_finite", "piq", "i"),
)

PIXELS = tuple(map(np.dtype, (np.uint8, np.int8, np.uint16, np.int16, np.float32)))
FLOATS = (torch.float32, torch.bfloat16)

# Bytes that are read through in some 30 us.
BRIEF = 2**20

# Of what has left, so many wait to be used again: as many as there are where one is decoded while others come.
IDLE = 4

# What 16 bits can hold.
VALUES = 2**16


@dataclass
class Row:
    """Sums of one row of windows along x, and of the planes of the layer before that it shares; contiguous.

    sums     float32 [K, z, y, X], a ring along y that begins at `first`
    layer    float32 [K, shared z, Y, X]
    weights  importance of a voxel by its place in a window along z, y and x, float32; the product is at least `least`
    starts   of all windows along each axis
    Raises ValueError for what does not fit together.
    """

    sums: Tensor
    layer: Tensor
    weights: tuple[Tensor, Tensor, Tensor]
    least: float
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    first: int = 0

    def __post_init__(self) -> None:
        outputs, depth, height, width = self.sums.shape
        edges = tuple(map(len, self.weights))
        own = (self.sums, self.layer)
        alike = all(one.dtype == torch.float32 and one.device.type == "cpu" for one in (*own, *self.weights))
        if not alike or not all(one.is_contiguous() for one in own) or edges[:2] != (depth, height):
            raise ValueError("sums and weights must be float32 in the memory of the CPU, and as large as windows")
        inside = min(self.starts[2]) >= 0 and max(self.starts[2]) + edges[2] <= width
        if not inside or (self.layer.shape[0], self.layer.shape[3]) != (outputs, width):
            raise ValueError(f"windows from {self.starts[2]} on leave a row of {width} columns, or the layer differs")
        self.edges = (outputs, *edges, width)
        # Of what leaves, each has room for as much as all that is here.
        self.means = Pool(self.sums.nbytes, IDLE)
        self.every_weight = torch.cat(self.weights)
        self.every_start = _integers(*(start for along in self.starts for start in along))
        self.counts = _integers(*map(len, self.starts))

    @property
    def shape(self) -> ctypes.Array[ctypes.c_int64]:
        """As the kernel takes it."""
        return _integers(*self.edges, self.first)


class Stitching(Kernel):
    """The compiled functions, once `prepare` has made them; without a compiler there are none."""

    def __init__(self) -> None:
        super().__init__(SOURCE, FLAGS, SIGNATURES, "Windows are cut and blended several times as slowly")

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
        value: int = self._quick.stackseg_rank(counts.ctypes.data, len(counts), rank, ctypes.byref(less))
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

    def add(self, row: Row, window: Tensor, left: int, known: int, carried: int) -> None:
        """Add the weighted scores of one window, [K, z, y, x] with any strides, to the sums from column `left` on.

        known    so many of its columns have sums already; the others get their first
        carried  so many of its rows have sums in every column
        """
        if window.dtype not in FLOATS:
            window = window.float()
        across, width = row.edges[3:]
        fits = window.shape == row.edges[:4] and window.is_cpu
        if not fits or not 0 <= left <= width - across or not 0 <= known <= across:
            raise ValueError(f"scores {list(window.shape)} at {left} cannot be added to a row {list(row.sums.shape)}")
        self._functions.stackseg_add(
            *(window.data_ptr(), window.dtype == torch.bfloat16, _integers(*window.stride()), row.shape),
            *(row.every_weight.data_ptr(), row.least, left, known, carried, row.sums.data_ptr()),
            torch.get_num_threads(),
        )

    def leave(self, row: Row, place: tuple[int, int], leaving: tuple[int, int], reached: int) -> tuple[Tensor, bool]:
        """Weighted means, float32 [K, planes, rows, X], of the first planes and rows, and whether all are finite.

        place    where the row begins in the volume, (z, y)
        leaving  how many planes and rows
        reached  planes of the layer before that are added; those of the row that do not leave take their place
        """
        outputs, depth, height, _, width = row.edges
        (z, y), (planes, rows), (shared, length) = place, leaving, row.layer.shape[1:3]
        if not 0 < planes <= depth or not 0 < rows <= height or not 0 <= y <= length - rows:
            raise ValueError(f"{planes} planes and {rows} rows cannot leave a row {list(row.sums.shape)} at {y}")
        if not max(reached, depth - planes) <= shared:
            raise ValueError(f"{depth - planes} planes are kept and {reached} added in a layer of {shared}")
        threads = torch.get_num_threads()
        scratch, whole = torch.empty((threads, width)), torch.from_numpy(row.means.take()).view(torch.float32)
        means = whole[: outputs * planes * rows * width].view(outputs, planes, rows, width)
        failed = self._functions.stackseg_leave(
            *(row.sums.data_ptr(), row.shape, row.every_weight.data_ptr(), row.least, row.every_start, row.counts),
            *(z, y, planes, rows, reached, row.layer.data_ptr(), shared, length),
            *(scratch.data_ptr(), means.data_ptr(), threads),
        )
        return means, not failed

    def tells(self, scores: Tensor) -> bool:
        """Whether it can tell if these are finite: float32 or bfloat16 [B, K, z, y, x] without gaps, on the CPU."""
        dense = scores.is_contiguous() or scores.is_contiguous(memory_format=torch.channels_last_3d)
        return dense and self.suits(scores.device) and scores.dtype in FLOATS

    def finite(self, scores: Tensor) -> bool:
        """Whether all scores are, of a tensor that `tells` allows."""
        if not self.tells(scores):
            raise ValueError(f"{scores.dtype} {list(scores.shape)} cannot be looked through")
        # What takes some 30 us is done before another thread would have given the interpreter's lock back.
        functions = self._quick if scores.nbytes <= BRIEF else self._functions
        return bool(functions.stackseg_finite(scores.data_ptr(), scores.dtype == torch.bfloat16, scores.numel()))


stitching = Stitching()
"""The one of this process; what runs windows on a CPU prepares it when it starts."""


@lru_cache(maxsize=256)
def _integers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """As the kernel takes them, which only reads them: of one window they are hardly ever others than of the last."""
    return (ctypes.c_int64 * len(values))(*values)
