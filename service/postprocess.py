"""Scores -> labels: classes by the highest score, instances by ascent to the maxima of a distance map.

A decoder takes finished z-slabs and keeps of each only what it needs, so that the scores
of a volume never exist at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.repository import Instances, ModelSpec
from service.volume import OutputKind, Segmentation, VoxelSize, label_dtype

Size = tuple[int, int, int]

# One of each pair of opposite neighbours, as steps along (z, y, x).
HALF_NEIGHBOURHOOD = tuple(
    (z, y, x) for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1) if (z, y, x) > (0, 0, 0)
)


# Planes that are looked at together: their integers stay in the processor's cache.
PLANES = 4


class Decoder(Protocol):
    """Takes slabs of raw scores and then gives the segmentation."""

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        """Raw scores float32 [1, K, z, y, X] of the planes from `z0` and the rows from `y0` on, on any device.

        Slabs come without gaps: all rows of some planes in order, then those of the next planes.
        """

    def finish(self) -> Segmentation:
        """The segmentation [Z, Y, X] or [K, Z, Y, X], once every plane was added."""


def make_decoder(spec: ModelSpec, size: Size, output: OutputKind, voxel_size: VoxelSize | None) -> Decoder:
    """The decoder for what the caller wants of this model; `size` is (Z, Y, X)."""
    if output == "probabilities":
        return ProbabilityDecoder(spec, size, voxel_size)
    if isinstance(spec.decoding, Instances):
        if output == "classes":
            return ForegroundDecoder(spec, spec.decoding, size, voxel_size)
        return InstanceDecoder(spec, spec.decoding, size, voxel_size)
    return ClassDecoder(spec, size, voxel_size)


def bytes_per_voxel(spec: ModelSpec, output: OutputKind) -> int:
    """Peak memory of decoding and of its result, per voxel; instances with half of the voxels in the foreground."""
    if output == "probabilities":
        return 4 * len(spec.outputs)
    return 40 if output == "labels" else 1


def place(pixels: NDArray[Any], z0: int, y0: int, slab: NDArray[Any]) -> None:
    """Put `slab`, [..., z, y, X], into `pixels`, [..., Z, Y, X]."""
    planes, rows = slab.shape[-3:-1]
    pixels[..., z0 : z0 + planes, y0 : y0 + rows, :] = slab


class ProbabilityDecoder:
    """All outputs after the model's activation, float32 [K, Z, Y, X]."""

    def __init__(self, spec: ModelSpec, size: Size, voxel_size: VoxelSize | None) -> None:
        self._spec, self._voxel_size = spec, voxel_size
        self._pixels = np.empty((len(spec.outputs), *size), np.float32)

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        match self._spec.activation:
            case "sigmoid":
                scores = torch.sigmoid(scores)
            case "softmax":
                scores = torch.softmax(scores, dim=1)
            case "none":
                pass
        place(self._pixels, z0, y0, scores[0].cpu().numpy())

    def finish(self) -> Segmentation:
        return Segmentation(self._pixels, "probabilities", self._voxel_size, names=self._spec.outputs)


class ClassDecoder:
    """The index of the output with the highest score, uint8 [Z, Y, X] (uint16 beyond 256 classes)."""

    def __init__(self, spec: ModelSpec, size: Size, voxel_size: VoxelSize | None) -> None:
        self._spec, self._voxel_size = spec, voxel_size
        self._pixels = np.empty(size, np.uint8 if len(spec.outputs) <= 256 else np.uint16)

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        place(self._pixels, z0, y0, scores[0].argmax(0).cpu().numpy())

    def finish(self) -> Segmentation:
        return Segmentation(self._pixels, "classes", self._voxel_size, names=self._spec.outputs)


class ForegroundDecoder:
    """Background and foreground of a model of instances, uint8 [Z, Y, X] of 0 and 1."""

    def __init__(self, spec: ModelSpec, decoding: Instances, size: Size, voxel_size: VoxelSize | None) -> None:
        self._voxel_size = voxel_size
        self._channel = spec.outputs.index(decoding.foreground)
        self._name = decoding.foreground
        self._threshold = _logit(decoding.threshold)
        self._pixels = np.empty(size, np.uint8)

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        place(self._pixels, z0, y0, (scores[0, self._channel] > self._threshold).cpu().numpy())

    def finish(self) -> Segmentation:
        return Segmentation(self._pixels, "classes", self._voxel_size, names=("background", self._name))


