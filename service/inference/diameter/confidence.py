"""Confidence in a result, judged by what decoding knows of its objects.

A network that meets what it was trained for is sure of the voxels of an object, gives it one high peak of the distance,
and finds it as wide as it should be. On other stacks it is unsure of all three, whatever they show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from service.core.types import Objects
from service.inference.diameter.advice import SURE, Evidence, explain, explain_nothing, known_models
from service.inference.types import Doubt
from service.models.spec import Calibration, ModelSpec

# Nothing is more certain than scores from -8 to 8 can say.
CERTAIN = 0.9996

# How many times what is judged of all objects has to be what is judged of those alone that stand out.
SURER = 2.0


class Features(NamedTuple):
    """Evidence for a verdict; means are over voxels, so that a few specks do not count.

    certainty  logit of the mean probability of the objects' voxels to be foreground
    peak       mean of the distance at the peaks of objects
    size       how far the width of objects is from the one that the model works best at, as a logarithm
    giants     share of voxels in objects more than twice as wide as that
    """

    certainty: float
    peak: float
    size: float
    giants: float

    @classmethod
    def measure(cls, objects: Objects, wanted: float) -> Features:
        """Measure at least one object of a network that wants objects `wanted` voxels wide."""
        share = objects.voxels / objects.voxels.sum()
        confidence = min(float((share * objects.confidence).sum()), CERTAIN)
        widths = np.cbrt(6 / np.pi * objects.voxels)
        return cls(
            math.log(confidence / (1 - confidence)),
            float((share * np.nan_to_num(objects.peaks)).sum()),
            abs(math.log(typical_width(objects) / wanted)),
            float(share[widths > 2 * wanted].sum()),
        )


def typical_width(objects: Objects) -> float:
    """Return the diameter in voxels of a ball as large as the object that the median voxel belongs to."""
    return float(np.cbrt(6 / np.pi * objects.typical_size))


def judge(objects: Objects, wanted: float, calibration: Calibration) -> float | None:
    """Return the confidence in a result, 0 to 1, by logistic regression; None where nothing was found."""
    if not len(objects):
        return None
    weights = (calibration.certainty, calibration.peak, calibration.size, calibration.giants)
    features = Features.measure(objects, wanted)
    score = calibration.intercept + sum(weight * value for weight, value in zip(weights, features, strict=True))
    return 1 / (1 + math.exp(-min(max(score, -50.0), 50.0)))


def count_sure(objects: Objects, wanted: float, calibration: Calibration) -> int:
    """Return how many objects stand out from what looks like grain, 0 where they are most, or no better than all."""
    sure = objects.select(objects.confidence >= SURE)
    judged, alone = judge(objects, wanted, calibration), judge(sure, wanted, calibration)
    if judged is None or alone is None or 2 * len(sure) > len(objects):
        return 0
    return len(sure) if alone > SURER * judged else 0


class Judgement(NamedTuple):
    """Confidence in a result, 0 to 1, None where it is not known; and the reason not to trust it, None: it may be."""

    confidence: float | None
    doubt: Doubt | None


def judge_objects(objects: Objects | None, spec: ModelSpec, find_evidence: Callable[[], Evidence]) -> Judgement:
    """Return the confidence in the objects of a result of `spec`, None for an output without any.

    `find_evidence` is called only if confidence is low or nothing was found: it takes longer than all else.
    """
    calibration, wanted = spec.confidence, spec.input.diameter
    if objects is None:
        return Judgement(None, None)
    if calibration is None or wanted is None:
        return Judgement(None, None if len(objects) else explain_nothing(find_evidence(), None))
    confidence = judge(objects, wanted, calibration)
    if confidence is not None and confidence >= calibration.threshold:
        return Judgement(confidence, None)
    calibration, evidence = known_models(calibration, spec.folder.parent), find_evidence()
    if confidence is None:
        return Judgement(None, explain_nothing(evidence, calibration))
    evidence = evidence._replace(sure=count_sure(objects, wanted, calibration))
    return Judgement(confidence, explain(confidence, evidence, calibration))
