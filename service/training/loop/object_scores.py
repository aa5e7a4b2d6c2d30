"""Scores of the objects that a network finds: counts of matching objects, F1 scores and variation of information."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

# Minimum IoU of matching objects, and of objects that match well.
MATCHING_IOU = 0.5
STRICT_IOU = 0.7


class ObjectCounts(NamedTuple):
    """Numbers of annotated, segmented and matching objects. Counts of several stacks can be added.

    voxels                  number of annotated voxels in objects; 0 if only objects are counted
    split_bits, merge_bits  conditional entropies of the voxels, multiplied by their number
    """

    true: int = 0
    found: int = 0
    matched: int = 0
    strictly_matched: int = 0
    voxels: int = 0
    split_bits: float = 0.0
    merge_bits: float = 0.0

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

    @property
    def voi(self) -> float | None:
        """Variation of information in bits, or None if only objects are counted."""
        return (self.split_bits + self.merge_bits) / self.voxels if self.voxels else None

    @property
    def partition_rating(self) -> float | None:
        """F1 score minus the variation of information, or None if only objects are counted."""
        return rate_partition(self.f1, self.voi)

    def merge(self, other: ObjectCounts) -> ObjectCounts:
        """Return the sums of two counts."""
        return ObjectCounts(*map(operator.add, self, other))

    def describe(self) -> str:
        """Return the scores for users."""
        scores = (
            f"F1 {self.f1:.2f} at IoU 0.5 and {self.f1_strict:.2f} at IoU 0.7, precision {self.precision:.2f}, recall"
            f" {self.recall:.2f}"
        )
        if self.voxels:
            splits, merges = self.split_bits / self.voxels, self.merge_bits / self.voxels
            scores += f", variation of information {splits + merges:.2f}: {splits:.2f} splits, {merges:.2f} merges"
        objects = "object" if self.true == 1 else "objects"
        return f"{self.matched} of {self.true} {objects} correct, {self.found - self.matched} false ({scores})"


def rate_partition(f1: float, voi: float | None) -> float | None:
    """Rate a partition of a volume into objects: F1 score minus the variation of information, if this is known.

    Near its minimum, the variation of information depends little on the decoding, whereas objects get lost or split.
    """
    return None if voi is None else f1 - voi


def compute_standard_error(f1: float, object_count: int) -> float:
    """Return the standard error of an F1 score that was measured on this number of annotated objects."""
    return math.sqrt(f1 * (1 - f1) / max(object_count, 1))


def prefer_first(f1_scores: Sequence[float], object_count: int) -> int:
    """Return the index of the first score that is at most a standard error below the best one.

    Breiman et al. (1984) choose the simplest model by this rule. Scores on few objects differ by chance, and the best
    of many is usually too high.
    """
    best = max(f1_scores)
    min_f1 = best - compute_standard_error(best, object_count)
    return next(index for index, f1 in enumerate(f1_scores) if f1 >= min_f1)


def _divide(numerator: int, denominator: int) -> float:
    """Return a fraction, or 0 if it is undefined."""
    return numerator / denominator if denominator else 0.0
