"""Validation of a network: losses on tiles, and scores of the objects on held-out parts of the stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from monai.inferers.utils import sliding_window_inference
from monai.metrics.meandice import compute_dice
from torch import Tensor

from service.core.types import Objects
from service.inference.decoding.instances import InstanceDecoder
from service.inference.decoding.postprocessing import require_instances
from service.inference.preprocessing.resample import resample_segmentation
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec
from service.training.evaluate import Labels, count_shared_voxels
from service.training.examples import cut_tiles
from service.training.instance_targets import instance_loss
from service.training.loop.plan import ValidationScores
from service.training.stacks.parts import StackPart, cut_part

Network = Callable[[Tensor], Tensor]
"""Function that returns the raw scores [B, 2, z, y, x], float32, of images [B, 1, z, y, x]."""

# Minimum IoU of matching objects, and of objects that match well.
MATCHING_IOU = 0.5
STRICT_IOU = 0.7
# Maximum number of voxels of all validation parts that are segmented in each validation.
MAX_VALIDATION_VOXELS = 2**21
WINDOW_OVERLAP = 0.25


class ObjectCounts(NamedTuple):
    """Numbers of annotated, segmented and matching objects. Counts of several stacks can be added."""

    true: int = 0
    found: int = 0
    matched: int = 0
    strictly_matched: int = 0

    @property
    def f1(self) -> float:
        """F1 score at an IoU above `MATCHING_IOU`."""
        return _divide(2 * self.matched, self.true + self.found)

    @property
    def f1_strict(self) -> float:
        """F1 score at an IoU above `STRICT_IOU`."""
        return _divide(2 * self.strictly_matched, self.true + self.found)

    @property
    def precision(self) -> float:
        """Fraction of the segmented objects that match an annotated object."""
        return _divide(self.matched, self.found)

    @property
    def recall(self) -> float:
        """Fraction of the annotated objects that match a segmented object."""
        return _divide(self.matched, self.true)

    def merge(self, other: ObjectCounts) -> ObjectCounts:
        """Return the sums of two counts."""
        return ObjectCounts(*(first + second for first, second in zip(self, other, strict=True)))

    def describe(self) -> str:
        """Return the scores for users."""
        return (
            f"F1 {self.f1:.2f} at IoU 0.5 and {self.f1_strict:.2f} at IoU 0.7, precision {self.precision:.2f}, recall"
            f" {self.recall:.2f}"
        )


def _divide(numerator: int, denominator: int) -> float:
    """Return a fraction, or 0 if it is undefined."""
    return numerator / denominator if denominator else 0.0


def count_objects(truth: Labels, labels: Labels) -> ObjectCounts:
    """Match the objects of two label volumes of the same shape."""
    shared_voxels = count_shared_voxels(truth, labels)
    true_sizes, found_sizes = shared_voxels.sum(axis=1)[1:, None], shared_voxels.sum(axis=0)[None, 1:]
    overlaps = shared_voxels[1:, 1:]
    iou = overlaps / np.maximum(true_sizes + found_sizes - overlaps, 1)
    true_count, found_count = overlaps.shape
    return ObjectCounts(
        true_count, found_count, int(np.count_nonzero(iou > MATCHING_IOU)), int(np.count_nonzero(iou > STRICT_IOU))
    )


class SegmentedPart(NamedTuple):
    """Labels [Z, Y, X] of a part at the original resolution, and statistics of its objects on the network's grid."""

    labels: Labels
    objects: Objects


@torch.no_grad()
def segment_part(network: Network, part: StackPart, spec: ModelSpec) -> SegmentedPart:
    """Segment a part of a stack, with the windows and the decoding of the model."""
    image = torch.from_numpy(part.image)[None, None]
    scores = sliding_window_inference(
        image, spec.input.roi_size, 2, lambda windows: network(windows).cpu(), WINDOW_OVERLAP, mode="gaussian"
    )
    size = as_size(part.image.shape)
    decoder = InstanceDecoder(spec, require_instances(spec), size, None)
    decoder.add(0, 0, torch.as_tensor(scores))
    segmentation = decoder.finish()
    if segmentation.objects is None:
        raise TypeError("The instance decoder returned no objects.")
    return SegmentedPart(resample_segmentation(segmentation, as_size(part.truth.shape)).pixels, segmentation.objects)


def score_parts(network: Network, parts: Sequence[StackPart], spec: ModelSpec) -> ObjectCounts:
    """Segment parts of stacks, and compare the objects with the annotated ones at the original resolution."""
    counts = ObjectCounts()
    for part in parts:
        counts = counts.merge(count_objects(part.truth, segment_part(network, part, spec).labels))
    return counts


class Validator:
    """Scores networks on the validation parts of the stacks.

    tiles  images and targets of some cubes of each part, for the loss
    """

    def __init__(self, parts: Sequence[StackPart], spec: ModelSpec, edge: int) -> None:
        self._spec = spec
        self.tiles = [cut_tiles((part.image, part.labels), np.asarray, edge) for part in parts]
        self._parts = [limit_part(part, MAX_VALIDATION_VOXELS // len(parts)) for part in parts]

    @torch.no_grad()
    def validate(self, network: Network) -> ValidationScores:
        """Return the scores of a network."""
        losses, dice_scores = list[float](), list[Tensor]()
        for images, targets in self.tiles:
            scores = network(images).cpu()
            losses.append(float(instance_loss(scores, targets)))
            dice_scores.append(compute_dice((scores[:, :1] > 0).float(), targets[:, :1]))
        mean_dice = float(torch.cat(dice_scores).nanmean())
        counts = score_parts(network, self._parts, self._spec)
        return ValidationScores(
            sum(losses) / len(losses),
            mean_dice if math.isfinite(mean_dice) else None,
            counts.f1,
            counts.f1_strict,
            counts.precision,
            counts.recall,
        )


def limit_part(part: StackPart, max_voxels: int) -> StackPart:
    """Halve the longest axis of a part until it has at most `max_voxels`. Keep the half with more object voxels."""
    while part.image.size > max_voxels:
        axis = int(np.argmax(part.image.shape))
        length = part.truth.shape[axis]
        if length < 2:
            break
        halves = cut_part(part, axis, 0, length // 2), cut_part(part, axis, length // 2, length)
        part = max(halves, key=lambda half: int(np.count_nonzero(half.truth)))
    return part
