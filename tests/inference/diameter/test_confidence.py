"""Confidence in results, and what is advised where there is little of it."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from service.core.quantities import Diameter
from service.core.types import Objects
from service.inference.diameter.confidence import (
    Evidence,
    count_sure,
    explain,
    explain_nothing,
    judge,
    shows_sheets,
    typical_width,
)
from service.inference.types import Doubt
from service.models.spec import Calibration

CALIBRATION = Calibration(intercept=-15, certainty=2, peak=14, size=-3, giants=-1, sheets="membranes")


def objects(widths: list[float], confidence: float, peak: float) -> Objects:
    voxels = np.round(np.pi / 6 * np.array(widths) ** 3).astype(np.int64)
    same = np.ones(len(widths), np.float32)
    return Objects(voxels, confidence * same, peak * same)


def confidence_in(found: Objects) -> float:
    judged = judge(found, 20.0, CALIBRATION)
    assert judged is not None
    return judged


def test_objects_like_those_of_the_training_are_believed_and_others_are_not() -> None:
    good = confidence_in(objects([20, 21, 19], 0.94, 0.85))
    assert good > 0.9
    assert confidence_in(objects([20, 21, 19], 0.8, 0.85)) < good
    assert confidence_in(objects([20, 21, 19], 0.94, 0.55)) < 0.3
    assert confidence_in(objects([50, 60, 55], 0.94, 0.85)) < good
    assert confidence_in(objects([20, 20, 20] + 3 * [3], 0.94, 0.85)) == pytest.approx(good, abs=0.01)
    # The typical object is that of the median voxel.
    assert typical_width(objects([20, 4, 4, 4, 4], 0.9, 0.9)) == pytest.approx(20, abs=0.1)


def test_confidence_is_a_number_whatever_the_network_says_unless_nothing_is_found() -> None:
    unknown, lowest, highest = (confidence_in(objects([20], 1.0, peak)) for peak in (np.nan, 0.0, 1.0))
    assert unknown == lowest < highest
    assert judge(objects([], 0.9, 0.9), 20.0, CALIBRATION) is None


def distance_to(*centres: tuple[int, int, int], edge: int = 48) -> NDArray[np.float64]:
    grid = np.indices((edge, edge, edge))
    return np.min([np.sqrt(sum((axis - c) ** 2 for axis, c in zip(grid, place, strict=True))) for place in centres], 0)


CENTRES = ((12, 12, 12), (14, 34, 15), (34, 13, 34), (35, 36, 36))


SHELLS = torch.from_numpy(np.exp(-(((distance_to(*CENTRES) - 11) / 1.5) ** 2))).float()[None]
BLANK = torch.zeros(1, 32, 32, 32)
BALLS = torch.from_numpy(np.clip((9 - distance_to(*CENTRES)) / 3, 0, 1)).float()[None]
USED = (20.0, 20.0, 20.0)
NARROW = Diameter((4.0,), "px")


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_shells_are_sheets_and_balls_and_edges_of_something_bright_are_not(noise: float) -> None:
    grain = noise * torch.randn(48, 48, 48)
    assert shows_sheets([SHELLS[0] + grain])
    assert not shows_sheets([BALLS[0] + grain])
    assert not shows_sheets([torch.zeros(1, 30, 30)])
    edge = torch.sigmoid((torch.arange(48.0)[:, None, None].expand(48, 48, 48) - 24) / 1.5)
    assert shows_sheets([edge]) is False
    assert shows_sheets([edge[:4]]) is None


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


def test_objects_that_stand_out_from_grain_are_counted() -> None:
    nuclei, grain = objects([20, 21], 0.94, 0.8), objects(100 * [12], 0.7, 0.55)
    both = Objects(*(np.concatenate(pair) for pair in zip(vars(nuclei).values(), vars(grain).values(), strict=True)))
    assert count_sure(both, 20.0, CALIBRATION) == 2
    assert count_sure(nuclei, 20.0, CALIBRATION) == count_sure(grain, 20.0, CALIBRATION) == 0


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
