"""Labels of a series of time points -> one number for each object through time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import release_pages
from service.core.types import Array

Integers = NDArray[np.int64]

# Objects of two time points may be the same one from this intersection over union on.
LEAST_OVERLAP = 0.1
# Share of an object's voxels that lie where its mother was.
INSIDE_MOTHER = 0.5
# Voxels of the smaller of two daughters over those of the larger: what is smaller yet is a fragment.
DAUGHTER_RATIO = 0.25

# Planes are compared together until they hold so many voxels.
_SLAB_VOXELS = 2**22


@dataclass(frozen=True)
class Tracks:
    """Tracks of the objects of a series.

    tracks   of each time point: the track of every label, [largest label + 1]; 0 for the background
    parents  the track that every track has come from by a division, 0 where it has not; [tracks + 1]
    """

    tracks: tuple[Integers, ...]
    parents: Integers

    @property
    def count(self) -> int:
        """Number of tracks."""
        return len(self.parents) - 1


def link_by_overlap(labels: Array) -> Tracks:
    """Link the objects of neighbouring time points that overlap most.

    Pairs are taken by falling intersection over union, as long as neither object has a partner: above one half no other
    pair can be better, and below that objects in turn rarely compete. Two daughters that lie in their mother's place
    begin tracks of their own, and have hers as parent. An object that is missed at one time point begins a new track.

    Args:
        labels: [T, Z, Y, X], at each time point numbered from 1; of the first the numbers are the tracks
    """
    sizes = count_voxels(labels[0])
    parents = [0] * len(sizes)
    tracks = [np.where(sizes > 0, np.arange(len(sizes)), 0)]
    for number in range(1, len(labels)):
        before, sizes = sizes, count_voxels(labels[number])
        links, mothers = _match(_overlaps(labels[number - 1], labels[number]), before, sizes)
        known = tracks[-1]
        tracks.append(np.zeros(len(sizes), np.int64))
        for label in np.flatnonzero(sizes).tolist():
            if label in links:
                tracks[-1][label] = known[links[label]]
            else:
                tracks[-1][label] = len(parents)
                parents.append(int(known[mothers[label]]) if label in mothers else 0)
        release_pages(labels)
    return Tracks(tuple(tracks), np.array(parents, np.int64))


class _Overlaps(NamedTuple):
    """Pairs of a label before and one after that share voxels, and how many."""

    before: Integers
    after: Integers
    voxels: Integers


def slabs(shape: tuple[int, ...]) -> list[slice]:
    """Cut planes into slices of about as many voxels as are compared together."""
    planes = max(1, _SLAB_VOXELS // max(1, math.prod(shape[1:])))
    return [slice(z, z + planes) for z in range(0, shape[0], planes)]


def count_voxels(labels: Array) -> Integers:
    """Return the voxels of every label, 0 for the background."""
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
        # Neighbours mostly have the same labels: there are far fewer runs than voxels.
        starts = np.flatnonzero(np.diff(line, prepend=-1))
        codes.append(line[starts])
        counts.append(np.diff(starts, append=len(line)))
    code, where = np.unique(np.concatenate(codes), return_inverse=True)
    voxels = np.bincount(where, np.concatenate(counts), len(code)).astype(np.int64)
    both = (code >= base) & (code % base > 0)
    return _Overlaps(code[both] // base, code[both] % base, voxels[both])


def _match(overlaps: _Overlaps, before: Integers, after: Integers) -> tuple[dict[int, int], dict[int, int]]:
    """Return the label before by each label that goes on, and the mother's label by each daughter.

    `before` and `after` are the voxels of every label.
    """
    union = before[overlaps.before] + after[overlaps.after] - overlaps.voxels
    quality = overlaps.voxels / union
    links, ahead = dict[int, int](), dict[int, int]()
    for pair in np.argsort(-quality, kind="stable").tolist():
        old, new = int(overlaps.before[pair]), int(overlaps.after[pair])
        if quality[pair] >= LEAST_OVERLAP and old not in ahead and new not in links:
            links[new], ahead[old] = old, new
    mothers = _find_mothers(overlaps, after, links, ahead)
    for daughter in mothers:
        links.pop(daughter, None)
    return links, mothers


def _find_mothers(overlaps: _Overlaps, after: Integers, links: dict[int, int], ahead: dict[int, int]) -> dict[int, int]:
    """Return the mother's label by each of two daughters that lie in it.

    `links` and `ahead` have the labels that go on, by the label after and by the label before: so far, one daughter has
    the number of its mother.
    """
    mothers = dict[int, int]()
    inside = overlaps.voxels >= INSIDE_MOTHER * after[overlaps.after]
    within = list(zip(overlaps.before[inside].tolist(), overlaps.after[inside].tolist(), strict=True))
    candidates = set(within)
    for old, new in within:
        sister = ahead.get(old)
        if new in links or sister is None or (old, sister) not in candidates:
            continue
        small, large = sorted((int(after[new]), int(after[sister])))
        if small >= DAUGHTER_RATIO * large:
            mothers[new] = mothers[sister] = old
    return mothers
