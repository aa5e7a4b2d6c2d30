import math

import numpy as np
import pytest
from numpy.typing import NDArray

from service.core.quantities import Diameter, VoxelSize
from service.training.evaluate import resolve_diameter, score, segment_classically
from service.training.examples import compute_mean_diameter


def make_boxes(*spans: tuple[int, int]) -> NDArray[np.uint16]:
    """Return labels [4, 5, 40] in which object n fills the n-th span along x."""
    labels = np.zeros((4, 5, 40), np.uint16)
    for number, (start, stop) in enumerate(spans, start=1):
        labels[:, :, start:stop] = number
    return labels


@pytest.mark.parametrize(
    ("truth", "found", "expected"),
    [
        # An object that is shifted by a fifth matches at an IoU of 0.5, but not at 0.75.
        ([(0, 10), (20, 30)], [(2, 12), (20, 30)], (2, 2, 1.0, 0.5, (8 / 12 + 1) / 2, 0, 0)),
        ([(0, 10), (20, 30)], [(0, 6), (6, 10), (20, 30)], (2, 3, 4 / 5, 2 / 5, (0.6 + 1) / 2, 1, 0)),
        ([(0, 10), (10, 20)], [(0, 20)], (2, 1, 0.0, 0.0, 0.0, 0, 1)),
        ([(0, 10)], [], (1, 0, 0.0, 0.0, 0.0, 0, 0)),
        ([], [(0, 10)], (0, 1, 0.0, 0.0, 0.0, 0, 0)),
        ([], [], (0, 0, 1.0, 1.0, 0.0, 0, 0)),
        ([(0, 20), (20, 40)], [(0, 20), (20, 40)], (2, 2, 1.0, 1.0, 1.0, 0, 0)),
    ],
    ids=["shifted", "split", "merged", "missed", "spurious", "empty", "no background"],
)
def test_scores(truth: list[tuple[int, int]], found: list[tuple[int, int]], expected: tuple[float, ...]) -> None:
    assert score(make_boxes(*truth), make_boxes(*found))[:7] == pytest.approx(expected)


def test_scores_do_not_depend_on_label_numbers() -> None:
    truth = make_boxes((0, 10), (10, 20), (30, 40))
    renumbered = np.array([0, 70000, 3, 12], np.uint32)[truth]
    assert score(truth, renumbered) == (3, 3, 1.0, 1.0, 1.0, 0, 0, 0.0, 0.0, 0.0)


def test_unknown_voxels_are_not_compared() -> None:
    truth, found = make_boxes((0, 10)), make_boxes((0, 10), (12, 15), (18, 26), (26, 40))
    unknown = np.zeros(truth.shape, np.bool_)
    unknown[:, :, 21:] = True
    # One object is wrong, one is mostly unknown, and one is completely unknown.
    assert score(truth, found, unknown)[:3] == (1, 2, 2 / 3)
    assert score(truth, found)[:3] == (1, 4, 2 / 5)
    # An object that matches counts, although most of its voxels are unknown.
    unknown = np.ones(truth.shape, np.bool_)
    unknown[1:2] = False
    assert score(truth * ~unknown, make_boxes((0, 10)), unknown)[:7] == (1, 1, 1.0, 1.0, 1.0, 0, 0)


def test_classical_method_separates_bright_spheres() -> None:
    z, y, x = np.ogrid[:30, :40, :60]
    truth = np.zeros((30, 40, 60), np.uint8)
    for number, center in enumerate([(15, 20, 15), (15, 20, 31), (15, 20, 52)], start=1):
        truth[(z - center[0]) ** 2 + (y - center[1]) ** 2 + (x - center[2]) ** 2 <= 64] = number
    image = 100 + 900 * (truth > 0) + np.random.default_rng(0).normal(0, 30, truth.shape)
    result = score(truth, segment_classically(image, 16))
    assert (result.f1, result.found) == (1.0, 3)


@pytest.mark.parametrize(
    ("setting", "diameter"),
    [("mean", "7.26px"), ("extents", "4,5,10px"), ("7px", "7px"), ("auto", "auto"), ("none", "none")],
)
def test_diameter_may_be_taken_from_the_ground_truth(setting: str, diameter: str) -> None:
    truth, size = make_boxes((10, 20), (25, 35)), VoxelSize(2, 0.25, 0.25)
    assert str(resolve_diameter(setting, truth)) == diameter
    assert str(resolve_diameter("extents", make_boxes())) == "1,1,1px"
    # The mean diameter is corrected for anisotropic voxels.
    mean = resolve_diameter("mean", truth, size)
    assert isinstance(mean, Diameter)
    assert math.prod(mean.to_voxels(size) or ()) == pytest.approx(compute_mean_diameter(truth) ** 3)
