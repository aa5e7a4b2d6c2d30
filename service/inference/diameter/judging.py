"""The confidence in one result, and the reason for a low one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from service.core.types import Objects
from service.inference.diameter.confidence import Evidence, count_sure, explain, explain_nothing, judge, known_models
from service.inference.types import Doubt
from service.models.spec import ModelSpec


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
