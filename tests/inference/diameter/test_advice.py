from typing import Any

import numpy as np
import pytest
import torch
from landscapes import CENTERS, compute_distances

from service.core.quantities import Diameter
from service.inference.diameter.advice import (
    Evidence,
    find_diameter_correction,
    make_low_confidence_warning,
    make_no_objects_warning,
    make_sheets_warning,
)
from service.inference.types import QualityWarning
from service.models.spec import Calibration

CALIBRATION = Calibration(intercept=-15, certainty=2, peak=14, size=-3, giants=-1, sheets="membranes")

SHELLS = torch.from_numpy(np.exp(-(((compute_distances(*CENTERS) - 11) / 1.5) ** 2))).float()[None]
BLANK = torch.zeros(1, 32, 32, 32)
BALLS = torch.from_numpy(np.clip((9 - compute_distances(*CENTERS)) / 3, 0, 1)).float()[None]
USED_DIAMETER = (20.0, 20.0, 20.0)
SMALL_DIAMETER = Diameter((4.0,), "px")


def get_suggestion(*, calibration: Calibration = CALIBRATION, **evidence: Any) -> str:
    defaults: dict[str, Any] = {"windows": [BALLS], "likely_diameter": None, "used_diameter": USED_DIAMETER}
    warning = make_low_confidence_warning(0.1, Evidence(**defaults | evidence), calibration)
    assert warning.suggestion in warning.detail
    return warning.suggestion


def test_warnings_suggest_the_most_likely_parameter() -> None:
    assert QualityWarning(0.1, "The labels may be wrong.", "diameter=4,8,8px").suggested_parameters == {
        "diameter": "4,8,8px"
    }
    assert QualityWarning(0.1, "The labels may be wrong.", "").suggested_parameters == {}
    assert get_suggestion(windows=[SHELLS], likely_diameter=SMALL_DIAMETER) == "model=membranes"
    assert get_suggestion(likely_diameter=SMALL_DIAMETER) == "diameter=4px"
    assert get_suggestion(likely_diameter=SMALL_DIAMETER, num_clear_objects=9) == "diameter=4px"
    assert (
        get_suggestion(likely_diameter=SMALL_DIAMETER, num_clear_objects=9, is_diameter_given=True)
        == get_suggestion(num_clear_objects=9)
        == "min_confidence=0.8"
    )
    other_calibration = CALIBRATION.model_copy(update={"sheets": None, "blobs": "nuclei"})
    assert get_suggestion(calibration=other_calibration, likely_diameter=SMALL_DIAMETER) == "model=nuclei"
    assert (
        get_suggestion(calibration=other_calibration, windows=[SHELLS], likely_diameter=SMALL_DIAMETER)
        == "diameter=4px"
    )


def test_only_similar_diameters_are_corrections() -> None:
    warning = QualityWarning(0.1, "The labels may be wrong.", "diameter=9,30,30px")
    assert find_diameter_correction(warning, (20.0, 20.0, 20.0)) == Diameter((9.0, 30.0, 30.0), "px")
    for used_diameter in ((9.0, 17.0, 17.0), (9.0, 53.0, 53.0)):
        assert find_diameter_correction(warning, used_diameter) is None
    for other_warning in (None, warning._replace(suggestion="model=membranes"), warning._replace(suggestion="")):
        assert find_diameter_correction(other_warning, (20.0, 20.0, 20.0)) is None


@pytest.mark.parametrize("is_given", [False, True])
def test_training_is_suggested_if_no_parameter_is_likely_to_help(is_given: bool) -> None:
    for likely_diameter in (None, Diameter((18.0, 22.0, 22.0), "px")):
        warning = make_low_confidence_warning(
            0.1,
            Evidence(
                [BALLS],
                likely_diameter,
                USED_DIAMETER,
                is_diameter_given=is_given,
                has_postprocessing=True,
                num_clear_objects=9,
            ),
            CALIBRATION,
        )
        assert warning.suggestion == ""
        assert "train a model" in warning.detail
        assert ("diameter=" in warning.detail) is not is_given


def test_warnings_give_a_reason_why_no_object_was_found() -> None:
    warnings = {
        reason: make_no_objects_warning(
            Evidence([window], likely_diameter, USED_DIAMETER, has_postprocessing=has_options), CALIBRATION
        )
        for reason, window, likely_diameter, has_options in (
            ("same gray value", BLANK, SMALL_DIAMETER, True),
            ("min_confidence=", BALLS, SMALL_DIAMETER, True),
            ("membranes", SHELLS, SMALL_DIAMETER, False),
            ("4 px wide", BALLS, SMALL_DIAMETER, False),
            ("train a model", BALLS, None, False),
        )
    }
    for reason, warning in warnings.items():
        assert warning.confidence is None
        assert warning.detail.startswith("No object was found")
        assert reason in warning.detail
    assert [warning.suggestion for warning in warnings.values()] == ["", "", "model=membranes", "diameter=4px", ""]
    assert make_no_objects_warning(Evidence([SHELLS], None, None), None).suggestion == ""


def test_diameter_of_most_objects_is_suggested_if_nothing_else_helps() -> None:
    found_diameter = Diameter((6.0, 15.0, 15.0), "px")
    assert get_suggestion(found_diameter=found_diameter) == "diameter=6,15,15px"
    assert get_suggestion(found_diameter=found_diameter, is_diameter_given=True) == "diameter=6,15,15px"
    assert get_suggestion(found_diameter=found_diameter, likely_diameter=SMALL_DIAMETER) == "diameter=4px"
    assert get_suggestion(found_diameter=found_diameter, num_clear_objects=9) == "min_confidence=0.8"


def test_membranes_cause_a_warning_at_moderate_confidence() -> None:
    warning = make_sheets_warning(0.7, Evidence([SHELLS], None, USED_DIAMETER), CALIBRATION)
    assert warning is not None
    assert (warning.confidence, warning.suggestion) == (0.7, "model=membranes")
    with_blobs = CALIBRATION.model_copy(update={"blobs": "nuclei"})
    assert make_sheets_warning(0.7, Evidence([BALLS], None, USED_DIAMETER), with_blobs) is None
