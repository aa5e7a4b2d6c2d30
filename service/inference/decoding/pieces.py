"""Pieces of watershed basins: pieces of all parts of a volume are joined to basins, and basins are merged to objects.

A path that leaves its part of the volume ends there, and continues in a piece of another part. A pass is the highest
point on the border between two pieces, that is, the saddle between their peaks. Basins are merged across shallow
passes, so that an object with two similar maxima stays one object.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.native.library import CppFunctions
from service.core.types import Objects

if TYPE_CHECKING:
    from service.models.spec import ModelSpec
    from service.models.spec_parts import Instances

# The last five bits of a key contain the position of the voxel modulo 3 along each axis, to identify neighbors.
POSITION_BITS = 0b11111
# Fixed-point representation of a foreground probability of 1. Integer sums do not depend on the order of the terms.
PROBABILITY_ONE = 65536
# Fixed-point foreground probability of each code. The codes are logits in steps of 1/16 from -8 to 8.
PROBABILITIES = np.rint(PROBABILITY_ONE / (1 + np.exp((128 - np.arange(256)) / 16))).astype(np.int32)
# Smallest normal float32: smaller numbers have fewer significant bits.
MIN_DEPTH = float(np.finfo(np.float32).tiny)


def logit(probability: float) -> float:
    """Return the logarithm of the odds of a probability."""
    return math.log(probability / (1 - probability))


def compute_keys(heights: Tensor) -> Tensor:
    """Map float32 heights to int32 keys of the same order. The position bits are zero."""
    bits = heights.view(torch.int32)
    # Modify in place, because each additional array of a large volume would exceed the cache.
    keys = bits >> 31
    keys &= 0x7FFFFFFF
    keys ^= bits
    keys &= ~POSITION_BITS
    return keys


def compute_heights(keys: Tensor) -> Tensor:
    """Invert `compute_keys`, except for the dropped bits."""
    ordered = keys & ~POSITION_BITS
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


class WatershedParameters(NamedTuple):
    """Parameters that define objects.

    threshold           foreground logit above which a voxel is foreground
    persistence         how far a pass must lie below the lower of two peaks for the peaks to become separate objects,
                        in units of the distance
    heights_are_logits  whether heights are logits of the distance, which have the same order and save a sigmoid per
                        voxel
    """

    threshold: float
    persistence: float
    heights_are_logits: bool

    @classmethod
    def of_model(cls, spec: ModelSpec, decoding: Instances) -> Self:
        """Return the parameters that a model specifies."""
        heights_are_logits = spec.get_activation(decoding.distance) == "sigmoid"
        return cls(logit(decoding.threshold), decoding.persistence, heights_are_logits)

    @property
    def depth(self) -> float:
        """Minimum depth. It is positive, so that neighboring maxima of one plateau count as one maximum."""
        return max(self.persistence, MIN_DEPTH)

    def get_distances(self, keys: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the distances that belong to keys. Equal keys give equal distances at every position."""
        ordered = keys.astype(np.int32) & ~POSITION_BITS
        heights = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(np.float32).astype(np.float64)
        if not self.heights_are_logits:
            return heights
        # NumPy uses no threads. Threads of PyTorch would wait for each other if other requests use the cores.
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-heights))

    def compute_floors(self, peaks: Tensor) -> Tensor:
        """Return for each peak the minimum height of a shallow pass, rounded down. Input and output are float32 [R]."""
        floors = peaks.double()
        if self.heights_are_logits:
            floors = torch.logit((torch.sigmoid(floors) - self.depth).clamp(0, 1))
        else:
            floors -= self.depth
        return (floors - 1e-5 * floors.abs()).float()


Distances = NDArray[np.float64]


