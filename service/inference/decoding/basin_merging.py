"""Merging of basins across shallow passes: an object with two maxima stays one where the lower one hardly rises."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from service.inference.decoding.watershed import Basins

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
    peaks = persistence.distance(basins.peaks).cpu().numpy()
    first, second, height = (column.cpu().numpy() for column in find_shallow_passes(basins, persistence))
    return np.unique(join_basins(peaks, first, second, height, persistence.depth), return_inverse=True)[1]


def join_basins(
    peaks: NDArray[Any], first: NDArray[Any], second: NDArray[Any], height: NDArray[Any], depth: float
) -> NDArray[np.int64]:
    """Join pairs of basins [E] in their order, where the lower peak rises less than `depth` above their `height` [E].

    Returns the number of the highest basin of each one's group, int64 [R]; of several as high as each other that of the
    first side of the pair that brought them together.
    """
    forest = MergeForest(peaks, depth)
    forest.join(first, second, height)
    return forest.highest()


class MergeForest:
    """Groups of basins that `join_basins` joins, by some pairs after the other.

    It takes 16 bytes for each basin, and Python's lists would take 70.
    """

    def __init__(self, peaks: NDArray[Any], depth: float) -> None:
        self._parent, self._peaks, self._depth = (
            array("q", range(len(peaks))),
            array("d", peaks.astype(np.float64).tobytes()),
            depth,
        )

    def join(self, first: NDArray[Any], second: NDArray[Any], height: NDArray[Any]) -> None:
        """Join further pairs [E], which are not higher than those before."""
        parent, peaks, depth = self._parent, self._peaks, self._depth

        def root(basin: int) -> int:
            while parent[basin] != basin:
                parent[basin] = parent[parent[basin]]
                basin = parent[basin]
            return basin

        for one, other, saddle in zip(first.tolist(), second.tolist(), height.tolist(), strict=True):
            high, low = root(one), root(other)
            if peaks[high] < peaks[low]:
                high, low = low, high
            if high != low and peaks[low] - saddle < depth:
                parent[low] = high

    def highest(self) -> NDArray[np.int64]:
        """Return the number of the highest basin of each one's group, int64 [R]."""
        found = np.array(self._parent, np.int64)
        while not np.array_equal(further := found[found], found):
            found = further
        return found


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
    # Indexing with a mask would convert it to indices each time, and the host waits for each conversion.
    rows = shallow.nonzero().squeeze(1)
    pairs, inverse = torch.unique((first * len(peaks) + second)[rows], return_inverse=True)
    highest = height.new_full((len(pairs),), -torch.inf).scatter_reduce_(0, inverse, height[rows], "amax")
    highest, order = torch.sort(highest, descending=True, stable=True)
    pairs, count = pairs[order], max(len(peaks), 1)
    return ShallowPasses(pairs // count, pairs % count, highest)
