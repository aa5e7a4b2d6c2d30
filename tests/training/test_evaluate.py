from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from service.core.quantities import Diameter, VoxelSize
from service.training.evaluate import score, segment_classically, state_size
from service.training.examples import mean_diameter


def boxes(*spans: tuple[int, int]) -> NDArray[np.uint16]:
    """Objects 1, 2, ... that fill the planes x0 to x1 of a volume [4, 5, 40]."""
    labels = np.zeros((4, 5, 40), np.uint16)
    for number, (low, high) in enumerate(spans, start=1):
        labels[:, :, low:high] = number
    return labels


def test_the_truth_scores_one_whatever_its_numbers() -> None:
    truth = boxes((0, 10), (10, 20), (30, 40))
    renumbered = np.array([0, 70000, 3, 12], np.uint32)[truth]
    assert score(truth, renumbered) == (3, 3, 1.0, 1.0, 1.0, 0, 0)


def test_an_object_shifted_by_a_fifth_matches_at_half_but_not_at_three_quarters() -> None:
    result = score(boxes((0, 10), (20, 30)), boxes((2, 12), (20, 30)))
    assert (result.f1, result.f1_strict) == (1.0, 0.5)
    assert result.iou == pytest.approx((8 / 12 + 1) / 2)


def test_a_split_object_leaves_its_larger_part() -> None:
    result = score(boxes((0, 10), (20, 30)), boxes((0, 6), (6, 10), (20, 30)))
    assert (result.true, result.found, result.splits, result.merges) == (2, 3, 1, 0)
    assert result.f1 == pytest.approx(2 * 2 / 5)
    assert result.iou == pytest.approx((0.6 + 1) / 2)


def test_merged_halves_match_neither() -> None:
    result = score(boxes((0, 10), (10, 20)), boxes((0, 20)))
    assert (result.true, result.found, result.splits, result.merges) == (2, 1, 0, 1)
    assert (result.f1, result.iou) == (0.0, 0.0)


def test_nothing_found_and_nothing_there() -> None:
    assert score(boxes((0, 10)), boxes()).f1 == 0
    assert score(boxes(), boxes((0, 10))).f1 == 0
    assert score(boxes(), boxes()).f1 == 1


def test_a_volume_without_background_is_counted_too() -> None:
    assert score(boxes((0, 20), (20, 40)), boxes((0, 20), (20, 40))).true == 2


def test_the_classical_method_tells_bright_balls_apart() -> None:
    z, y, x = np.ogrid[:30, :40, :60]
    truth = np.zeros((30, 40, 60), np.uint8)
    for number, centre in enumerate([(15, 20, 15), (15, 20, 31), (15, 20, 52)], start=1):
        truth[(z - centre[0]) ** 2 + (y - centre[1]) ** 2 + (x - centre[2]) ** 2 <= 64] = number
    image = 100 + 900 * (truth > 0) + np.random.default_rng(0).normal(0, 30, truth.shape)
    result = score(truth, segment_classically(image, 16))
    assert (result.f1, result.found) == (1.0, 3)


@pytest.mark.parametrize(
    ("text", "diameter"),
    [("mean", "7.26px"), ("extents", "4,5,10px"), ("7px", "7px"), ("auto", "auto"), ("none", "none")],
)
def test_a_request_may_be_told_what_is_true(text: str, diameter: str) -> None:
    assert str(state_size(text, boxes((10, 20), (25, 35)))) == diameter


def test_the_mean_is_told_as_a_ball_in_micrometres() -> None:
    truth = boxes((10, 20), (25, 35))
    size = VoxelSize(2, 0.25, 0.25)
    diameter = state_size("mean", truth, size)
    assert isinstance(diameter, Diameter)
    assert math.prod(diameter.in_voxels(size) or ()) == pytest.approx(mean_diameter(truth) ** 3)


def test_without_objects_there_is_something_to_tell() -> None:
    assert str(state_size("extents", boxes())) == "1,1,1px"
