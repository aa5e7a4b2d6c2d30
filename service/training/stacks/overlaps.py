"""Overlaps between the objects of two label volumes, and scores of the partitions that they define."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[Any]


@dataclass(frozen=True)
class OverlapTable:
    """The contingency table of two label volumes, without its zeros. Index 0 is the background.

    true_count, found_count  number of objects in the ground truth and in the labels
    true, found              indices [N] of the true and the found object of each pair that shares voxels
    voxels                   number of shared voxels [N] of each pair
    """

    true_count: int
    found_count: int
    true: NDArray[np.int64]
    found: NDArray[np.int64]
    voxels: NDArray[np.int64]

    @cached_property
    def true_sizes(self) -> NDArray[np.float64]:
        """Sizes [1 + true_count] of the background and the objects of the ground truth."""
        return np.bincount(self.true, self.voxels, 1 + self.true_count).astype(np.float64)

    @cached_property
    def found_sizes(self) -> NDArray[np.float64]:
        """Sizes [1 + found_count] of the background and the objects of the labels."""
        return np.bincount(self.found, self.voxels, 1 + self.found_count).astype(np.float64)

    def select(self, mask: NDArray[np.bool_]) -> OverlapTable:
        """Return the table with some of the pairs."""
        return OverlapTable(self.true_count, self.found_count, self.true[mask], self.found[mask], self.voxels[mask])

    def merge_found(self, objects: NDArray[Any]) -> OverlapTable:
        """Return the table after found objects have been merged.

        objects  number of the merged object, from 1, of each found object [1 + found_count]; the first one is not used
        """
        count = int(objects[1:].max(initial=0))
        found = np.where(self.found > 0, objects[self.found], 0)
        codes, inverse = np.unique(self.true * (count + 1) + found, return_inverse=True)
        voxels = np.bincount(inverse, self.voxels).astype(np.int64)
        return OverlapTable(self.true_count, count, *np.divmod(codes, count + 1), voxels)


def tabulate_overlaps(truth: Labels, labels: Labels) -> OverlapTable:
    """Count the voxels shared by the objects of two label volumes of the same shape. Background is 0."""
    (true_count, true), (found_count, found) = (_index_objects(volume) for volume in (truth, labels))
    codes, voxels = np.unique(true * (found_count + 1) + found, return_counts=True)
    return OverlapTable(true_count, found_count, *np.divmod(codes, found_count + 1), voxels)


def _index_objects(labels: Labels) -> tuple[int, NDArray[np.int64]]:
    """Return the number of objects, and the index of the object of each voxel [N]; 0 for the background."""
    values, indices = np.unique(labels, return_inverse=True)
    has_background = bool(len(values) > 0 and values[0] == 0)
    return len(values) - has_background, indices.ravel() + (not has_background)


def count_shared_voxels(truth: Labels, labels: Labels) -> NDArray[np.int64]:
    """Count the voxels shared by each true object (row) and each found object (column). Index 0 is the background."""
    table = tabulate_overlaps(truth, labels)
    counts = np.zeros((1 + table.true_count, 1 + table.found_count), np.int64)
    counts[table.true, table.found] = table.voxels
    return counts


def compute_variation_of_information(table: OverlapTable) -> tuple[float, float]:
    """Return the conditional entropies, in bits, of the labels given the truth and of the truth given the labels.

    The first one measures splits, the second one merges (Meila 2007, Nunez-Iglesias et al. 2013). Only voxels of true
    objects count, and the background of the labels counts as one object. Without such voxels, both are 0.
    """
    inside = table.select(table.true > 0)
    fractions = inside.voxels / max(inside.voxels.sum(), 1)
    splits = -np.sum(fractions * np.log2(inside.voxels / inside.true_sizes[inside.true]))
    merges = -np.sum(fractions * np.log2(inside.voxels / inside.found_sizes[inside.found]))
    return abs(float(splits)), abs(float(merges))


def compute_adapted_rand_error(table: OverlapTable) -> float:
    """Return one minus the F score of pairs of voxels that belong to the same object (Arganda-Carreras et al. 2015).

    Only voxels of true objects count, and the background of the labels counts as one object. Without pairs of voxels in
    an object, the error is 0.
    """
    inside = table.select(table.true > 0)
    shared, true, found = (
        float(np.sum(sizes * (sizes - 1.0))) for sizes in (inside.voxels, inside.true_sizes, inside.found_sizes)
    )
    return 1 - 2 * shared / (true + found) if true + found else 0.0
