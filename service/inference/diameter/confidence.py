"""Confidence in objects and in a result, computed from the statistics of the objects.

On images that resemble its training data, a network predicts high foreground probabilities for the voxels of objects
and one high peak of the distance for each object, and objects are about as large as expected. On other images, all
three properties deteriorate.

The confidence of a calibrated model is a probability: of the objects with a confidence of 0.9, nine in ten match a true
object with an intersection over union (IoU) above 0.5. The confidence in a result is the expected F1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import Diameter
from service.core.types import Objects
from service.inference.diameter.advice import (
    CLEAR_CONFIDENCE,
    MIN_CONFIDENCE_ON_SHEETS,
    MIN_DIAMETER_RATIO,
    Evidence,
    drop_missing_models,
    make_low_confidence_warning,
    make_no_objects_warning,
    make_sheets_warning,
)
from service.inference.types import QualityWarning
from service.models.spec import Calibration, ModelSpec

# Maximum mean foreground probability. Logits from -8 to 8 cannot express a higher probability.
MAX_FOREGROUND_PROBABILITY = 0.9996

# Minimum number of objects from which a smaller diameter is derived.
MIN_OBJECTS_FOR_DIAMETER = 10

# Maximum ratio between the numbers of voxels after and before a stack is enlarged for a smaller diameter, as in trials.
MAX_ENLARGEMENT = 2.8**3

# Maximum absolute log-odds of a result that the confidence of its objects depends on.
MAX_RESULT_LOG_ODDS = 2.0

# Minimum fraction of a stack that a single object fills if no background is visible, and the maximum confidence in this
# object. Whether it has the outline of a true object cannot be seen.
FILLED_FRACTION = 0.9
MAX_CONFIDENCE_WITHOUT_BACKGROUND = 0.3

# Report clear objects only if the confidence in them exceeds the confidence in all objects by this factor.
MIN_CONFIDENCE_RATIO = 2.0


class Features(NamedTuple):
    """Features of the confidence model. Means are weighted by voxel counts, so that specks have little influence.

    certainty  logit of the mean foreground probability of the objects' voxels
    peak       mean distance at the peaks of objects
    size       absolute logarithm of the ratio between the typical diameter and the expected diameter
    giants     fraction of voxels in objects that are larger than twice the expected diameter
    """

    certainty: float
    peak: float
    size: float
    giants: float

    @classmethod
    def measure(cls, objects: Objects, expected_diameter: float) -> Features:
        """Compute the features of one or more objects. The expected diameter is the model's, in voxels."""
        voxel_share = objects.voxel_counts / objects.voxel_counts.sum()
        confidence = min(float((voxel_share * objects.confidence).sum()), MAX_FOREGROUND_PROBABILITY)
        diameters = np.cbrt(6 / np.pi * objects.voxel_counts)
        return cls(
            math.log(confidence / (1 - confidence)),
            float((voxel_share * np.nan_to_num(objects.peaks)).sum()),
            abs(math.log(compute_typical_diameter(objects) / expected_diameter)),
            float(voxel_share[diameters > 2 * expected_diameter].sum()),
        )


def compute_typical_diameter(objects: Objects) -> float:
    """Return the diameter in voxels of a sphere with the volume of the object that contains the median voxel."""
    return float(np.cbrt(6 / np.pi * objects.median_size))


def find_smaller_diameter(
    objects: Objects, expected_diameter: float, used_diameter: Sequence[float] | None
) -> Diameter | None:
    """Return the diameter of most objects of a result if it is much smaller than the diameter that was used.

    In a few windows of a stack with sparse objects, large bright structures can hide that most objects are small.

    expected_diameter  the model's, in voxels of its grid
    used_diameter      object diameter along (z, y, x) that was used, in voxels; None if the model has no diameter

    Returns None if there are too few objects, or if the stack would have to be enlarged too much.
    """
    if len(objects) < MIN_OBJECTS_FOR_DIAMETER or used_diameter is None:
        return None
    ratio = float(np.cbrt(6 / np.pi * np.median(objects.voxel_counts))) / expected_diameter
    z, y, x = (length * ratio for length in used_diameter)
    if ratio * MIN_DIAMETER_RATIO > 1 or expected_diameter**3 > MAX_ENLARGEMENT * z * y * x:
        return None
    return Diameter((z, y, x), "px")


def predict_confidence(objects: Objects, expected_diameter: float, calibration: Calibration) -> float | None:
    """Return the probability that a result is good, computed by logistic regression; None if there are no objects.

    Use it to compare the results of one model. It is not on the scale of the calibrated confidence.
    """
    if not len(objects):
        return None
    return float(_logistic(np.array(compute_log_odds(objects, expected_diameter, calibration))))


def compute_log_odds(objects: Objects, expected_diameter: float, calibration: Calibration) -> float:
    """Return the log-odds that a result with one or more objects is good."""
    weights = (calibration.certainty, calibration.peak, calibration.size, calibration.giants)
    features = Features.measure(objects, expected_diameter)
    return calibration.intercept + sum(weight * value for weight, value in zip(weights, features, strict=True))


def _logistic(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(log_odds, -50.0, 50.0)))
    return probabilities


