"""Overlaps between the objects of two label volumes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[Any]


def count_shared_voxels(truth: Labels, labels: Labels) -> NDArray[np.int64]:
    """Count the voxels shared by each true object (row) and each found object (column). Index 0 is the background."""
    object_indices = []
    for volume in (truth, labels):
        values, inverse = np.unique(volume, return_inverse=True)
        object_indices.append(inverse.ravel() + int(values[0] != 0))
    row_count, column_count = (int(np.max(indices)) + 1 for indices in object_indices)
    counts = np.bincount(object_indices[0] * column_count + object_indices[1], minlength=row_count * column_count)
    return counts.reshape(row_count, column_count)
