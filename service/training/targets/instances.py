"""Targets and loss of an instance segmentation network: foreground and distance to the outline."""

from __future__ import annotations

from typing import Any

import edt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.models.architectures.monai import REQUIRED_PACKAGES, hide_packages_except

with hide_packages_except(REQUIRED_PACKAGES):
    from monai.losses.dice import DiceLoss

Floats = NDArray[np.float32]

# Score of unknown voxels in the Dice loss, which means background for certain.
UNKNOWN_SCORE = -30.0

# This loss is computed over all crops of a batch together, because it is not meaningful for a crop without objects.
DICE_LOSS = DiceLoss(sigmoid=True, batch=True, smooth_nr=1.0, smooth_dr=1.0)


def compute_instance_targets(labels: NDArray[Any]) -> Floats:
    """Return the foreground mask (0 or 1) and the distance map of labels [Z, Y, X] as float32 [2, Z, Y, X]."""
    return np.stack([(labels > 0).astype(np.float32), compute_distance_target(labels)])


def compute_distance_target(labels: NDArray[Any]) -> Floats:
    """Return the normalized distance of voxels [Z, Y, X] to the outline of their object: 0 outside, 1 at centers.

    The value is e / (e + r), where e is the Euclidean distance to the nearest voxel of another object or of the
    background, and r is the distance to the object's center. A plain distance transform has a ridge with several maxima
    in elongated nuclei. This value has exactly one maximum in star-shaped objects, and is close to zero where two
    objects touch. If the spacing of planes is larger than the pixel size, e would measure only the distance along
    z. Therefore, z is scaled by the median flatness of the objects. The result is float32.
    """
    labels = np.ascontiguousarray(labels, dtype=np.uint32)
    result = np.zeros(labels.shape, np.float32)
    foreground = np.flatnonzero(labels)
    if not foreground.size:
        return result
    _, object_index = np.unique(labels.ravel()[foreground], return_inverse=True)
    coordinates = np.stack(np.unravel_index(foreground, labels.shape)).astype(np.float32)
    spacing = _compute_median_flatness(coordinates, object_index)
    coordinates[0] *= spacing
    outline_distance = edt.edt(labels, anisotropy=(spacing, 1.0, 1.0), black_border=False).ravel()[foreground]
    outline_distance = np.minimum(outline_distance, max(labels.shape) * spacing)
    weight = outline_distance.astype(np.float64) ** 2
    weight_sums = np.bincount(object_index, weight)
    centers = np.stack([np.bincount(object_index, weight * axis) / weight_sums for axis in coordinates])
    center_distance = np.sqrt(np.sum((coordinates - centers[:, object_index]) ** 2, axis=0))
    result.ravel()[foreground] = outline_distance / (outline_distance + center_distance)
    return result


def _compute_median_flatness(coordinates: Floats, object_index: NDArray[np.intp]) -> float:
    """Return the median ratio of the in-plane extent of objects to their extent along z, clipped to the range 1 to 4.

    `coordinates` are the coordinates of object voxels [3, N], and `object_index` contains their object indices [N].
    """
    voxel_counts = np.bincount(object_index)
    spreads = [
        np.sqrt(
            np.maximum(
                np.bincount(object_index, axis**2) / voxel_counts
                - (np.bincount(object_index, axis) / voxel_counts) ** 2,
                0.05,
            )
        )
        for axis in coordinates.astype(np.float64)
    ]
    return float(np.clip(np.median((spreads[1] + spreads[2]) / (2 * spreads[0])), 1, 4))


def instance_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the scalar loss of scores [B, 2, z, y, x] and targets [B, T, z, y, x].

    The targets are foreground (0 or 1), distance (0 to 1) and, optionally, weights (0 or 1). Voxels with weight 0 are
    unknown and do not affect the loss.

    The loss is a weighted sum of the cross entropy and the Dice loss of the foreground, and of the absolute error of
    the distance. The absolute error results in sharper valleys between touching objects than the squared error. Errors
    outside objects have a fifth of the weight of errors inside objects.
    """
    foreground, distance = targets[:, 0], targets[:, 1]
    weights = targets[:, 2] if targets.shape[1] > 2 else torch.ones_like(foreground)
    foreground_scores = torch.where(weights > 0, scores[:, 0], UNKNOWN_SCORE)
    foreground, background = foreground * weights, (1 - foreground) * weights
    dice: Tensor = DICE_LOSS(foreground_scores[:, None], foreground[:, None])
    entropies = functional.binary_cross_entropy_with_logits(scores[:, 0], foreground, reduction="none")
    entropy = (entropies * weights).sum() / weights.sum().clamp_min(1)
    error = (torch.sigmoid(scores[:, 1]) - distance).abs()
    inside_error = (error * foreground).sum() / (foreground.sum() + 1)
    outside_error = (error * background).sum() / (background.sum() + 1)
    return entropy + 0.5 * dice + 2 * inside_error + 0.4 * outside_error
