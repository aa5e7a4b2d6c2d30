"""Calibration of the confidence of a trained model on held-out parts of the stacks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from service.core.types import Objects
from service.inference.diameter.confidence import compute_log_odds
from service.models.spec import Calibration

# Lowest and highest confidence in results for stacks like the training stacks. A few held-out objects cannot justify
# more extreme values.
CONFIDENCE_RANGE = (0.05, 0.95)


def calibrate(base: Calibration, held_out_objects: Sequence[Objects], diameter: float, f1: float) -> Calibration | None:
    """Return a calibration with which the confidence in the results for the held-out parts equals their F1 score.

    Training shifts the probabilities and distances of all objects, so the intercept of the base model is replaced. The
    other coefficients are kept: results that look worse than the held-out ones get a lower confidence, as with the base
    model. The calibration of single objects is dropped, because the held-out parts contain too few of them to fit it
    again. Returns None if no objects were found.

    held_out_objects  objects found in each held-out part
    diameter          object diameter of the model in voxels
    f1                F1 score in the held-out parts
    """
    log_odds = [compute_log_odds(objects, diameter, base) for objects in held_out_objects if len(objects)]
    if not log_odds:
        return None
    target = min(max(f1, CONFIDENCE_RANGE[0]), CONFIDENCE_RANGE[1])
    intercept = base.intercept + math.log(target / (1 - target)) - float(np.mean(log_odds))
    return base.model_copy(update={"intercept": round(intercept, 3), "objects": None})
