"""Linking of objects across time points by the overlap of their labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import release_pages
from service.core.types import Array

IntegerArray = NDArray[np.int64]

# Minimum intersection over union (IoU) at which two labels at adjacent time points may belong to the same object.
MIN_IOU = 0.1
# Minimum fraction of a daughter's voxels that lie inside its mother.
MIN_FRACTION_INSIDE_MOTHER = 0.5
# Minimum ratio of the volume of the smaller daughter to the volume of the larger one. Smaller objects are considered
# fragments.
MIN_DAUGHTER_RATIO = 0.25

# Maximum number of voxels that are compared at a time.
_MAX_SLAB_VOXELS = 2**22


@dataclass(frozen=True)
class Tracks:
    """Tracks of the objects of a series.

    tracks   track of each label at each time point, [largest label + 1] per time point; 0 for the background
    parents  track from which each track descends by a division, or 0, [number of tracks + 1]
    """

    tracks: tuple[IntegerArray, ...]
    parents: IntegerArray

    @property
    def count(self) -> int:
        """Number of tracks."""
        return len(self.parents) - 1


def link_by_overlap(labels: Array) -> Tracks:
    """Link the objects at adjacent time points that overlap most.

    Pairs are selected in descending order of intersection over union (IoU), if neither object has a partner yet. If the
    IoU exceeds 0.5, neither object can have a better partner. If it is lower, objects rarely compete for a partner. Two
    daughters inside their mother start new tracks whose parent is the track of the mother. An object that is missing at
    one time point starts a new track.

    Args:
        labels: [T, Z, Y, X], numbered from 1 at each time point; the labels at the first time point become the numbers
            of the tracks
    """
    sizes = count_label_voxels(labels[0])
    parents = [0] * len(sizes)
    tracks = [np.where(sizes > 0, np.arange(len(sizes)), 0)]
    for time_index in range(1, len(labels)):
        previous_sizes, sizes = sizes, count_label_voxels(labels[time_index])
        links, mothers = _match_objects(
            _find_overlaps(labels[time_index - 1], labels[time_index]), previous_sizes, sizes
        )
        previous_tracks = tracks[-1]
        tracks.append(np.zeros(len(sizes), np.int64))
        for label in np.flatnonzero(sizes).tolist():
            if label in links:
                tracks[-1][label] = previous_tracks[links[label]]
            else:
                tracks[-1][label] = len(parents)
                parents.append(int(previous_tracks[mothers[label]]) if label in mothers else 0)
        release_pages(labels)
    return Tracks(tuple(tracks), np.array(parents, np.int64))


class _Overlaps(NamedTuple):
    """Pairs of labels at adjacent time points that share voxels, and the number of shared voxels."""

    previous_labels: IntegerArray
    current_labels: IntegerArray
    shared_voxels: IntegerArray


def split_slabs(shape: tuple[int, ...]) -> list[slice]:
    """Divide the planes into slices of up to about `_MAX_SLAB_VOXELS` voxels."""
    num_planes = max(1, _MAX_SLAB_VOXELS // max(1, math.prod(shape[1:])))
    return [slice(z, z + num_planes) for z in range(0, shape[0], num_planes)]


def count_label_voxels(labels: Array) -> IntegerArray:
    """Return the number of voxels of each label. The number for the background is set to 0."""
    largest_label = int(labels.max(initial=0))
    counts = sum(np.bincount(labels[slab].ravel(), minlength=largest_label + 1) for slab in split_slabs(labels.shape))
    sizes = np.asarray(counts, np.int64)
    sizes[0] = 0
    return sizes


def _find_overlaps(previous_volume: Array, current_volume: Array) -> _Overlaps:
    base = int(current_volume.max(initial=0)) + 1
    codes, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for slab in split_slabs(previous_volume.shape):
        slab_codes = previous_volume[slab].ravel().astype(np.int64) * base + current_volume[slab].ravel()
        # Neighboring voxels usually have the same labels, so there are far fewer runs than voxels.
        starts = np.flatnonzero(np.diff(slab_codes, prepend=-1))
        codes.append(slab_codes[starts])
        counts.append(np.diff(starts, append=len(slab_codes)))
    pair_codes, inverse = np.unique(np.concatenate(codes), return_inverse=True)
    shared_voxels = np.bincount(inverse, np.concatenate(counts), len(pair_codes)).astype(np.int64)
    is_object_pair = (pair_codes >= base) & (pair_codes % base > 0)
    return _Overlaps(
        pair_codes[is_object_pair] // base, pair_codes[is_object_pair] % base, shared_voxels[is_object_pair]
    )


def _match_objects(
    overlaps: _Overlaps, previous_sizes: IntegerArray, current_sizes: IntegerArray
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the previous label for each label whose track continues, and the label of the mother for each daughter.

    `previous_sizes` and `current_sizes` are the numbers of voxels of each label.
    """
    union = previous_sizes[overlaps.previous_labels] + current_sizes[overlaps.current_labels] - overlaps.shared_voxels
    iou = overlaps.shared_voxels / union
    links, successors = dict[int, int](), dict[int, int]()
    for pair in np.argsort(-iou, kind="stable").tolist():
        previous_label, label = int(overlaps.previous_labels[pair]), int(overlaps.current_labels[pair])
        if iou[pair] >= MIN_IOU and previous_label not in successors and label not in links:
            links[label], successors[previous_label] = previous_label, label
    mothers = _find_mothers(overlaps, current_sizes, links, successors)
    for daughter in mothers:
        links.pop(daughter, None)
    return links, mothers


def _find_mothers(
    overlaps: _Overlaps, current_sizes: IntegerArray, links: dict[int, int], successors: dict[int, int]
) -> dict[int, int]:
    """Return the label of the mother for both daughters of each division.

    `links` maps labels to their previous labels, and `successors` is its inverse. In both mappings, one of the
    daughters still continues the track of its mother.
    """
    mothers = dict[int, int]()
    is_inside = overlaps.shared_voxels >= MIN_FRACTION_INSIDE_MOTHER * current_sizes[overlaps.current_labels]
    inner_pairs = list(
        zip(overlaps.previous_labels[is_inside].tolist(), overlaps.current_labels[is_inside].tolist(), strict=True)
    )
    candidates = set(inner_pairs)
    for mother, daughter in inner_pairs:
        sister = successors.get(mother)
        if daughter in links or sister is None or (mother, sister) not in candidates:
            continue
        smaller_size, larger_size = sorted((int(current_sizes[daughter]), int(current_sizes[sister])))
        if smaller_size >= MIN_DAUGHTER_RATIO * larger_size:
            mothers[daughter] = mothers[sister] = mother
    return mothers
