"""Validation of a network: losses on tiles, and scores of the objects on held-out parts of the stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.core.types import Objects
from service.models.architectures.monai import REQUIRED_PACKAGES, hide_packages_except
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries, Instances
from service.training.examples import Example, cut_tiles
from service.training.loop.decoding_choice import ScoredPart, choose_decoding, match_objects
from service.training.loop.object_scores import ObjectCounts
from service.training.loop.plan import ValidationScores
from service.training.stacks.parts import StackPart, compute_part_targets, crop_to_annotated_planes, cut_part
from service.training.targets.choice import Targets, choose_targets

with hide_packages_except(REQUIRED_PACKAGES):
    from monai.inferers.utils import sliding_window_inference
    from monai.metrics.meandice import compute_dice

Network = Callable[[Tensor], Tensor]
"""Function that returns the raw scores [B, 2, z, y, x], float32, of images [B, 1, z, y, x]."""

# Maximum number of voxels of all validation parts that are segmented in each validation.
MAX_VALIDATION_VOXELS = 2**21
WINDOW_OVERLAP = 0.25


@torch.no_grad()
def compute_part_scores(network: Network, part: StackPart, spec: ModelSpec) -> ScoredPart:
    """Run the network on a part of a stack with the windows of the model."""
    image = torch.from_numpy(part.image)[None, None]
    scores = sliding_window_inference(
        image, spec.input.roi_size, 2, lambda windows: network(windows).cpu(), WINDOW_OVERLAP, mode="gaussian"
    )
    return ScoredPart(torch.as_tensor(scores), part.truth, part.unknown_truth)


def score_parts(
    network: Network, parts: Sequence[StackPart], spec: ModelSpec
) -> tuple[ObjectCounts, Sequence[Objects]]:
    """Segment parts of stacks, and compare the objects with the annotated ones at the original resolution.

    Returns the counts of all parts together, and the objects found in each part.
    """
    counts, found_objects = ObjectCounts(), []
    for part in parts:
        part_counts, objects = _match_objects(compute_part_scores(network, part, spec), spec)
        counts = counts.merge(part_counts)
        found_objects.append(objects)
    return counts, found_objects


def _match_objects(part: ScoredPart, spec: ModelSpec) -> tuple[ObjectCounts, Objects]:
    if isinstance(spec.decoding, Boundaries):
        matches: tuple[ObjectCounts, Objects] = _boundary_choice().match_boundary_objects(part, spec)
        return matches
    return match_objects(part, spec)


def _boundary_choice() -> Any:
    """Return the module for boundaries, which needs an optional library."""
    return import_module("service.training.loop.boundary_choice")


class Validator:
    """Scores networks on the validation parts of the stacks.

    spec   spec of the model, whose thresholds are used unless others are clearly better
    tiles  images and targets of some cubes of each part, for the loss
    """

    def __init__(self, parts: Sequence[StackPart], spec: ModelSpec, edge: int) -> None:
        self.spec, self.targets = spec, choose_targets(spec)
        self.tiles = [_cut_part_tiles(part, edge, self.targets) for part in parts]
        self._parts = [limit_part(part, MAX_VALIDATION_VOXELS // len(parts)) for part in parts]

    @property
    def object_count(self) -> int:
        """Number of annotated objects."""
        return sum(part.object_count for part in self._parts)

    @torch.no_grad()
    def validate(self, network: Network) -> tuple[ValidationScores, Instances | Boundaries]:
        """Return the scores of a network, and the decoding with which it has these scores."""
        losses, dice_scores = list[float](), list[Tensor]()
        for images, targets in self.tiles:
            scores = network(images).cpu()
            losses.append(float(self.targets.loss(scores, targets)))
            if isinstance(self.spec.decoding, Instances):
                dice_scores.append(compute_dice((scores[:, :1] > 0).float(), targets[:, :1]))
        mean_dice = float(torch.cat(dice_scores).nanmean()) if dice_scores else math.nan
        scored_parts = [compute_part_scores(network, part, self.spec) for part in self._parts]
        if isinstance(self.spec.decoding, Boundaries):
            decoding, counts = _boundary_choice().choose_boundary_decoding(scored_parts, self.spec)
        else:
            decoding, counts = choose_decoding(scored_parts, self.spec)
        return ValidationScores(
            sum(losses) / len(losses),
            mean_dice if math.isfinite(mean_dice) else None,
            counts.f1,
            counts.f1_strict,
            counts.precision,
            counts.recall,
            counts.voi,
        ), decoding


def _cut_part_tiles(part: StackPart, edge: int, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return images [B, 1, e, e, e] and targets [B, T, e, e, e] of some cubes of a part."""
    annotated_part = crop_to_annotated_planes(part)
    return cut_tiles(Example(annotated_part.image, compute_part_targets(annotated_part, targets.compute)), edge)


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
