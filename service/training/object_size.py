"""Sizes of the objects in a label volume."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import find_objects


def median_extents(labels: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return the median extents of the objects in labels [Z, Y, X] along z, y and x in voxels, [3]; None without any.

    Objects at the border, of which only a part is known, count only where there are fewer than three others.
    """
    boxes = [box for box in find_objects(labels) if box is not None]
    whole = [box for box in boxes if all(s.start > 0 and s.stop < n for s, n in zip(box, labels.shape, strict=True))]
    extents = [[s.stop - s.start for s in box] for box in (whole if len(whole) > 2 else boxes)]
    return np.asarray(np.median(extents, axis=0), np.float64) if extents else None


def mean_diameter(labels: NDArray[Any]) -> float:
    """Return the mean diameter in voxels of spheres of the objects' volumes; 1 without any object."""
    volumes = np.unique(labels[labels > 0], return_counts=True)[1]
    return float(np.mean(np.cbrt(6 * volumes / np.pi))) if len(volumes) else 1.0
