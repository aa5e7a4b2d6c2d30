"""Choice of the decoding of a trained network.

Fine-tuning changes how confident a network is, so the thresholds of its base model may remove correct objects. They are
chosen again on the validation parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.core.types import Objects, Segmentation
from service.inference.decoding.instances import InstanceDecoder, compute_min_object_confidence
from service.inference.decoding.postprocessing import require_instances
from service.inference.preprocessing.resample import resample_segmentation
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries, Instances
from service.training.loop.object_scores import MATCHING_IOU, STRICT_IOU, ObjectCounts, compute_standard_error
from service.training.stacks.overlaps import Labels, count_shared_voxels

# Candidates for `threshold`, `min_confidence` and `min_relative_odds`, in addition to the values of the base model.
THRESHOLDS = (0.4, 0.5, 0.6, 0.7)
MIN_CONFIDENCES = (0.0, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
MIN_RELATIVE_ODDS = (0.0,)
# Minimum gain of the sum of both F1 scores for which the thresholds of the base model are replaced. If there are few
# objects, the gain must also be larger than the standard error of the F1 score.
MIN_GAIN = 0.04

# Fraction of unknown voxels above which a segmented object is neither correct nor wrong.
MAX_UNKNOWN_FRACTION = 0.5


class ScoredPart(NamedTuple):
    """The scores of a part of a stack.

    scores   raw scores [1, K, z, y, x] on the grid of the network
    truth    true labels [Z, Y, X] at the original resolution
    unknown  mask [Z, Y, X] of voxels that are not annotated; None if all voxels are annotated
    """

    scores: torch.Tensor
    truth: Labels
    unknown: NDArray[np.bool_] | None = None


class ChosenDecoding(NamedTuple):
    """Parameters of the decoding, and the objects that are found with them."""

    decoding: Instances | Boundaries
    counts: ObjectCounts


class _Matches(NamedTuple):
    """The IoU [T, F] of true and found objects, and statistics of the F found objects."""

    iou: NDArray[np.float64]
    objects: Objects

    def count_confident(self, decoding: Instances) -> ObjectCounts:
        """Count the objects that are confident enough."""
        iou = self.iou[:, self.objects.confidence >= compute_min_object_confidence(decoding, self.objects)]
        true_count, found_count = iou.shape
        matched, strictly_matched = (int(np.count_nonzero(iou > limit)) for limit in (MATCHING_IOU, STRICT_IOU))
        return ObjectCounts(true_count, found_count, matched, strictly_matched)


def decode_part(part: ScoredPart, spec: ModelSpec, decoding: Instances) -> Segmentation:
    """Return the labels [Z, Y, X] of a part at its original resolution, with their objects."""
    size = as_size(part.scores.shape[2:])
    decoder = InstanceDecoder(spec, decoding, size, None)
    decoder.add(0, 0, part.scores)
    return resample_segmentation(decoder.finish(), as_size(part.truth.shape))


def choose_decoding(parts: Sequence[ScoredPart], spec: ModelSpec) -> ChosenDecoding:
    """Return the decoding with the highest F1 scores; the one of `spec` unless others are clearly better."""
    base = require_instances(spec)
    best = _count_all(parts, spec, base, [base])[0]
    best_rating = _rate(best) + max(MIN_GAIN, compute_standard_error(best.counts.f1, best.counts.true))
    confidences = sorted({base.min_confidence, *MIN_CONFIDENCES})
    for threshold in dict.fromkeys((base.threshold, *THRESHOLDS)):
        for odds in dict.fromkeys((base.min_relative_odds, *MIN_RELATIVE_ODDS)):
            changes = {"threshold": threshold, "min_relative_odds": odds}
            candidates = [base.model_copy(update={**changes, "min_confidence": value}) for value in confidences]
            choices = _count_all(parts, spec, candidates[0], candidates)
            ratings = _smooth([_rate(choice) for choice in choices])
            distances = [abs(value - base.min_confidence) for value in confidences]
            index = max(range(len(choices)), key=lambda index: (ratings[index], -distances[index]))
            if ratings[index] > best_rating + 1e-9:
                best, best_rating = choices[index], ratings[index]
    return best


def _smooth(ratings: Sequence[float]) -> NDArray[np.float64]:
    """Average ratings with their neighbors, because a threshold next to much worse ones is chosen by chance."""
    padded = np.pad(np.asarray(ratings, np.float64), 1, mode="edge")
    return (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4


def match_objects(part: ScoredPart, spec: ModelSpec) -> tuple[ObjectCounts, Objects]:
    """Match the objects of a part, decoded as `spec` says, with its true objects. Return the counts and the objects."""
    decoding = require_instances(spec)
    matches = _match(part, spec, decoding)
    return matches.count_confident(decoding), matches.objects


def _rate(choice: ChosenDecoding) -> float:
    return choice.counts.f1 + choice.counts.f1_strict


def _count_all(
    parts: Sequence[ScoredPart], spec: ModelSpec, decoding: Instances, candidates: Sequence[Instances]
) -> list[ChosenDecoding]:
    """Count the objects for decodings that differ only in the filters for confidence."""
    unfiltered = decoding.model_copy(update={"min_confidence": 0.0, "min_relative_odds": 0.0})
    matches = [_match(part, spec, unfiltered) for part in parts]
    results = []
    for candidate in candidates:
        counts = ObjectCounts()
        for part_matches in matches:
            counts = counts.merge(part_matches.count_confident(candidate))
        results.append(ChosenDecoding(candidate, counts))
    return results


def _match(part: ScoredPart, spec: ModelSpec, decoding: Instances) -> _Matches:
    segmentation = decode_part(part, spec, decoding)
    if segmentation.objects is None:
        raise TypeError("The instance decoder returned no objects.")
    objects = segmentation.objects
    shared_voxels = count_shared_voxels(part.truth, segmentation.pixels)
    true_sizes, found_sizes = shared_voxels.sum(axis=1)[1:, None], shared_voxels.sum(axis=0)[None, 1:]
    unknown_counts = np.zeros(len(objects), np.int64)
    if part.unknown is not None:
        unknown_counts = np.bincount(segmentation.pixels[part.unknown].ravel(), minlength=len(objects) + 1)[1:]
    overlaps = shared_voxels[1:, 1:]
    # Annotated objects have no unknown voxels, so only the known voxels of found objects are compared with them.
    iou = overlaps / np.maximum(true_sizes + found_sizes - unknown_counts - overlaps, 1)
    is_relevant = (unknown_counts <= MAX_UNKNOWN_FRACTION * found_sizes[0]) | (iou > MATCHING_IOU).any(axis=0)
    return _Matches(iou[:, is_relevant], objects.select(is_relevant))