class InstanceDecoder:
    """Objects, numbered from 1 in the order of their peaks; see `ascend` and `merge_shallow`.

    Keeps one float32 per voxel: the distance in the foreground, minus infinity elsewhere.
    """

    def __init__(self, spec: ModelSpec, decoding: Instances, size: Size, voxel_size: VoxelSize | None) -> None:
        self._decoding, self._voxel_size = decoding, voxel_size
        self._foreground = spec.outputs.index(decoding.foreground)
        self._distance = spec.outputs.index(decoding.distance)
        self._threshold = _logit(decoding.threshold)
        self._squash = spec.activation == "sigmoid"
        # A rim of background on every side: neighbours of a voxel are then at fixed distances in memory.
        self._landscape: Tensor | None = None
        self._size = size

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        if self._landscape is None:
            padded = [edge + 2 for edge in self._size]
            self._landscape = torch.full(padded, -math.inf, device=scores.device)
        planes, rows = scores.shape[2:4]
        inside = scores[0, self._foreground] > self._threshold
        target = self._landscape[1 + z0 : 1 + z0 + planes, 1 + y0 : 1 + y0 + rows, 1:-1]
        distance = scores[0, self._distance]
        target.copy_(distance.masked_fill(~inside, -math.inf))

    def finish(self) -> Segmentation:
        if self._landscape is None:
            return Segmentation(np.zeros(self._size, label_dtype(0)), "labels", self._voxel_size, count=0)
        if self._squash:
            # At once, not slab by slab: the last bit of a vectorised sigmoid depends on where a row of memory begins.
            background = self._landscape == -math.inf
            self._landscape.sigmoid_().masked_fill_(background, -math.inf)
        labels, count = decode_instances(self._landscape, self._decoding.persistence, self._decoding.minimum_size)
        return Segmentation(labels, "labels", self._voxel_size, count=count)


class Basins(NamedTuple):
    """Voxels of the foreground and the maxima that they ascend to.

    places   int64 [N]: flat indices of the foreground in the padded landscape, ascending
    basin    int64 [N]: number of the basin of each
    peaks    float32 [R]: height of each basin's maximum
    """

    places: Tensor
    basin: Tensor
    peaks: Tensor


def decode_instances(
    landscape: Tensor, persistence: float, minimum_size: int
) -> tuple[NDArray[np.unsignedinteger], int]:
    """Objects of a padded landscape, float32 [Z + 2, Y + 2, X + 2] with -inf as background.

    Returns labels [Z, Y, X], uint16 or uint32 as their number demands, and the number of objects.
    """
    size = tuple(edge - 2 for edge in landscape.shape)
    basins, numbers = ascend(landscape)
    if len(basins.places) == 0:
        return np.zeros(size, label_dtype(0)), 0
    group = merge_shallow(basins, saddles(basins, landscape, numbers), persistence)
    objects = torch.from_numpy(group).to(landscape.device)[basins.basin]
    kept = torch.bincount(objects, minlength=int(group.max()) + 1) >= max(minimum_size, 1)
    renumbered = torch.where(kept, kept.cumsum(0), 0)
    count = int(renumbered.max())
    labels = numbers.fill_(0).view(-1)
    labels[basins.places] = renumbered[objects].to(labels.dtype)
    inner = labels.view(landscape.shape)[1:-1, 1:-1, 1:-1]
    return inner.cpu().numpy().astype(label_dtype(count)), count


def ascend(landscape: Tensor) -> tuple[Basins, Tensor]:
    """Follow the steepest of the 26 neighbours uphill, for all voxels at once.

    Pointer jumping (Wyllie 1979): each step doubles the length of the paths that are already known. Of equal
    heights the later voxel counts as higher, so plateaus drain too and the result does not depend on chance.
    Also returns an int32 tensor of the landscape's shape: the position in `places` of every voxel of the foreground.
    """
    flat = landscape.view(-1)
    places, target = _steepest(landscape)
    numbers = torch.zeros(landscape.shape, dtype=torch.int32, device=landscape.device)
    numbers.view(-1)[places] = torch.arange(len(places), dtype=torch.int32, device=landscape.device)
    parent = numbers.view(-1)[target].long()
    while not torch.equal(grandparent := parent[parent], parent):
        parent = grandparent
    own = torch.arange(len(places), device=parent.device)
    summits = (parent == own).nonzero().squeeze(1)
    basin_of_summit = torch.zeros_like(own)
    basin_of_summit[summits] = torch.arange(len(summits), device=parent.device)
    return Basins(places, basin_of_summit[parent], flat[places[summits]]), numbers


