"""Linking of objects across time points by distance, with laptrack, an optional dependency (`stackseg[laptrack]`)."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import release_pages
from service.core.quantities import VoxelSize
from service.core.types import Array
from service.inference.series.overlap_linking import IntegerArray, Tracks, count_label_voxels, split_slabs

# Maximum distance that an object may move between two time points, and maximum distance between a daughter and its
# mother, as a multiple of the median object diameter.
MAX_MOVE_DIAMETERS = 1.0
# Maximum number of consecutive time points at which an object may be missing without losing its track.
MAX_MISSED_TIME_POINTS = 2


def link_by_distance(labels: Array, voxel_size: VoxelSize | None) -> Tracks:
    """Link the objects of a series so that the sum of squared distances between linked centers is minimal.

    This is the linear assignment method of Jaqaman et al. 2008 (doi:10.1038/nmeth.1237) as implemented by laptrack. It
    first links objects at adjacent time points, and then the ends of tracks to the starts of other tracks. Objects
    move by at most the median diameter. An object keeps its track if it is missing at up to `MAX_MISSED_TIME_POINTS`
    consecutive time points. The parent of a daughter is the track of its mother.

    Args:
        labels: [T, Z, Y, X], numbered from 1 at each time point; the labels at the first time point become the numbers
            of the tracks
        voxel_size: voxel size in micrometers; None: assume cubic voxels
    """
    from laptrack import LapTrack  # noqa: PLC0415 - optional, and slow to import

    spacing = np.ones(3) if voxel_size is None else np.array([voxel_size.z, voxel_size.y, voxel_size.x])
    sizes = [count_label_voxels(pixels) for pixels in labels]
    object_labels = [np.flatnonzero(size) for size in sizes]
    centers = [
        _compute_centers(pixels, size)[present_labels] * spacing
        for pixels, size, present_labels in zip(labels, sizes, object_labels, strict=True)
    ]
    cutoff = MAX_MOVE_DIAMETERS**2 * _compute_median_diameter(sizes, spacing) ** 2
    tracker = LapTrack(
        cutoff=cutoff,
        gap_closing_cutoff=cutoff,
        gap_closing_max_frame_count=MAX_MISSED_TIME_POINTS,
        splitting_cutoff=cutoff,
    )
    predecessors = dict[tuple[int, int], tuple[int, int]]()
    if sum(len(present_labels) > 0 for present_labels in object_labels) > 1:
        predecessors = {successor: predecessor for predecessor, successor in tracker.predict(centers).edges}
    return _number_tracks(sizes, object_labels, predecessors)


def _compute_centers(pixels: Array, sizes: IntegerArray) -> NDArray[np.float64]:
    """Return the center (Z, Y, X) of each label in voxels, [largest label + 1, 3]. `sizes` are in voxels."""
    sums = np.zeros((len(sizes), 3))
    for slab in split_slabs(pixels.shape):
        block = pixels[slab]
        nonzero = np.nonzero(block)
        voxel_labels = block[nonzero]
        for axis, coordinates in enumerate(nonzero):
            offset = slab.start if axis == 0 else 0
            sums[:, axis] += np.bincount(voxel_labels, coordinates + offset, len(sizes))
    release_pages(pixels)
    return sums / np.maximum(sizes, 1)[:, None]


def _compute_median_diameter(sizes: list[IntegerArray], spacing: NDArray[np.float64]) -> float:
    """Return the diameter of a sphere that has the median volume of the objects, in the unit of `spacing`."""
    object_sizes = np.concatenate([size[size > 0] for size in sizes])
    return float((6 / np.pi * np.prod(spacing) * np.median(object_sizes)) ** (1 / 3)) if len(object_sizes) else 1.0


def _number_tracks(
    sizes: list[IntegerArray], object_labels: list[IntegerArray], predecessors: dict[tuple[int, int], tuple[int, int]]
) -> Tracks:
    """Number the tracks. `predecessors` maps objects, as (time point, index), to objects of earlier time points."""
    mothers = {predecessor for predecessor, count in Counter(predecessors.values()).items() if count > 1}
    parents = [0] * len(sizes[0])
    tracks = [np.where(sizes[0] > 0, np.arange(len(sizes[0])), 0)]

    def get_track(node: tuple[int, int]) -> int:
        time_index, index = node
        return int(tracks[time_index][object_labels[time_index][index]])

    for time_index in range(1, len(sizes)):
        tracks.append(np.zeros(len(sizes[time_index]), np.int64))
        for index, label in enumerate(object_labels[time_index].tolist()):
            predecessor = predecessors.get((time_index, index))
            if predecessor is not None and predecessor not in mothers:
                tracks[-1][label] = get_track(predecessor)
            else:
                tracks[-1][label] = len(parents)
                parents.append(0 if predecessor is None else get_track(predecessor))
    return Tracks(tuple(tracks), np.array(parents, np.int64))
