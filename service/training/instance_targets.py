"""Targets and loss of a network that finds objects: foreground, and distance to the outline."""

from __future__ import annotations

from typing import Any

import edt
import numpy as np
import torch
from monai.losses.dice import DiceLoss
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Floats = NDArray[np.float32]

# Counted over all crops of a batch together, because a crop without objects has no overlap of its own.
DICE = DiceLoss(sigmoid=True, batch=True, smooth_nr=1.0, smooth_dr=1.0)


def instance_targets(labels: NDArray[Any]) -> Floats:
    """Return foreground (0 or 1) and distance of labels [Z, Y, X], float32 [2, Z, Y, X]."""
    return np.stack([(labels > 0).astype(np.float32), distance_target(labels)])


def distance_target(labels: NDArray[Any]) -> Floats:
    """Return the distance to the outline of labels [Z, Y, X], float32: 0 outside, 1 at one centre per object.

    The value is e / (e + r), with e the Euclidean distance to the nearest voxel of another object or background and r
    that to the object's centre. A plain distance transform has a ridge with several maxima in long nuclei; this value
    has exactly one maximum in every star-shaped object, and is near zero where two objects touch. With planes further
    apart than pixels e would measure thickness only, so z is scaled by the median flatness of the objects.
    """
    labels = np.ascontiguousarray(labels, dtype=np.uint32)
    result = np.zeros(labels.shape, np.float32)
    inside = np.flatnonzero(labels)
    if not inside.size:
        return result
    _, owner = np.unique(labels.ravel()[inside], return_inverse=True)
    places = np.stack(np.unravel_index(inside, labels.shape)).astype(np.float32)
    spacing = _median_flatness(places, owner)
    places[0] *= spacing
    outline = edt.edt(labels, anisotropy=(spacing, 1.0, 1.0), black_border=False).ravel()[inside]
    outline = np.minimum(outline, max(labels.shape) * spacing)
    weight = outline.astype(np.float64) ** 2
    total = np.bincount(owner, weight)
    centres = np.stack([np.bincount(owner, weight * axis) / total for axis in places])
    radius = np.sqrt(np.sum((places - centres[:, owner]) ** 2, axis=0))
    result.ravel()[inside] = outline / (outline + radius)
    return result


def _median_flatness(places: Floats, owner: NDArray[np.intp]) -> float:
    """Return the median over the objects of their extent in the plane over that along z, between 1 and 4.

    `places` are the voxels' coordinates [3, voxels], `owner` the index of each voxel's object [voxels].
    """
    count = np.bincount(owner)
    spread = [
        np.sqrt(np.maximum(np.bincount(owner, axis**2) / count - (np.bincount(owner, axis) / count) ** 2, 0.05))
        for axis in places.astype(np.float64)
    ]
    return float(np.clip(np.median((spread[1] + spread[2]) / (2 * spread[0])), 1, 4))


def instance_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of scores against targets (foreground 0 or 1, distance 0 to 1), both [B, 2, z, y, x]; scalar.

    It is cross entropy and Dice for the foreground, and the absolute error of the distance, which keeps the valleys
    between touching objects sharper than the squared error does. Outside the objects that error counts a fifth.
    """
    foreground, distance = targets[:, 0], targets[:, 1]
    dice: Tensor = DICE(scores[:, :1], targets[:, :1])
    entropy = functional.binary_cross_entropy_with_logits(scores[:, 0], foreground)
    error = (torch.sigmoid(scores[:, 1]) - distance).abs()
    inside = (error * foreground).sum() / (foreground.sum() + 1)
    outside = (error * (1 - foreground)).sum() / ((1 - foreground).sum() + 1)
    return entropy + 0.5 * dice + 2 * inside + 0.4 * outside