def saddles(basins: Basins, landscape: Tensor, numbers: Tensor) -> NDArray[np.float64]:
    """Passes between touching basins, float64 [E, 3] of (basin, basin, height), every pair once, highest pass first.

    `numbers`, int32 of the landscape's shape, is overwritten with the basin of every voxel, from 1.
    """
    flat, basin = landscape.view(-1), numbers.fill_(0).view(-1)
    basin[basins.places] = basins.basin.to(torch.int32) + 1
    borders = _borders(numbers)
    count = len(basins.peaks) + 1
    keys, heights = [], []
    for offset in _offsets(landscape):
        here, there = basin[borders].long(), basin[borders + offset].long()
        crossing = ((here != there) & (there > 0)).nonzero().squeeze(1)
        here, there, places = here[crossing], there[crossing], borders[crossing]
        keys.append(torch.minimum(here, there) * count + torch.maximum(here, there))
        heights.append(torch.minimum(flat[places], flat[places + offset]))
    pairs, inverse = torch.unique(torch.cat(keys), return_inverse=True)
    highest = torch.full((len(pairs),), -math.inf, device=flat.device)
    highest.scatter_reduce_(0, inverse, torch.cat(heights), "amax")
    edges = torch.stack((pairs // count - 1, pairs % count - 1, highest.double()), dim=1).cpu().numpy()
    return edges[np.argsort(-edges[:, 2], kind="stable")]


def merge_shallow(basins: Basins, passes: NDArray[np.float64], persistence: float) -> NDArray[np.int64]:
    """Join a basin to its higher neighbour where its peak rises less than `persistence` above the pass between them.

    Returns the object of every basin, int64 [R], from 0. Passes are taken from the highest down, as in the merge tree
    of a height function (Edelsbrunner, Letscher and Zomorodian 2002). A pass that is deep enough at first stays so,
    because merging only raises peaks, and is therefore left out beforehand.
    """
    peaks = basins.peaks.cpu().numpy().astype(np.float64)
    # Neighbouring maxima of one plateau are one maximum, even without any persistence.
    depth = max(persistence, float(np.finfo(np.float32).tiny))
    first, second = passes[:, 0].astype(np.int64), passes[:, 1].astype(np.int64)
    shallow = np.flatnonzero(np.minimum(peaks[first], peaks[second]) - passes[:, 2] < depth)
    parent = list(range(len(peaks)))

    def root(basin: int) -> int:
        while parent[basin] != basin:
            parent[basin] = parent[parent[basin]]
            basin = parent[basin]
        return basin

    for edge in shallow:
        high, low = root(int(first[edge])), root(int(second[edge]))
        if peaks[high] < peaks[low]:
            high, low = low, high
        if high != low and peaks[low] - passes[edge, 2] < depth:
            parent[low] = high
    roots = np.array([root(basin) for basin in range(len(peaks))], np.int64)
    return np.unique(roots, return_inverse=True)[1]


def _steepest(landscape: Tensor) -> tuple[Tensor, Tensor]:
    """Flat indices of the foreground, and of the highest voxel in the 3x3x3 neighbourhood of each (or itself).

    Height and index share one integer, the height's bits above the index's: the highest neighbour then is a maximum
    filter, which separates into three passes along the axes.
    """
    depth, height, width = landscape.shape
    places, targets = [], []
    index = torch.arange(height * width, device=landscape.device).view(1, height, width)
    for low in range(1, depth - 1, PLANES):
        high = min(low + PLANES, depth - 1)
        block = landscape[low - 1 : high + 1]
        bits = block.view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        planes = torch.arange(low - 1, high + 1, device=landscape.device).view(-1, 1, 1)
        key = (ordered.long() << 32) + planes * (height * width) + index
        inside = (block[1:-1, 1:-1, 1:-1] > -math.inf).nonzero(as_tuple=True)
        targets.append(_filter(key, torch.maximum)[inside] & 0xFFFFFFFF)
        z, y, x = inside
        places.append(((z + low) * height + y + 1) * width + x + 1)
    return torch.cat(places), torch.cat(targets)


def _borders(basin: Tensor) -> Tensor:
    """Flat indices of the voxels of basins (from 1; 0 is background) that touch another basin; int32 [Z, Y, X] in."""
    depth, height, width = basin.shape
    found = []
    for low in range(1, depth - 1, PLANES):
        high = min(low + PLANES, depth - 1)
        block = basin[low - 1 : high + 1]
        own = block[1:-1, 1:-1, 1:-1]
        # The background must not count as a neighbour: it wraps to the largest value for the minimum.
        lowest = _filter(torch.where(block == 0, torch.iinfo(torch.int32).max, block), torch.minimum)
        z, y, x = ((own > 0) & (_filter(block, torch.maximum) != lowest)).nonzero(as_tuple=True)
        found.append(((z + low) * height + y + 1) * width + x + 1)
    return torch.cat(found)


def _filter(block: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The extreme of every 3x3x3 neighbourhood: [z, y, x] -> [z - 2, y - 2, x - 2]."""
    block = choose(choose(block[:-2], block[1:-1]), block[2:])
    block = choose(choose(block[:, :-2], block[:, 1:-1]), block[:, 2:])
    return choose(choose(block[:, :, :-2], block[:, :, 1:-1]), block[:, :, 2:])


def _offsets(landscape: Tensor) -> list[int]:
    """Distance in memory to one of each pair of opposite neighbours."""
    _, height, width = landscape.shape
    return [(z * height + y) * width + x for z, y, x in HALF_NEIGHBOURHOOD]


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
