"""Confidence in results, and what is advised where there is little of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from service.core.volume import Diameter, Objects
from service.inference.confidence import explain, judge, shows_sheets, typical_width
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


def test_what_finds_nothing_is_neither_good_nor_bad() -> None:
    assert judge(objects([], 0.9, 0.9), 20.0, CALIBRATION) is None


def test_confidence_is_a_number_whatever_the_network_says() -> None:
    assert (
        confidence_in(objects([20], 1.0, np.nan))
        == confidence_in(objects([20], 1.0, 0.0))
        < confidence_in(objects([20], 1.0, 1.0))
    )


def test_the_typical_width_is_that_of_the_object_of_the_median_voxel() -> None:
    assert typical_width(objects([20, 4, 4, 4, 4], 0.9, 0.9)) == pytest.approx(20, abs=0.1)


def distance_to(*centres: tuple[int, int, int], edge: int = 48) -> NDArray[np.float64]:
    grid = np.indices((edge, edge, edge))
    return np.min([np.sqrt(sum((axis - c) ** 2 for axis, c in zip(grid, place, strict=True))) for place in centres], 0)


CENTRES = ((12, 12, 12), (14, 34, 15), (34, 13, 34), (35, 36, 36))


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_shells_are_sheets_and_balls_are_not(noise: float) -> None:
    grain = np.random.default_rng(0).normal(0, noise, (48, 48, 48))
    shells = np.exp(-(((distance_to(*CENTRES) - 11) / 1.5) ** 2)) + grain
    balls = np.clip((9 - distance_to(*CENTRES)) / 3, 0, 1) + grain
    assert shows_sheets([torch.from_numpy(shells).float()])
    assert not shows_sheets([torch.from_numpy(balls).float()])
    assert not shows_sheets([torch.zeros(1, 30, 30)])


def test_the_next_try_is_named() -> None:
    shells = torch.from_numpy(np.exp(-(((distance_to(*CENTRES) - 11) / 1.5) ** 2))).float()[None]
    blank, used = torch.zeros(1, 32, 32, 32), (20.0, 20.0, 20.0)
    assert explain(0.1, [shells], Diameter((4.0,), "px"), used, CALIBRATION).attempt == "model=membranes"
    small = explain(0.1, [blank], Diameter((4.0,), "px"), used, CALIBRATION)
    assert small.attempt == "diameter=4px"
    assert small.attempt in small.detail
    assert "4px wide" in small.detail
    for guess in (None, Diameter((18.0, 22.0, 22.0), "px")):
        unknown = explain(0.1, [blank], guess, used, CALIBRATION)
        assert unknown.attempt == ""
        assert "diameter=" in unknown.detail
