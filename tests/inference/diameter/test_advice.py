from typing import Any

import numpy as np
import pytest
import torch
from landscapes import CENTERS, compute_distances

from service.core.quantities import Diameter
from service.inference.diameter.advice import (
    Correction,
    Evidence,
    are_flat,
    compare_diameters,
    find_correction,
    find_diameter_correction,
    find_flat_correction,
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
    # Spheres of 20 voxels have about the same volume as these flat objects, but another shape.
    assert get_suggestion(likely_diameter=Diameter((6.0, 36.0, 36.0), "px")) == "diameter=6,36,36px"
    assert get_suggestion(likely_diameter=Diameter((16.0, 22.0, 22.0), "px")) == ""
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


def test_only_similar_diameters_are_corrections() -> None:
    warning = QualityWarning(0.1, "The labels may be wrong.", "diameter=9,30,30px")
    # The width is similar, or the volume, as for a sphere of 18 voxels.
    for used in ((20.0, 20.0, 20.0), (12.0, 12.0, 12.0)):
        correction = find_diameter_correction(warning, used)
        assert correction is not None
        assert correction.diameter == Diameter((9.0, 30.0, 30.0), "px")
        assert correction.min_gain > 0
    for used in ((9.0, 11.0, 11.0), (60.0, 60.0, 60.0)):
        assert find_diameter_correction(warning, used) is None
    for other_warning in (None, QualityWarning(0.1, "", ""), QualityWarning(0.1, "", "model=membranes")):
        assert find_diameter_correction(other_warning, (20.0, 20.0, 20.0)) is None


@pytest.mark.parametrize(
    ("likely", "used", "is_corrected"),
    [
        ("4,18,18px", 18.0, True),  # the width
        ("4,18,18px", 9.0, True),  # the diameter of a sphere with the same volume
        ("4,18,18px", 40.0, False),
        ("12,18,18px", 18.0, False),
        ("18px", 18.0, False),
    ],
)
def test_the_estimate_for_flat_objects_replaces_a_similar_diameter(
    likely: str, used: float, is_corrected: bool
) -> None:
    correction = find_flat_correction(Diameter.parse(likely), (used, used, used))
    assert (correction is not None) == is_corrected
    if correction is not None:
        note = correction.make_note(Diameter((used,), "px"), (used, used, used), 0.6)
        assert f"specified object diameter, {used:g}px" in note
        assert note.endswith(f"set diameter={used:g},{used:g},{used:g}px.")
    assert find_flat_correction(None, (used, used, used)) is None


def test_flat_and_round_diameters_with_the_same_volume_differ_only_in_the_plane() -> None:
    assert compare_diameters((5.0, 20.0, 20.0), (2000 ** (1 / 3),) * 3) == pytest.approx((0.462, 0), abs=0.001)
    assert compare_diameters((8.0, 8.0, 8.0), (8.0, 8.0, 8.0)) == (0, 0)


@pytest.mark.parametrize(("depth", "width", "expected"), [(4, 16, True), (12, 16, False), (16, 12, False)])
def test_flat_objects_are_recognized_in_labels(depth: int, width: int, *, expected: bool) -> None:
    z, y, x = np.indices((16, 16, 16)) - 7.5
    ellipsoid = (2 * z / depth) ** 2 + ((2 * y / width) ** 2 + (2 * x / width) ** 2) <= 1
    labels = np.concatenate([ellipsoid, 2 * ellipsoid, 5 * ellipsoid], axis=2).astype(np.uint16)
    assert are_flat(labels) == expected
    assert not are_flat(np.zeros((4, 8, 8), np.uint16))


@pytest.mark.parametrize(
    ("confidence", "used", "is_corrected"),
    [(0.7, 15.0, True), (0.7, 11.0, False), (0.7, 30.0, False), (0.9, 15.0, False), (None, 15.0, False)],
)
def test_a_diameter_is_compared_with_the_estimate_at_moderate_confidence(
    confidence: float | None, used: float, *, is_corrected: bool
) -> None:
    estimate = Diameter((10.0,), "px")
    correction = find_correction(None, confidence, (used, used, used), lambda: estimate, is_flat=False)
    assert correction == (Correction(estimate) if is_corrected else None)


def test_the_suggestion_of_a_warning_needs_no_other_estimate() -> None:
    warning = QualityWarning(0.4, "The labels may be wrong.", "diameter=10px")
    correction = find_correction(warning, 0.4, (15.0, 15.0, 15.0), pytest.fail, is_flat=False)
    assert correction == Correction(Diameter((10.0,), "px"))
