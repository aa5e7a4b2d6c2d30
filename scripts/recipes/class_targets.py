"""Targets, loss and score of a network that tells background, the inside of cells and their membranes apart."""

from __future__ import annotations

from typing import Any

import edt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.training.examples import median_extents
from service.training.instance_targets import Floats

CLASSES = ("background", "cell", "membrane")

# Half the thickness of a membrane, as a share of a cell's width; of cells narrower than 20 voxels it is one voxel.
REACH = 0.05


def classes_of(labels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the index in `CLASSES` of every voxel of labels of cells, both [Z, Y, X].

    A voxel within `REACH` of another cell or of the background is membrane, on both sides of the outline. Lengths
    count along each axis in median extents of the cells, so that membranes are as thick in cells that few planes show.
    """
    widths = median_extents(labels)
    if widths is None:
        return np.zeros(labels.shape, np.uint8)
    spacing = np.minimum(1 / widths, REACH)
    numbers = np.ascontiguousarray(labels, dtype=np.uint32) + 1
    away = edt.edt(numbers, anisotropy=tuple(spacing.tolist()), black_border=False)
    # A volume without any outline has no distances.
    return np.where(away <= REACH * 1.001, 2, labels > 0).astype(np.uint8)


def class_targets(labels: NDArray[Any]) -> Floats:
    """Return the classes of labels of cells [Z, Y, X] as float32 [1, Z, Y, X]."""
    return classes_of(labels)[None].astype(np.float32)


def class_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return cross entropy plus mean Dice loss of scores [B, K, z, y, x] for classes [B, 1, z, y, x]; scalar."""
    classes = targets[:, 0].long()
    entropy = functional.cross_entropy(scores, classes)
    probability = torch.softmax(scores, dim=1)
    truth = functional.one_hot(classes, scores.shape[1]).movedim(-1, 1)
    voxels = (0, 2, 3, 4)
    shared = (probability * truth).sum(voxels)
    overlap = (2 * shared + 1) / (probability.sum(voxels) + truth.sum(voxels) + 1)
    return entropy + 0.5 * (1 - overlap.mean())


def dice(truth: NDArray[Any], predicted: NDArray[Any], count: int = len(CLASSES)) -> list[float]:
    """Return 2 |A and B| / (|A| + |B|) of each class in volumes [Z, Y, X]; NaN for a class that neither has."""
    table = np.bincount(truth.ravel().astype(np.intp) * count + predicted.ravel(), minlength=count**2)
    both = table.reshape(count, count)
    sizes = both.sum(axis=0) + both.sum(axis=1)
    return [float(2 * both[k, k] / sizes[k]) if sizes[k] else float("nan") for k in range(count)]
