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


@pytest.mark.parametrize(
    ("truth", "found", "expected"),
    [
        # Shifted by a fifth an object matches at half, but not at three quarters.
        ([(0, 10), (20, 30)], [(2, 12), (20, 30)], (2, 2, 1.0, 0.5, (8 / 12 + 1) / 2, 0, 0)),
        ([(0, 10), (20, 30)], [(0, 6), (6, 10), (20, 30)], (2, 3, 4 / 5, 2 / 5, (0.6 + 1) / 2, 1, 0)),
        ([(0, 10), (10, 20)], [(0, 20)], (2, 1, 0.0, 0.0, 0.0, 0, 1)),
        ([(0, 10)], [], (1, 0, 0.0, 0.0, 0.0, 0, 0)),
        ([], [(0, 10)], (0, 1, 0.0, 0.0, 0.0, 0, 0)),
        ([], [], (0, 0, 1.0, 1.0, 0.0, 0, 0)),
        ([(0, 20), (20, 40)], [(0, 20), (20, 40)], (2, 2, 1.0, 1.0, 1.0, 0, 0)),
    ],
    ids=["shifted", "split", "merged", "not found", "not there", "nothing", "no background"],
)
def test_scores(truth: list[tuple[int, int]], found: list[tuple[int, int]], expected: tuple[float, ...]) -> None:
    assert score(boxes(*truth), boxes(*found)) == pytest.approx(expected)


def test_the_truth_scores_one_whatever_its_numbers() -> None:
    truth = boxes((0, 10), (10, 20), (30, 40))
    renumbered = np.array([0, 70000, 3, 12], np.uint32)[truth]
    assert score(truth, renumbered) == (3, 3, 1.0, 1.0, 1.0, 0, 0)


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
    truth, size = boxes((10, 20), (25, 35)), VoxelSize(2, 0.25, 0.25)
    assert str(state_size(text, truth)) == diameter
    assert str(state_size("extents", boxes())) == "1,1,1px"
    # The mean is told as a ball in micrometres.
    mean = state_size("mean", truth, size)
    assert isinstance(mean, Diameter)
    assert math.prod(mean.in_voxels(size) or ()) == pytest.approx(mean_diameter(truth) ** 3)
