"""Merging of basins across shallow passes: an object with two maxima stays one where the lower one hardly rises."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.inference.decoding.watershed import Basins

# Pairs that are Python's numbers at a time, which take much more memory.
PAIRS = 2**16

# The least float32 that is as precise as others.
MIN_DEPTH = float(np.finfo(np.float32).tiny)


class Persistence(NamedTuple):
    """Depth below a peak at which a pass separates two objects: the persistence of the lower peak.

    persistence  in units of the distance
    logits       whether heights are logits of the distance, which have the same order and save a sigmoid per voxel
    """

    persistence: float
    logits: bool

    @property
    def depth(self) -> float:
        """Least depth, above 0 so that neighbouring maxima of one plateau are one maximum."""
        return max(self.persistence, MIN_DEPTH)

    def distance(self, heights: Tensor) -> Tensor:
        """Convert heights to distances, float64; equal heights give equal distances wherever they lie.

        `torch.sigmoid` may round differently where a tensor ends within a vector register, which would turn one plateau
        into two peaks.
        """
        return 1 / (1 + torch.exp(-heights.double())) if self.logits else heights.double()

    def floor(self, peaks: Tensor) -> Tensor:
        """Return the height from which on a pass is shallow to each peak, or a little less; float32 [R] in and out."""
        lowest = self.distance(peaks) - self.depth
        if self.logits:
            lowest = torch.logit(lowest.clamp(0, 1))
        return (lowest - 1e-5 * lowest.abs()).float()


def merge_shallow_basins(basins: Basins, persistence: Persistence) -> NDArray[np.int64]:
    """Merge a basin into its higher neighbour where its peak rises less than the persistence above their pass.

    Returns the object of every basin, int64 [R], from 0. Passes are taken from the highest down, as in the merge tree
    of a height function (Edelsbrunner, Letscher and Zomorodian 2002). A pass that is deep enough at first stays so,
    because merging only raises peaks, and is therefore left out beforehand.
    """
    return merge_across(find_shallow_passes(basins, persistence), basins.peaks, persistence)


def merge_across(passes: ShallowPasses, heights: Tensor, persistence: Persistence) -> NDArray[np.int64]:
    """Do what `merge_shallow_basins` does, by the shallow passes and the heights of the peaks, float32 [R]."""
    peaks = persistence.distance(heights).cpu().numpy()
    first, second, height = (column.cpu().numpy() for column in passes)
    return np.unique(join_basins(peaks, first, second, height, persistence.depth), return_inverse=True)[1]


def join_basins(
    peaks: NDArray[Any], first: NDArray[Any], second: NDArray[Any], height: NDArray[Any], depth: float
) -> NDArray[np.int64]:
    """Join pairs of basins [E] in their order, where the lower peak rises less than `depth` above their `height` [E].

    Returns the number of the highest basin of each one's group, int64 [R]; of several as high as each other that of the
    first side of the pair that brought them together.
    """
    # Most basins have no such pair.
    involved, pairs = np.unique(np.concatenate((first, second)), return_inverse=True)
    first, second, tops = pairs[: len(first)], pairs[len(first) :], peaks[involved].tolist()
    parent = list(range(len(tops)))

    def root(basin: int) -> int:
        while parent[basin] != basin:
            parent[basin] = parent[parent[basin]]
            basin = parent[basin]
        return basin

    for start in range(0, len(height), PAIRS):
        part = slice(start, start + PAIRS)
        for one, other, saddle in zip(first[part].tolist(), second[part].tolist(), height[part].tolist(), strict=True):
            high, low = root(one), root(other)
            if tops[high] < tops[low]:
                high, low = low, high
            if high != low and tops[low] - saddle < depth:
                parent[low] = high
    highest = np.arange(len(peaks))
    highest[involved] = involved[[root(basin) for basin in range(len(tops))]]
    return highest


class ShallowPasses(NamedTuple):
    """Passes that are shallow to the lower of two peaks, the highest first, on the device of the basins.

    first, second  pair of basins, int64 [E] each, the lower number first; every pair occurs once
    height         distance at their highest pass, float64 [E]
    """

    first: Tensor
    second: Tensor
    height: Tensor


def find_shallow_passes(basins: Basins, persistence: Persistence) -> ShallowPasses:
    """Return the shallow passes between basins."""
    one, other, heights = basins.passes
    height, peaks = persistence.distance(heights), persistence.distance(basins.peaks)
    first, second = torch.minimum(one, other), torch.maximum(one, other)
    shallow = (first != second) & (torch.minimum(peaks[first], peaks[second]) - height < persistence.depth)
    return keep_highest(ShallowPasses(first[shallow], second[shallow], height[shallow]), len(peaks))


def keep_highest(passes: ShallowPasses, basins: int) -> ShallowPasses:
    """Return the highest of the passes of each pair of so many basins, the highest first."""
    first, second, height = passes
    pairs, inverse = torch.unique(first * basins + second, return_inverse=True)
    highest = height.new_full((len(pairs),), -torch.inf).scatter_reduce_(0, inverse, height, "amax")
    highest, order = torch.sort(highest, descending=True, stable=True)
    pairs, count = pairs[order], max(basins, 1)
    return ShallowPasses(pairs // count, pairs % count, highest)
