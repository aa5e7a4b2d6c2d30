"""Linking of objects through time by distance, with laptrack, an optional dependency (`stackseg[laptrack]`)."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import release_pages
from service.core.quantities import VoxelSize
from service.core.types import Array
from service.inference.series.overlap_linking import Integers, Tracks, count_voxels, slabs

# Maximum distance that an object may move between two time points, or lie from its mother, in median object widths.
MAX_MOVE_WIDTHS = 1.0
# Maximum number of consecutive time points at which an object may be missing without losing its track.
MAX_MISSED_POINTS = 2


def link_by_distance(labels: Array, voxel_size: VoxelSize | None) -> Tracks:
    """Link the objects of a series so that the sum of squared distances between their centers is minimal.

    This is the linear assignment of Jaqaman et al. 2008 (doi:10.1038/nmeth.1237) as implemented by laptrack. It first
    links adjacent time points, and then the ends and starts of tracks. Objects move by at most their median width. An
    object keeps its track if it is missing at up to `MAX_MISSED_POINTS` time points. The parent of a daughter is the
    track of its mother.

    Args:
        labels: [T, Z, Y, X], numbered from 1 at each time point; the numbers at the first one become the tracks
        voxel_size: in micrometers; None: assume cubic voxels
    """
    from laptrack import LapTrack  # noqa: PLC0415 - optional, and slow to import

    spacing = np.ones(3) if voxel_size is None else np.array([voxel_size.z, voxel_size.y, voxel_size.x])
    sizes = [count_voxels(pixels) for pixels in labels]
    present = [np.flatnonzero(size) for size in sizes]
    centers = [
        _object_centers(pixels, size)[found] * spacing
        for pixels, size, found in zip(labels, sizes, present, strict=True)
    ]
    cutoff = MAX_MOVE_WIDTHS**2 * _median_width(sizes, spacing) ** 2
    tracker = LapTrack(
        cutoff=cutoff, gap_closing_cutoff=cutoff, gap_closing_max_frame_count=MAX_MISSED_POINTS, splitting_cutoff=cutoff
    )
    predecessors = dict[tuple[int, int], tuple[int, int]]()
    if sum(len(found) > 0 for found in present) > 1:
        predecessors = {successor: predecessor for predecessor, successor in tracker.predict(centers).edges}
    return _number_tracks(sizes, present, predecessors)


def _object_centers(pixels: Array, sizes: Integers) -> NDArray[np.float64]:
    """Return the center (Z, Y, X) of each label in voxels, [largest label + 1, 3]."""
    sums = np.zeros((len(sizes), 3))
    for slab in slabs(pixels.shape):
        block = pixels[slab]
        nonzero = np.nonzero(block)
        numbers = block[nonzero]
        for axis, coordinates in enumerate(nonzero):
            offset = slab.start if axis == 0 else 0
            sums[:, axis] += np.bincount(numbers, coordinates + offset, len(sizes))
    release_pages(pixels)
    return sums / np.maximum(sizes, 1)[:, None]


def _median_width(sizes: list[Integers], spacing: NDArray[np.float64]) -> float:
    """Return the diameter of a sphere of the median volume, in micrometers, or in voxels if their size is unknown."""
    voxels = np.concatenate([size[size > 0] for size in sizes])
    return float((6 / np.pi * np.prod(spacing) * np.median(voxels)) ** (1 / 3)) if len(voxels) else 1.0


def _number_tracks(
    sizes: list[Integers], present: list[Integers], predecessors: dict[tuple[int, int], tuple[int, int]]
) -> Tracks:
    """Number the tracks. `predecessors` maps (time point, index of the object) to the object that it comes from."""
    mothers = {origin for origin, daughters in Counter(predecessors.values()).items() if daughters > 1}
    parents = [0] * len(sizes[0])
    tracks = [np.where(sizes[0] > 0, np.arange(len(sizes[0])), 0)]

    def track_of(node: tuple[int, int]) -> int:
        time, index = node
        return int(tracks[time][present[time][index]])

    for time in range(1, len(sizes)):
        tracks.append(np.zeros(len(sizes[time]), np.int64))
        for index, label in enumerate(present[time].tolist()):
            origin = predecessors.get((time, index))
            if origin is not None and origin not in mothers:
                tracks[-1][label] = track_of(origin)
            else:
                tracks[-1][label] = len(parents)
                parents.append(0 if origin is None else track_of(origin))
    return Tracks(tuple(tracks), np.array(parents, np.int64))