class Pieces(NamedTuple):
    """Pieces of a part of a volume, numbered from 0.

    position  flat index in the volume of the voxel at which the ascending paths of a piece end, int64 [P]
    key       key of this voxel, int32 [P]; see `compute_keys`
    sums      sums over the voxels of each piece, int64 [S, P]: their number, their foreground probabilities times
              `PROBABILITY_ONE`, a number that is positive if the piece touches a face of the volume, and other values
    passes    pairs of pieces that touch near their peaks, and the key of their highest pass, integers [3, E]. Pairs may
              occur several times, and their pieces may belong to the same basin
    """

    position: NDArray[np.int64]
    key: NDArray[np.int32]
    sums: NDArray[np.int64]
    passes: NDArray[np.integer]

    @classmethod
    def concatenate(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return the pieces of several parts of a volume, which get consecutive numbers."""
        offsets = itertools.accumulate((len(part.key) for part in parts), initial=0)
        parts = [
            part._replace(passes=part.passes + np.array([[offset], [offset], [0]]))
            for part, offset in zip(parts, offsets, strict=False)
        ]
        return cls(*(np.concatenate(columns, -1) for columns in zip(NO_PIECES, *parts, strict=True)))

    @property
    def touches_face(self) -> NDArray[np.bool_]:
        """Whether each piece touches a face of the volume, [P]."""
        result: NDArray[np.bool_] = self.sums[2] > 0
        return result


NO_PIECES = Pieces(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros((4, 0), np.int64), np.zeros((3, 0), np.int64))


def join_pieces(
    pieces: Pieces, link: NDArray[np.integer], parameters: WatershedParameters
) -> tuple[Pieces, NDArray[np.integer]]:
    """Join the pieces whose paths lead to the same end.

    link  the piece in which the paths of each piece continue; a piece is linked to itself if they end there

    Returns the joined pieces in the order of their positions, and the joined piece of each piece. Passes that are too
    deep to merge two pieces are removed. This is possible before all pieces are known, because the peak of a basin is
    at least as high as the voxel where a path leaves a part of the volume.
    """
    while not np.array_equal(next_link := link[link], link):
        link = next_link
    ends = np.flatnonzero(link == np.arange(len(link)))
    ends = ends[pieces.position[ends].argsort()]
    number = np.empty_like(link)
    number[ends] = np.arange(len(ends))
    number = number[link]
    del link, next_link  # the passes of a large volume need most of the memory
    passes = _select_shallow_passes(number[pieces.passes[:2]], pieces.passes[2], pieces.key[ends], parameters)
    sums = np.zeros((len(pieces.sums), len(ends)), np.int64)
    for total, values in zip(sums, pieces.sums, strict=True):
        np.add.at(total, number, values)
    return Pieces(pieces.position[ends], pieces.key[ends], sums, passes), number


def _select_shallow_passes(
    pairs: NDArray[np.integer], keys: NDArray[np.integer], peak_keys: NDArray[np.int32], parameters: WatershedParameters
) -> NDArray[np.integer]:
    """Return the passes that may merge the two pieces of a pair, with the lower number first, as in `Pieces`."""
    first, second, peaks = pairs.min(0), pairs.max(0), parameters.get_distances(peak_keys)
    first, second, keys = (column[first != second] for column in (first, second, keys))
    is_shallow = np.minimum(peaks[first], peaks[second]) - parameters.get_distances(keys) < parameters.depth
    return np.stack((first[is_shallow], second[is_shallow], keys[is_shallow]))


def find_objects(
    pieces: Pieces, link: NDArray[np.integer], parameters: WatershedParameters
) -> tuple[Pieces, NDArray[np.integer]]:
    """Return the objects of a volume, in the order of their highest basins, and the object of each piece.

    link  as in `join_pieces`
    """
    basins, basin_of_piece = join_pieces(pieces, link, parameters)
    objects, object_of_basin = join_pieces(basins, merge_basins(basins, parameters), parameters)
    return objects, object_of_basin[basin_of_piece]


def describe_objects(objects: Pieces, parameters: WatershedParameters) -> Objects:
    """Return the statistics of objects."""
    return Objects.from_sums(objects.sums[0], objects.sums[1] / PROBABILITY_ONE, parameters.get_distances(objects.key))


def merge_basins(basins: Pieces, parameters: WatershedParameters) -> NDArray[np.int64]:
    """Merge each basin into a higher neighbor if its peak rises above their pass by less than the persistence.

    Returns a link of each basin to a basin that is at least as high, or to itself, int64 [R]. Passes are processed from
    the highest to the lowest, as in the merge tree of a height function (Edelsbrunner, Letscher and Zomorodian 2002).
    Passes of equal height are sorted by their basins. If two basins are equally high, the second is merged into the
    first.

    basins  result of `join_pieces`, which removes passes that are too deep: merging only raises peaks
    """
    peaks, heights = parameters.get_distances(basins.key), parameters.get_distances(basins.passes[2])
    first, second = basins.passes[:2].astype(np.int64)
    order = np.lexsort((second, first, -heights))
    link = np.arange(len(peaks))
    merge = merge_kernel.merge if merge_kernel.is_available else merge_in_python
    merge(peaks, np.stack((first[order], second[order])), heights[order], parameters.depth, link)
    return link


class MergeKernel(CppFunctions):
    """Python interface to the C++ function that merges basins."""

    def merge(
        self, peaks: Distances, pairs: NDArray[np.int64], heights: Distances, depth: float, link: NDArray[np.int64]
    ) -> None:
        """Merge basins as `merge_in_python` does."""
        addresses = (column.ctypes.data for column in (peaks, pairs, heights))
        self._functions.stackseg_merge(*addresses, len(heights), depth, link.ctypes.data)


merge_kernel = MergeKernel((("stackseg_merge", "pppqdp", "-"),))
"""The C++ function of this process that merges basins."""


def merge_in_python(
    peaks: Distances, pairs: NDArray[np.int64], heights: Distances, depth: float, link: NDArray[np.int64]
) -> None:
    """Merge the basins of each pass in order, if the lower peak rises above the pass by less than `depth`.

    peaks    distance at the peak of each basin, [R]
    pairs    basins of each pass [2, E], from the highest pass to the lowest
    heights  distance at each pass, [E]
    link     link of each basin [R] to a basin that is at least as high, or to itself; updated in place
    """

    def find_root(basin: int) -> int:
        while link[basin] != basin:
            link[basin] = link[link[basin]]
            basin = link[basin]
        return basin

    for first, second, height in zip(*pairs.tolist(), heights.tolist(), strict=True):
        high, low = find_root(first), find_root(second)
        if peaks[high] < peaks[low]:
            high, low = low, high
        if high != low and peaks[low] - height < depth:
            link[low] = high


def list_faces(shape: Sequence[int], origin: Sequence[int], size: Sequence[int]) -> Iterator[tuple[slice | int, ...]]:
    """Yield the index of each face of a volume of `size` in a part of `shape` that begins at voxel `origin`.

    Axes of length 1 have no faces.
    """
    for axis, (first, part_length, length) in enumerate(zip(origin, shape, size, strict=True)):
        for side, is_face in ((0, first == 0), (-1, first + part_length == length)):
            if is_face and length > 1:
                yield (*[slice(None)] * axis, side)
