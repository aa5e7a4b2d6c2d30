"""Linking of objects through time by the overlap of their labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import release_pages
from service.core.types import Array

Integers = NDArray[np.int64]

# Minimum intersection over union of two objects of adjacent time points that may be the same object.
MIN_OVERLAP = 0.1
# Minimum fraction of a daughter's voxels that lie inside its mother.
MIN_FRACTION_INSIDE_MOTHER = 0.5
# Minimum ratio of the voxels of the smaller daughter to those of the larger. Smaller objects are fragments.
MIN_DAUGHTER_RATIO = 0.25

# Maximum number of voxels that are compared together.
_SLAB_VOXELS = 2**22


@dataclass(frozen=True)
class Tracks:
    """Tracks of the objects of a series.

    tracks   for each time point, the track of each label, [largest label + 1]; 0 for the background
    parents  for each track, the track that it comes from by a division, or 0; [tracks + 1]
    """

    tracks: tuple[Integers, ...]
    parents: Integers

    @property
    def count(self) -> int:
        """Number of tracks."""
        return len(self.parents) - 1


def link_by_overlap(labels: Array) -> Tracks:
    """Link the objects of adjacent time points that overlap most.

    Pairs are selected by descending intersection over union if neither object has a partner yet. Above 0.5 no other
    pair can be better, and below that objects rarely compete. Two daughters inside their mother start new tracks whose
    parent is the track of the mother. An object that is missing at one time point starts a new track.

    Args:
        labels: [T, Z, Y, X], numbered from 1 at each time point; the numbers at the first one become the tracks
    """
    sizes = count_voxels(labels[0])
    parents = [0] * len(sizes)
    tracks = [np.where(sizes > 0, np.arange(len(sizes)), 0)]
    for number in range(1, len(labels)):
        before, sizes = sizes, count_voxels(labels[number])
        links, mothers = _match(_overlaps(labels[number - 1], labels[number]), before, sizes)
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

    before: Integers
    after: Integers
    voxels: Integers


def slabs(shape: tuple[int, ...]) -> list[slice]:
    """Divide the planes into slices of up to about `_SLAB_VOXELS` voxels."""
    planes = max(1, _SLAB_VOXELS // max(1, math.prod(shape[1:])))
    return [slice(z, z + planes) for z in range(0, shape[0], planes)]


def count_voxels(labels: Array) -> Integers:
    """Return the number of voxels of each label, with 0 for the background."""
    largest = int(labels.max(initial=0))
    counts = sum(np.bincount(labels[slab].ravel(), minlength=largest + 1) for slab in slabs(labels.shape))
    sizes = np.asarray(counts, np.int64)
    sizes[0] = 0
    return sizes


def _overlaps(before: Array, after: Array) -> _Overlaps:
    base = int(after.max(initial=0)) + 1
    codes, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for slab in slabs(before.shape):
        line = before[slab].ravel().astype(np.int64) * base + after[slab].ravel()
        # Neighboring voxels mostly have the same labels, so there are far fewer runs than voxels.
        starts = np.flatnonzero(np.diff(line, prepend=-1))
        codes.append(line[starts])
        counts.append(np.diff(starts, append=len(line)))
    code, inverse = np.unique(np.concatenate(codes), return_inverse=True)
    voxels = np.bincount(inverse, np.concatenate(counts), len(code)).astype(np.int64)
    both = (code >= base) & (code % base > 0)
    return _Overlaps(code[both] // base, code[both] % base, voxels[both])


def _match(overlaps: _Overlaps, before: Integers, after: Integers) -> tuple[dict[int, int], dict[int, int]]:
    """Return the previous label of each label whose track continues, and the label of the mother of each daughter.

    `before` and `after` are the numbers of voxels of each label.
    """
    union = before[overlaps.before] + after[overlaps.after] - overlaps.voxels
    quality = overlaps.voxels / union
    links, successors = dict[int, int](), dict[int, int]()
    for pair in np.argsort(-quality, kind="stable").tolist():
        previous, current = int(overlaps.before[pair]), int(overlaps.after[pair])
        if quality[pair] >= MIN_OVERLAP and previous not in successors and current not in links:
            links[current], successors[previous] = previous, current
    mothers = _find_mothers(overlaps, after, links, successors)
    for daughter in mothers:
        links.pop(daughter, None)
    return links, mothers


def _find_mothers(
    overlaps: _Overlaps, after: Integers, links: dict[int, int], successors: dict[int, int]
) -> dict[int, int]:
    """Return the label of the mother for both daughters of each division.

    `links` maps labels to their previous labels, and `successors` is its inverse. In them, one of the daughters still
    continues the track of its mother.
    """
    mothers = dict[int, int]()
    inside = overlaps.voxels >= MIN_FRACTION_INSIDE_MOTHER * after[overlaps.after]
    pairs_inside = list(zip(overlaps.before[inside].tolist(), overlaps.after[inside].tolist(), strict=True))
    candidates = set(pairs_inside)
    for previous, current in pairs_inside:
        sister = successors.get(previous)
        if current in links or sister is None or (previous, sister) not in candidates:
            continue
        small, large = sorted((int(after[current]), int(after[sister])))
        if small >= MIN_DAUGHTER_RATIO * large:
            mothers[current] = mothers[sister] = previous
    return mothers
