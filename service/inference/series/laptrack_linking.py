"""Objects of a series linked by how far they move, by laptrack, an optional dependency (`stackseg[laptrack]`)."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import release_pages
from service.core.quantities import VoxelSize
from service.core.types import Array
from service.inference.series.overlap_linking import Integers, Tracks, count_voxels, slabs

# Objects may move, or be born of a mother, within so many of their median widths between two time points.
REACH = 1.0
# An object that is missed at so many time points keeps its track.
MISSED_POINTS = 2


def link_by_distance(labels: Array, voxel_size: VoxelSize | None) -> Tracks:
    """Link the objects of a series such that the sum of squared distances between their centres is least.

    This is the linear assignment of Jaqaman et al. 2008 (doi:10.1038/nmeth.1237) as laptrack solves it: first between
    neighbouring time points, then between ends and beginnings of tracks. Objects move by at most their median width;
    one that is missed at `MISSED_POINTS` time points keeps its track; daughters have their mother's track as parent.

    Args:
        labels: [T, Z, Y, X], at each time point numbered from 1; of the first the numbers are the tracks
        voxel_size: in micrometres; None: voxels count as cubes
    """
    from laptrack import LapTrack  # noqa: PLC0415 - optional, and slow to import

    spacing = np.ones(3) if voxel_size is None else np.array([voxel_size.z, voxel_size.y, voxel_size.x])
    sizes = [count_voxels(pixels) for pixels in labels]
    present = [np.flatnonzero(size) for size in sizes]
    centres = [
        _centres(pixels, size)[found] * spacing for pixels, size, found in zip(labels, sizes, present, strict=True)
    ]
    reach = REACH**2 * _median_width(sizes, spacing) ** 2
    tracker = LapTrack(
        cutoff=reach, gap_closing_cutoff=reach, gap_closing_max_frame_count=MISSED_POINTS, splitting_cutoff=reach
    )
    before = dict[tuple[int, int], tuple[int, int]]()
    if sum(len(found) > 0 for found in present) > 1:
        before = {after: ahead for ahead, after in tracker.predict(centres).edges}
    return _number(sizes, present, before)


def _centres(pixels: Array, sizes: Integers) -> NDArray[np.float64]:
    """Return Z, Y and X of the centre of every label, in voxels: [largest label + 1, 3]."""
    sums = np.zeros((len(sizes), 3))
    for slab in slabs(pixels.shape):
        block = pixels[slab]
        where = np.nonzero(block)
        found = block[where]
        for axis, places in enumerate(where):
            offset = slab.start if axis == 0 else 0
            sums[:, axis] += np.bincount(found, places + offset, len(sizes))
    release_pages(pixels)
    return sums / np.maximum(sizes, 1)[:, None]


def _median_width(sizes: list[Integers], spacing: NDArray[np.float64]) -> float:
    """Return the width of a ball of the median volume, in micrometres, or voxels where they count as cubes."""
    voxels = np.concatenate([size[size > 0] for size in sizes])
    return float((6 / np.pi * np.prod(spacing) * np.median(voxels)) ** (1 / 3)) if len(voxels) else 1.0


def _number(sizes: list[Integers], present: list[Integers], before: dict[tuple[int, int], tuple[int, int]]) -> Tracks:
    """Number tracks, given of each (time point, place among its objects) the one that it has come from."""
    divided = {origin for origin, daughters in Counter(before.values()).items() if daughters > 1}
    parents = [0] * len(sizes[0])
    tracks = [np.where(sizes[0] > 0, np.arange(len(sizes[0])), 0)]

    def track_of(node: tuple[int, int]) -> int:
        time, place = node
        return int(tracks[time][present[time][place]])

    for time in range(1, len(sizes)):
        tracks.append(np.zeros(len(sizes[time]), np.int64))
        for place, label in enumerate(present[time].tolist()):
            origin = before.get((time, place))
            if origin is not None and origin not in divided:
                tracks[-1][label] = track_of(origin)
            else:
                tracks[-1][label] = len(parents)
                parents.append(0 if origin is None else track_of(origin))
    return Tracks(tuple(tracks), np.array(parents, np.int64))
