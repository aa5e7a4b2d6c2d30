"""Targets and loss of a network for boundaries between objects, and for affinities of voxels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.training.targets.instances import DICE_LOSS, UNKNOWN_SCORE

Floats = NDArray[np.float32]
Offset = Sequence[int]

NEIGHBORS = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
# Offsets of the affinities of a new model. The affinities of neighbors separate objects at thin boundaries, and the
# others decide whether voxels on both sides of a gap in a boundary belong to the same object.
AFFINITY_OFFSETS = (*NEIGHBORS, (4, 0, 0), (0, 4, 0), (0, 0, 4), (12, 0, 0), (0, 12, 0), (0, 0, 12))


def compute_label_targets(labels: NDArray[Any]) -> Floats:
    """Return renumbered labels and weights of 1 for labels [Z, Y, X], as float32 [2, Z, Y, X].

    Boundaries and affinities are computed in the loss, because crops are zoomed, flipped and transposed before. The
    weights are 0 in the padding of crops. Background counts as one more object.
    """
    _, indices = np.unique(labels, return_inverse=True)
    renumbered = indices.reshape(labels.shape).astype(np.float32)
    return np.stack([renumbered, np.ones_like(renumbered)])


class BoundaryLoss:
    """Loss of scores [B, 1 + A, z, y, x] for targets [B, T, z, y, x] of boundaries and of A affinities.

    The targets are labels and T - 1 weights. Voxels with a weight of 0 are unknown and do not affect the loss. It is
    the mean, over all outputs, of the cross entropy plus half the Dice loss of the boundaries. The boundary of an
    affinity is its complement, because boundaries are rarer than the inside of objects.
    """

    def __init__(self, offsets: Sequence[Offset]) -> None:
        self._offsets = offsets

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar loss."""
        labels, known = targets[:, 0], (targets[:, 1:] > 0.5).all(1)
        losses = [_compute_loss(scores[:, 0], find_boundaries(labels, known), known)]
        for index, offset in enumerate(self._offsets, start=1):
            (here, there), (known_here, known_there) = shift(labels, offset), shift(known, offset)
            affinity_scores = shift(scores[:, index], offset)[0]
            losses.append(_compute_loss(-affinity_scores, here != there, known_here & known_there))
        return torch.stack(losses).mean()


def find_boundaries(labels: Tensor, known: Tensor) -> Tensor:
    """Return a mask [B, z, y, x] of the voxels with a neighbor, across a face, of another object.

    Neighbors that are unknown or outside the labels [B, z, y, x] do not count.
    """
    result = torch.zeros_like(known)
    for offset in NEIGHBORS:
        (here, there), (known_here, known_there) = shift(labels, offset), shift(known, offset)
        differs = (here != there) & known_here & known_there
        first, second = shift(result, offset)
        first |= differs
        second |= differs
    return result


def shift(values: Tensor, offset: Offset) -> tuple[Tensor, Tensor]:
    """Return views [B, z', y', x'] of the values [B, z, y, x] at voxels and at their neighbors at an offset."""
    here, there = [slice(None)], [slice(None)]
    for distance, length in zip(offset, values.shape[1:], strict=True):
        forward, backward = min(max(distance, 0), length), min(max(-distance, 0), length)
        here.append(slice(backward, length - forward))
        there.append(slice(forward, length - backward))
    return values[tuple(here)], values[tuple(there)]


def _compute_loss(scores: Tensor, boundaries: Tensor, known: Tensor) -> Tensor:
    """Return the loss of the scores of boundaries, all [B, z, y, x]."""
    boundaries, weights = (boundaries & known).float(), known.float()
    entropies = functional.binary_cross_entropy_with_logits(scores, boundaries, reduction="none")
    entropy = (entropies * weights).sum() / weights.sum().clamp_min(1)
    dice: Tensor = DICE_LOSS(torch.where(known, scores, UNKNOWN_SCORE)[:, None], boundaries[:, None])
    return entropy + 0.5 * dice
