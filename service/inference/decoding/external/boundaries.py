"""Decoder of boundary probabilities: a watershed to supervoxels, which are then merged to objects, as in PlantSeg.

The supervoxels are the basins of the boundary probability around the maxima of the distance to the nearest boundary.
They are merged by a multicut, by GASP or by a mutex watershed on their adjacency graph. If the network also predicts
affinities, those that connect two supervoxels determine whether the two are merged. The algorithms are those of the
library bioimage-cpp, which the authors of PlantSeg's algorithms maintain. It is an optional dependency
(`stackseg[boundaries]`), so this module is imported only if a model needs it.

Sources: Beier et al. 2017 (watershed, multicut), Bailoni et al. 2022 (GASP), Wolf et al. 2020 (mutex watershed), Wolny
et al. 2020 (PlantSeg).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import bioimage_cpp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.core.quantities import Size, VoxelSize
from service.core.types import Objects, Segmentation, choose_label_dtype
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries

Labels = NDArray[np.uint32]
Probabilities = NDArray[np.float32]

# Offsets from a voxel to its neighbors whose affinity is the voxel's own probability of being no boundary.
NEIGHBORS = [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
# Probabilities are limited to this range before they become the costs of a multicut, which would otherwise be infinite.
MIN_PROBABILITY, MAX_PROBABILITY = 0.001, 0.999


class Faces(NamedTuple):
    """The faces between adjacent supervoxels: the edges of a graph whose nodes are the supervoxels.

    boundary  mean boundary probability of each face, or one minus the mean affinity
    sizes     number of voxels, or of affinities, of each face
    """

    graph: Any
    boundary: NDArray[np.float64]
    sizes: NDArray[np.float64]


class BoundaryDecoder:
    """Decoder that collects the boundary probabilities and affinities of the whole volume, float32, and segments them.

    Supervoxels and their merging depend on the whole volume, so no object is final before all slabs have arrived.
    """

    def __init__(self, spec: ModelSpec, decoding: Boundaries, size: Size, voxel_size: VoxelSize | None) -> None:
        self._decoding, self._voxel_size = decoding, voxel_size
        self._channel, self._activation = spec.outputs.index(decoding.boundary), spec.get_activation(decoding.boundary)
        self._boundary: Probabilities = np.zeros(size, np.float32)
        self._affinities: Probabilities = np.zeros((len(decoding.affinities), *size), np.float32)
        self._affinity_activation = spec.get_activation(spec.outputs[-1])

    def add(self, z0: int, y0: int, scores: Tensor, /) -> None:
        """Add raw scores [1, K, z, y, X], as in `Decoder.add`. Scores on a GPU are copied to the host."""
        num_planes, num_rows = scores.shape[2:4]
        probabilities = compute_boundary_probabilities(scores[0].float(), self._channel, self._activation)
        self._boundary[z0 : z0 + num_planes, y0 : y0 + num_rows] = probabilities.cpu().numpy()
        if len(self._affinities):
            affinities = activate(scores[0, 1:].float(), self._affinity_activation)
            self._affinities[:, z0 : z0 + num_planes, y0 : y0 + num_rows] = affinities.cpu().numpy()

    def finish(self) -> Segmentation:
        """Segment the volume. The labels are numbered from 1 without gaps."""
        boundary, decoding = self._boundary, self._decoding
        labels = segment_boundaries(boundary, self._affinities, decoding)
        labels = number_labels(remove_labels(labels, decoding))
        voxel_counts = np.bincount(labels.ravel())
        sums = np.bincount(labels.ravel(), weights=1 - boundary.ravel(), minlength=1)
        objects = Objects.from_sums(voxel_counts[1:], sums[1:], _find_peaks(labels, boundary)[1:])
        count = len(objects)
        return Segmentation(
            labels.astype(choose_label_dtype(count)), "labels", self._voxel_size, count, objects=objects
        )


def compute_boundary_probabilities(scores: Tensor, channel: int, activation: str) -> Tensor:
    """Return the boundary probability [z, y, X] from raw scores [K, z, y, X]."""
    if activation == "softmax":
        return torch.softmax(scores, 0)[channel]
    return activate(scores[channel], activation)


def activate(scores: Tensor, activation: str) -> Tensor:
    """Return probabilities from raw scores. Networks that return probabilities may exceed the range by rounding."""
    return torch.sigmoid(scores) if activation == "sigmoid" else scores.clamp(0, 1)


def segment_boundaries(boundary: Probabilities, affinities: Probabilities, decoding: Boundaries) -> Labels:
    """Segment boundary probabilities [Z, Y, X] and affinities [A, Z, Y, X] into objects.

    Labels [Z, Y, X] are greater than 0 and may have gaps.
    """
    labels = supervoxels = compute_supervoxels(boundary, decoding)
    if decoding.agglomeration != "none":
        faces = measure_faces(boundary, affinities, supervoxels, decoding)
        labels = merge_supervoxels(faces, decoding)[supervoxels]
    return merge_small_segments(labels, boundary, decoding.minimum_size)


def measure_faces(
    boundary: Probabilities, affinities: Probabilities, supervoxels: Labels, decoding: Boundaries
) -> Faces:
    """Return the faces between adjacent supervoxels [Z, Y, X]."""
    graph = bioimage_cpp.graph.region_adjacency_graph(supervoxels)
    offsets = [list(offset) for offset in decoding.affinities]
    if offsets:
        features = bioimage_cpp.graph.features.affinity_features(graph, supervoxels, affinities, offsets)
        return Faces(graph, 1 - features[:, 0], features[:, 1])
    if decoding.agglomeration == "multicut":
        means, sizes = bioimage_cpp.graph.features.edge_map_features(graph, supervoxels, boundary)[:, :2].T
        return Faces(graph, means, sizes)
    inside = np.repeat((1 - boundary)[None], len(NEIGHBORS), 0)
    means, sizes = bioimage_cpp.graph.features.affinity_features(graph, supervoxels, inside, NEIGHBORS)[:, :2].T
    return Faces(graph, 1 - means, sizes)


def merge_supervoxels(faces: Faces, decoding: Boundaries) -> Labels:
    """Return the label, from 1, of each supervoxel [N]."""
    if decoding.agglomeration == "multicut":
        return merge_by_multicut(faces, decoding.beta)
    return merge_by_linkage(faces, decoding.beta, "mean" if decoding.agglomeration == "gasp" else "mutex_watershed")


def compute_supervoxels(boundary: Probabilities, decoding: Boundaries) -> Labels:
    """Return supervoxels of boundary probabilities, uint32 [Z, Y, X], numbered from 1."""
    if not decoding.watershed_stacked:
        return _flood(boundary, decoding)
    supervoxels: Labels = np.empty(boundary.shape, np.uint32)
    count = 0
    for number, plane in enumerate(boundary):
        supervoxels[number] = _flood(plane, decoding) + count
        count = int(supervoxels[number].max())
    return supervoxels


def _flood(boundary: Probabilities, decoding: Boundaries) -> Labels:
    """Return the basins of a volume or plane around the maxima of the distance to the nearest boundary."""
    is_inside = boundary <= decoding.watershed_threshold
    distances: NDArray[np.float32] = bioimage_cpp.distance.distance_transform(is_inside)
    if decoding.watershed_sigma:
        distances = _smooth(distances, decoding.watershed_sigma)
    seeds = bioimage_cpp.segmentation.label(
        find_maxima(distances).view(np.uint8), background=0, connectivity=boundary.ndim
    )
    heights = _smooth(boundary, decoding.watershed_weight_sigma) if decoding.watershed_weight_sigma else boundary
    if decoding.watershed_alpha < 1:
        depths = 1 - (distances - distances.min()) / max(distances.max(), np.finfo(np.float32).tiny)
        heights = decoding.watershed_alpha * heights + (1 - decoding.watershed_alpha) * depths
    basins = bioimage_cpp.segmentation.watershed(heights.astype(np.float32, copy=False), seeds.astype(np.uint32))
    # Without a voxel inside the boundaries, there are no maxima and no basins yet.
    return merge_small_segments(basins, heights, max(decoding.watershed_minimum_size, int(not basins.all())))


def _smooth(values: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    smoothed: NDArray[np.float32] = bioimage_cpp.filters.gaussian_smoothing(values.astype(np.float32), sigma)
    return smoothed


def find_maxima(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask of the voxels [Z, Y, X] or pixels [Y, X] that no neighbor exceeds.

    Plateaus are included, but not the lowest value, so that there is no maximum in a constant image.
    """
    is_maximum: NDArray[np.bool_] = (values == _take_neighborhood_maximum(values)) & (values > values.min())
    return is_maximum


