"""Sizes of the objects in a label volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import find_objects


def median_extents(labels: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return the median extents of the objects in labels [Z, Y, X] along z, y and x in voxels, [3]; None without any.

    Objects at the border, of which only a part is known, count only where there are fewer than three others.
    """
    if labels.max(initial=0) > labels.size:
        # `find_objects` has a place in memory for every number up to the largest.
        labels = np.searchsorted(np.union1d([0], labels), labels)
    boxes = [box for box in find_objects(labels) if box is not None]
    whole = [box for box in boxes if _is_inside(box, labels.shape)]
    extents = [[s.stop - s.start for s in box] for box in (whole if len(whole) > 2 else boxes)]
    return np.asarray(np.median(extents, axis=0), np.float64) if extents else None


def _is_inside(box: Sequence[slice], shape: Sequence[int]) -> bool:
    """Return whether a box touches no border."""
    return all(side.start > 0 and side.stop < length for side, length in zip(box, shape, strict=True))


def mean_diameter(labels: NDArray[Any]) -> float:
    """Return the mean diameter in voxels of spheres of the objects' volumes; 1 without any object."""
    volumes = np.unique(labels[labels > 0], return_counts=True)[1]
    return float(np.mean(np.cbrt(6 * volumes / np.pi))) if len(volumes) else 1.0
