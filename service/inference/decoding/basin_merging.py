"""Merge watershed basins across shallow passes, so that an object with two similar maxima stays one object.

A pass is the highest point on the border between two basins, that is, the saddle between their peaks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from service.inference.decoding.watershed import Basins
    from service.models.spec import ModelSpec
    from service.models.spec_parts import Instances

# Smallest normal float32: smaller numbers have fewer significant bits.
MIN_DEPTH = float(np.finfo(np.float32).tiny)


class Persistence(NamedTuple):
    """How far a pass must lie below the lower of two peaks for the peaks to become separate objects.

    persistence         this depth, in units of the distance
    heights_are_logits  whether heights are logits of the distance, which have the same order and save a sigmoid per
                        voxel
    """

    persistence: float
    heights_are_logits: bool

    @classmethod
    def of_model(cls, spec: ModelSpec, decoding: Instances) -> Self:
        """Return the persistence that a model specifies for its distances."""
        return cls(decoding.persistence, heights_are_logits=spec.get_activation(decoding.distance) == "sigmoid")

    @property
    def depth(self) -> float:
        """Minimum depth. It is positive, so that neighboring maxima of one plateau count as one maximum."""
        return max(self.persistence, MIN_DEPTH)

    def to_distances(self, heights: Tensor) -> Tensor:
        """Convert heights to distances, float64. Equal heights give equal distances at every position.

        `torch.sigmoid` may round differently at the end of a tensor, where vector registers are not full. This would
        turn one plateau into two peaks.
        """
        return 1 / (1 + torch.exp(-heights.double())) if self.heights_are_logits else heights.double()

    def compute_floors(self, peaks: Tensor) -> Tensor:
        """Return for each peak the minimum height of a shallow pass, rounded down. Input and output are float32 [R]."""
        floors = self.to_distances(peaks) - self.depth
        if self.heights_are_logits:
            floors = torch.logit(floors.clamp(0, 1))
        return (floors - 1e-5 * floors.abs()).float()


MergeFunction = Callable[["Basins", Persistence], NDArray[np.int64]]
"""Function that returns the object of every basin, int64 [R], numbered from 0."""


def merge_shallow_basins(basins: Basins, persistence: Persistence) -> NDArray[np.int64]:
    """Merge each basin into a higher neighbor if its peak rises above their pass by less than the persistence.

    Returns the object of every basin, int64 [R], numbered from 0. Passes are processed from the highest to the lowest,
    as in the merge tree of a height function (Edelsbrunner, Letscher and Zomorodian 2002). Passes that are too deep are
    removed first: merging only raises peaks, so these passes remain too deep.
    """
    peaks = persistence.to_distances(basins.peaks).cpu().numpy()
    first, second, height = (column.cpu().numpy() for column in find_shallow_passes(basins, persistence))
    return np.unique(join_basins(peaks, first, second, height, persistence.depth), return_inverse=True)[1]


def join_basins(
    peaks: NDArray[Any], first: NDArray[Any], second: NDArray[Any], height: NDArray[Any], depth: float
) -> NDArray[np.int64]:
    """Join pairs of basins [E] in order, if the lower peak rises above their pass by less than `depth`.

    `height` [E] contains the heights of the passes.

    Returns for each basin the number of the highest basin in its group, int64 [R]. If several basins are equally high,
    this is the first basin of the pair that joined them.
    """
    forest = MergeForest(peaks, depth)
    forest.join(first, second, height)
    return forest.find_highest_basins()


class MergeForest:
    """Groups of basins, which are joined incrementally by the rule of `join_basins`.

    The arrays use 16 bytes per basin; Python lists would use 70 bytes.
    """

    def __init__(self, peaks: NDArray[Any], depth: float) -> None:
        self._parent, self._peaks, self._depth = (
            array("q", range(len(peaks))),
            array("d", peaks.astype(np.float64).tobytes()),
            depth,
        )

    def join(self, first: NDArray[Any], second: NDArray[Any], height: NDArray[Any]) -> None:
        """Join further pairs [E], whose passes are not higher than those of earlier calls."""
        parent, peaks, depth = self._parent, self._peaks, self._depth

        def find_root(basin: int) -> int:
            while parent[basin] != basin:
                parent[basin] = parent[parent[basin]]
                basin = parent[basin]
            return basin

        for basin_a, basin_b, saddle in zip(first.tolist(), second.tolist(), height.tolist(), strict=True):
            high_root, low_root = find_root(basin_a), find_root(basin_b)
            if peaks[high_root] < peaks[low_root]:
                high_root, low_root = low_root, high_root
            if high_root != low_root and peaks[low_root] - saddle < depth:
                parent[low_root] = high_root

    def find_highest_basins(self) -> NDArray[np.int64]:
        """Return for each basin the number of the highest basin in its group, int64 [R]."""
        roots = np.array(self._parent, np.int64)
        while not np.array_equal(next_roots := roots[roots], roots):
            roots = next_roots
        return roots


class ShallowPasses(NamedTuple):
    """Passes that are shallow relative to the lower of the two peaks, from the highest to the lowest.

    The arrays are on the device of the basins.

    first, second  pair of basins, int64 [E] each, with the lower number first; pairs are unique
    height         distance at the highest pass of the pair, float64 [E]
    """

    first: Tensor
    second: Tensor
    height: Tensor


def find_shallow_passes(basins: Basins, persistence: Persistence) -> ShallowPasses:
    """Return the shallow passes between basins."""
    basins_a, basins_b, heights = basins.passes
    height, peaks = persistence.to_distances(heights), persistence.to_distances(basins.peaks)
    first, second = torch.minimum(basins_a, basins_b), torch.maximum(basins_a, basins_b)
    is_shallow = (first != second) & (torch.minimum(peaks[first], peaks[second]) - height < persistence.depth)
    # Indexing with a mask would convert the mask to indices each time, and the host would wait for each conversion.
    rows = is_shallow.nonzero().squeeze(1)
    pairs, inverse = torch.unique((first * len(peaks) + second)[rows], return_inverse=True)
    pass_heights = height.new_full((len(pairs),), -torch.inf).scatter_reduce_(0, inverse, height[rows], "amax")
    pass_heights, order = torch.sort(pass_heights, descending=True, stable=True)
    pairs, num_basins = pairs[order], max(len(peaks), 1)
    return ShallowPasses(pairs // num_basins, pairs % num_basins, pass_heights)
