from typing import Any

import numpy as np
import pytest
import torch
from landscapes import CENTRES, distance_to

from service.core.quantities import Diameter
from service.inference.diameter.advice import Evidence, explain, explain_nothing
from service.inference.types import Doubt
from service.models.spec import Calibration

CALIBRATION = Calibration(intercept=-15, certainty=2, peak=14, size=-3, giants=-1, sheets="membranes")

SHELLS = torch.from_numpy(np.exp(-(((distance_to(*CENTRES) - 11) / 1.5) ** 2))).float()[None]
BLANK = torch.zeros(1, 32, 32, 32)
BALLS = torch.from_numpy(np.clip((9 - distance_to(*CENTRES)) / 3, 0, 1)).float()[None]
USED = (20.0, 20.0, 20.0)
NARROW = Diameter((4.0,), "px")


def attempt(*, calibration: Calibration = CALIBRATION, **evidence: Any) -> str:
    given: dict[str, Any] = {"windows": [BALLS], "guess": None, "used": USED}
    doubt = explain(0.1, Evidence(**given | evidence), calibration)
    assert doubt.attempt in doubt.detail
    return doubt.attempt


def test_the_next_try_is_named_and_is_a_value_of_a_parameter() -> None:
    assert Doubt(0.1, "It is odd.", "diameter=4,8,8px").suggested == {"diameter": "4,8,8px"}
    assert Doubt(0.1, "It is odd.", "").suggested == {}
    assert attempt(windows=[SHELLS], guess=NARROW) == "model=membranes"
    assert attempt(guess=NARROW) == "diameter=4px"
    assert attempt(guess=NARROW, sure=9) == "diameter=4px"
    assert attempt(guess=NARROW, sure=9, stated=True) == attempt(sure=9) == "min_confidence=0.8"
    other_way = CALIBRATION.model_copy(update={"sheets": None, "blobs": "nuclei"})
    assert attempt(calibration=other_way, guess=NARROW) == "model=nuclei"
    assert attempt(calibration=other_way, windows=[SHELLS], guess=NARROW) == "diameter=4px"


@pytest.mark.parametrize("stated", [False, True])
def test_training_is_advised_where_no_request_is_known_to_help(stated: bool) -> None:
    for guess in (None, Diameter((18.0, 22.0, 22.0), "px")):
        unknown = explain(0.1, Evidence([BALLS], guess, USED, stated=stated, steered=True, sure=9), CALIBRATION)
        assert unknown.attempt == ""
        assert "train a model" in unknown.detail
        assert ("diameter=" in unknown.detail) is not stated


def test_a_reason_is_named_why_nothing_was_found() -> None:
    found = {
        reason: explain_nothing(Evidence([window], guess, USED, steered=steered), CALIBRATION)
        for reason, window, guess, steered in (
            ("one grey value", BLANK, NARROW, True),
            ("min_confidence=", BALLS, NARROW, True),
            ("membranes", SHELLS, NARROW, False),
            ("4px wide", BALLS, NARROW, False),
            ("train a model", BALLS, None, False),
        )
    }
    for reason, doubt in found.items():
        assert doubt.confidence is None
        assert doubt.detail.startswith("No object was found: ")
        assert reason in doubt.detail
    assert [doubt.attempt for doubt in found.values()] == ["", "", "model=membranes", "diameter=4px", ""]
    assert explain_nothing(Evidence([SHELLS], None, None), None).attempt == ""