def _take_neighborhood_maximum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the maximum of each voxel and its 26 neighbors, or of each pixel and its 8 neighbors."""
    pool = functional.max_pool3d if values.ndim == 3 else functional.max_pool2d
    maxima: NDArray[np.float32] = pool(torch.from_numpy(values)[None, None], 3, stride=1, padding=1)[0, 0].numpy()
    return maxima


def merge_small_segments(labels: Labels, heights: Probabilities, minimum_size: int) -> Labels:
    """Replace segments of fewer than `minimum_size` voxels by flooding the heights from the other segments.

    If all segments are too small, the minima of the heights are flooded instead.
    """
    if minimum_size == 0:
        return labels
    sizes = np.bincount(labels.ravel())
    is_kept = sizes >= minimum_size
    if sizes[0] == 0 and (is_kept | (sizes == 0)).all():
        return labels
    is_kept[0] = False
    seeds = np.where(is_kept, np.arange(len(sizes), dtype=np.uint32), np.uint32(0))[labels]
    if not is_kept.any():
        is_minimum = heights == -_take_neighborhood_maximum(-heights)
        seeds = bioimage_cpp.segmentation.label(
            is_minimum.view(np.uint8), background=0, connectivity=heights.ndim
        ).astype(np.uint32)
    merged_labels: Labels = bioimage_cpp.segmentation.watershed(heights.astype(np.float32, copy=False), seeds)
    return merged_labels


def merge_by_multicut(faces: Faces, beta: float) -> Labels:
    """Merge supervoxels by a multicut of their adjacency graph, solved by the Kernighan-Lin heuristic.

    The cost of an edge is the logarithm of the odds of the mean boundary probability of its face, weighted by the size
    of the face and shifted by `beta`.
    """
    probabilities = MIN_PROBABILITY + (MAX_PROBABILITY - MIN_PROBABILITY) * faces.boundary
    costs = np.log((1 - probabilities) / probabilities) + np.log((1 - beta) / beta)
    weights = faces.sizes / max(faces.sizes.max(initial=0), 1)
    objective = bioimage_cpp.graph.multicut.MulticutObjective(faces.graph, costs * weights)
    solver = bioimage_cpp.graph.multicut.ChainedMulticutSolvers(
        [
            bioimage_cpp.graph.multicut.GreedyAdditiveMulticut(),
            bioimage_cpp.graph.multicut.KernighanLinMulticut(),
        ]
    )
    return _number_nodes(solver.optimize(objective))


def merge_by_linkage(faces: Faces, beta: float, linkage: str) -> Labels:
    """Merge supervoxels by GASP, with the mean affinity of a face minus `beta` as the weight of an edge.

    linkage  `mean`, or `mutex_watershed`, in which edges with negative weights prevent later merges
    """
    policy = bioimage_cpp.graph.agglomeration.GaspClusterPolicy(num_clusters_stop=1, linkage=linkage)
    # In single precision, as in PanSeg, because ties decide which edges are merged first.
    weights = (1 - faces.boundary).astype(np.float32) - np.float32(beta)
    return _number_nodes(policy.optimize(faces.graph, weights.astype(np.float64), edge_sizes=faces.sizes))


def _number_nodes(node_labels: NDArray[Any]) -> Labels:
    """Return the labels, from 1, of the nodes with the numbers of the supervoxels."""
    labels: Labels = node_labels.astype(np.uint32) + 1
    return labels


def remove_labels(labels: Labels, decoding: Boundaries) -> Labels:
    """Set the objects to 0 that the decoding drops: those at the faces of the volume, and the largest one."""
    is_kept = np.ones(int(labels.max(initial=0)) + 1, np.bool_)
    is_kept[0] = False
    if decoding.background == "drop_largest":
        is_kept[np.bincount(labels.ravel()).argmax()] = False
    if decoding.border == "drop":
        for axis, length in enumerate(labels.shape):
            if length > 1:
                is_kept[labels.take((0, -1), axis).ravel()] = False
    if is_kept[1:].all():
        return labels
    kept_labels: Labels = np.where(is_kept, np.arange(len(is_kept), dtype=np.uint32), np.uint32(0))[labels]
    return kept_labels


def number_labels(labels: Labels) -> Labels:
    """Number the objects from 1 without gaps, in the order of their labels."""
    is_used = np.bincount(labels.ravel()) > 0
    is_used[0] = False
    numbered_labels: Labels = np.where(is_used, np.cumsum(is_used), 0).astype(np.uint32)[labels]
    return numbered_labels


def _find_peaks(labels: Labels, boundary: Probabilities) -> NDArray[np.float32]:
    """Return the highest probability of being no boundary in each object, and in the background."""
    peaks = np.zeros(int(labels.max(initial=0)) + 1, np.float32)
    np.maximum.at(peaks, labels.ravel(), 1 - boundary.ravel())
    return peaks