def measure_object_features(
    objects: Objects, expected_diameter: float, calibration: Calibration
) -> NDArray[np.float64]:
    """Return the features of each object [N, 5], in the order of the coefficients of `ObjectCalibration`."""
    if not len(objects):
        return np.zeros((0, 5))
    probabilities = np.minimum(objects.confidence.astype(np.float64), MAX_FOREGROUND_PROBABILITY)
    diameters = np.cbrt(6 / np.pi * objects.voxel_counts)
    result_log_odds = compute_log_odds(objects, expected_diameter, calibration)
    return np.column_stack(
        [
            np.log(probabilities / (1 - probabilities)),
            np.nan_to_num(objects.peaks.astype(np.float64)),
            np.abs(np.log(diameters / expected_diameter)),
            np.full(len(objects), np.clip(result_log_odds, -MAX_RESULT_LOG_ODDS, MAX_RESULT_LOG_ODDS)),
            np.maximum(np.log(compute_typical_diameter(objects) / diameters), 0.0),
        ]
    )


def calibrate_objects(objects: Objects, spec: ModelSpec) -> Objects:
    """Return the objects with their calibrated confidence, or unchanged if the model is not calibrated."""
    if spec.confidence is None or (model := spec.confidence.objects) is None or spec.input.diameter is None:
        return objects
    features = measure_object_features(objects, spec.input.diameter, spec.confidence)
    weights = np.array([model.certainty, model.peak, model.size, model.result, model.fragment])
    log_odds = model.intercept + features @ weights
    return replace(objects, match_probability=_logistic(log_odds).astype(np.float32))


def limit_confidence(objects: Objects, labels: NDArray[np.unsignedinteger]) -> Objects:
    """Return objects from `calibrate_objects`, with a low confidence if there is only one and it fills the stack.

    labels  labels of the stack, [Z, Y, X]
    """
    if objects.match_probability is None or len(objects) != 1:
        return objects
    if np.count_nonzero(labels) < FILLED_FRACTION * labels.size:
        return objects
    limit = np.float32(MAX_CONFIDENCE_WITHOUT_BACKGROUND)
    return replace(objects, match_probability=np.minimum(objects.match_probability, limit))


def estimate_f1(match_probability: NDArray[np.floating]) -> float | None:
    """Return the expected F1 of a result, given the probability [N] that each object matches a true one.

    F1 is the number of matches, divided by the mean of the numbers of objects found and true objects. The number of
    true objects is assumed to be the number found: as many are missed as are wrong. Returns None without objects.
    """
    return float(match_probability.mean()) if len(match_probability) else None


def count_clear_objects(objects: Objects, expected_diameter: float, calibration: Calibration) -> int:
    """Return the number of clear objects if most of the other objects look like noise.

    Returns 0 if most objects are clear, or if the confidence in the clear objects is not much higher than the
    confidence in all objects.
    """
    clear_objects = objects.select(objects.confidence >= CLEAR_CONFIDENCE)
    overall_confidence, clear_confidence = (
        predict_confidence(objects, expected_diameter, calibration),
        predict_confidence(clear_objects, expected_diameter, calibration),
    )
    if overall_confidence is None or clear_confidence is None or 2 * len(clear_objects) > len(objects):
        return 0
    return len(clear_objects) if clear_confidence > MIN_CONFIDENCE_RATIO * overall_confidence else 0


class ConfidenceAssessment(NamedTuple):
    """Confidence in a result and the warning for the user.

    confidence       confidence, 0 to 1; None if it is not known. If the model is calibrated, the expected F1
    quality_warning  the warning; None if no warning is needed
    """

    confidence: float | None
    quality_warning: QualityWarning | None


def _compute_confidence(
    objects: Objects, expected_diameter: float, calibration: Calibration
) -> tuple[float | None, float]:
    """Return the confidence, and the threshold below which it is low."""
    if calibration.objects is None or objects.match_probability is None:
        return predict_confidence(objects, expected_diameter, calibration), calibration.threshold
    return estimate_f1(objects.match_probability), calibration.objects.threshold


def assess_objects(
    objects: Objects | None, spec: ModelSpec, find_evidence: Callable[[], Evidence]
) -> ConfidenceAssessment:
    """Return the confidence in the objects of a result from `calibrate_objects`, and a warning if it is low.

    `objects` is None for outputs other than labels, because only labels have a confidence. `find_evidence` is slow, so
    it is called only if the confidence is low, if it may be too high because the stack shows membranes, or if no object
    was found.
    """
    calibration, expected_diameter = spec.confidence, spec.input.diameter
    if objects is None:
        return ConfidenceAssessment(None, None)
    if calibration is None or expected_diameter is None:
        return ConfidenceAssessment(None, None if len(objects) else make_no_objects_warning(find_evidence(), None))
    confidence, threshold = _compute_confidence(objects, expected_diameter, calibration)
    if confidence is None:
        available = drop_missing_models(calibration, spec.folder.parent)
        return ConfidenceAssessment(None, make_no_objects_warning(find_evidence(), available))
    if confidence >= max(threshold, MIN_CONFIDENCE_ON_SHEETS):
        return ConfidenceAssessment(confidence, None)
    calibration = drop_missing_models(calibration, spec.folder.parent)
    if confidence >= threshold:
        warning = None if calibration.sheets is None else make_sheets_warning(confidence, find_evidence(), calibration)
        return ConfidenceAssessment(confidence, warning)
    evidence = find_evidence()
    evidence = evidence._replace(
        num_clear_objects=count_clear_objects(objects, expected_diameter, calibration),
        found_diameter=find_smaller_diameter(objects, expected_diameter, evidence.used_diameter),
    )
    return ConfidenceAssessment(confidence, make_low_confidence_warning(confidence, evidence, calibration))
