"""What the network learns to predict of a label volume: foreground, and distance to the outline."""

from __future__ import annotations

from typing import Any

import edt
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def instance_targets(labels: NDArray[Any]) -> Floats:
    """Labels [Z, Y, X] -> foreground (0 or 1) and distance, float32 [2, Z, Y, X]."""
    return np.stack([(labels > 0).astype(np.float32), distance_target(labels)])


def distance_target(labels: NDArray[Any]) -> Floats:
    """Labels [Z, Y, X] -> distance to the outline, 0 outside, rising to 1 at one centre per object; float32.

    The value is e / (e + r), with e the Euclidean distance to the nearest voxel of something else and r that to the
    object's centre: the plain distance transform, normalised per object, has a ridge with several maxima in long
    nuclei; this has exactly one in every star-shaped object, and is zero where two objects touch. Planes further apart
    than pixels would make e measure thickness only, so z is scaled by the median flatness of the objects.
    """
    labels = np.ascontiguousarray(labels, dtype=np.uint32)
    result = np.zeros(labels.shape, np.float32)
    inside = np.flatnonzero(labels)
    if not inside.size:
        return result
    _, owner = np.unique(labels.ravel()[inside], return_inverse=True)
    places = np.stack(np.unravel_index(inside, labels.shape)).astype(np.float32)
    spacing = _flatness(places, owner)
    places[0] *= spacing
    outline = edt.edt(labels, anisotropy=(spacing, 1.0, 1.0), black_border=False).ravel()[inside]
    outline = np.minimum(outline, max(labels.shape) * spacing)
    weight = outline.astype(np.float64) ** 2
    total = np.bincount(owner, weight)
    centres = np.stack([np.bincount(owner, weight * axis) / total for axis in places])
    radius = np.sqrt(np.sum((places - centres[:, owner]) ** 2, axis=0))
    result.ravel()[inside] = outline / (outline + radius)
    return result


def _flatness(places: Floats, owner: NDArray[np.intp]) -> float:
    """Median over the objects of their extent in the plane over their extent along z, between 1 and 4."""
    count = np.bincount(owner)
    spread = [
        np.sqrt(np.maximum(np.bincount(owner, axis**2) / count - (np.bincount(owner, axis) / count) ** 2, 0.05))
        for axis in places.astype(np.float64)
    ]
    return float(np.clip(np.median((spread[1] + spread[2]) / (2 * spread[0])), 1, 4))
