from __future__ import annotations

import numpy as np

from scripts.recipes.advice import Outcome, apply_suggestion, follow_advice, report
from scripts.recipes.calibration_cases import Case
from service.core.quantities import Diameter
from service.core.types import Options, Segmentation, Volume
from service.inference.types import QualityWarning, Result

TRUTH = np.array([[[1, 1, 2, 2]]], np.uint16)
MERGED = np.array([[[1, 1, 1, 1]]], np.uint16)


def segment_case(case: Case, model: str | None, options: Options) -> Result:
    """Return the true labels only if the options contain the suggested diameter."""
    is_right = model is None and options.diameter == Diameter((2.0,), "px")
    warning = None if case.stack == "certain" else QualityWarning(0.1, "Try diameter=2px.", "diameter=2px")
    return Result(Segmentation(TRUTH if is_right else MERGED, "labels"), {}, (), quality_warning=warning)


def test_the_advice_of_warnings_is_followed() -> None:
    volume = Volume.from_array(TRUTH[None])
    cases = [Case("usual", stack, "default", volume, TRUTH) for stack in ("certain", "uncertain")]
    outcomes = list(follow_advice([*cases, Case("noise", "noise 0", "default", volume, None)], segment_case))
    assert outcomes == [Outcome("uncertain, default", "diameter=2px", 0.0, 1.0)]
    assert list(report(outcomes))[-1] == "F1 increased in 1 of 1 cases."


def test_every_kind_of_suggestion_is_applied() -> None:
    options = Options(diameter=Diameter((9.0,), "px"))
    assert apply_suggestion(options, {"model": "membranes"}) == ("membranes", Options())
    model, filtered = apply_suggestion(options, {"min_confidence": "0.8"})
    assert (model, filtered.diameter, filtered.postprocessing.min_confidence) == (None, options.diameter, 0.8)
