"""Targets, loss and score for the semantic segmentation of background, cells and membranes."""

from __future__ import annotations

from typing import Any

import edt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.training.examples import compute_median_extents
from service.training.targets.instances import Floats

CLASSES = ("background", "cell", "membrane")

# Half the thickness of a membrane, as a fraction of the cell diameter. It is at least one voxel along each axis.
MEMBRANE_FRACTION = 0.05


def labels_to_classes(labels: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert cell labels to classes, both [Z, Y, X]. A class is an index in `CLASSES`.

    A voxel is a membrane if a different label is within `MEMBRANE_FRACTION` of it, so membranes lie on both sides of an
    outline. Distances along each axis are relative to the median extent of the cells along this axis. This keeps the
    relative thickness of membranes the same if the planes are far apart.
    """
    widths = compute_median_extents(labels)
    if widths is None:
        return np.zeros(labels.shape, np.uint8)
    spacing = np.minimum(1 / widths, MEMBRANE_FRACTION)
    numbers = np.ascontiguousarray(labels, dtype=np.uint32) + 1
    distance = edt.edt(numbers, anisotropy=tuple(spacing.tolist()), black_border=False)
    # The factor allows for rounding errors. In a volume with a single label, no voxel is close to an outline.
    return np.where(distance <= MEMBRANE_FRACTION * 1.001, 2, labels > 0).astype(np.uint8)


def class_targets(labels: NDArray[Any]) -> Floats:
    """Convert cell labels [Z, Y, X] to training targets: the classes as float32 [1, Z, Y, X]."""
    return labels_to_classes(labels)[None].astype(np.float32)


def class_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy plus half the mean Dice loss of scores [B, K, z, y, x] and classes [B, 1, z, y, x]."""
    classes = targets[:, 0].long()
    entropy = functional.cross_entropy(scores, classes)
    probability = torch.softmax(scores, dim=1)
    truth = functional.one_hot(classes, scores.shape[1]).movedim(-1, 1)
    voxels = (0, 2, 3, 4)
    intersection = (probability * truth).sum(voxels)
    overlap = (2 * intersection + 1) / (probability.sum(voxels) + truth.sum(voxels) + 1)
    return entropy + 0.5 * (1 - overlap.mean())


def compute_dice(truth: NDArray[Any], predicted: NDArray[Any], count: int = len(CLASSES)) -> list[float]:
    """Return the Dice coefficient of each class in two volumes [Z, Y, X]; NaN if a class occurs in neither volume."""
    table = np.bincount(truth.ravel().astype(np.intp) * count + predicted.ravel(), minlength=count**2)
    confusion = table.reshape(count, count)
    sizes = confusion.sum(axis=0) + confusion.sum(axis=1)
    return [float(2 * confusion[k, k] / sizes[k]) if sizes[k] else float("nan") for k in range(count)]
