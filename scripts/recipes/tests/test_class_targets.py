from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import maximum_filter, minimum_filter

from scripts.recipes.class_targets import CLASSES, class_loss, class_targets, compute_dice, labels_to_classes


def two_cells(width: int = 16) -> np.ndarray:
    """Return labels of two adjacent cubes with edges of `width` voxels, surrounded by background."""
    labels = np.zeros((width + 4, width + 4, 2 * width + 4), np.uint16)
    labels[2:-2, 2:-2, 2 : width + 2] = 1
    labels[2:-2, 2:-2, width + 2 : -2] = 2
    return labels


def test_membranes_are_on_both_sides_of_each_outline() -> None:
    labels = two_cells()
    classes = labels_to_classes(labels)
    assert CLASSES[classes[10, 10, 10]] == "cell"
    assert CLASSES[classes[0, 0, 0]] == "background"
    assert classes[10, 10].tolist() == [0, 2, 2, *[1] * 14, 2, 2, *[1] * 14, 2, 2, 0]
    touching = maximum_filter(labels, 3) != minimum_filter(labels, 3)
    assert not ((classes == 2) & ~touching).any()


def test_membrane_thickness_is_proportional_to_cell_size() -> None:
    narrow, wide = (np.mean(labels_to_classes(two_cells(width))[width // 2, width // 2] == 2) for width in (20, 60))
    assert wide == pytest.approx(narrow, rel=0.25)


@pytest.mark.parametrize("value", [0, 1])
def test_volume_without_outlines_has_no_membranes(value: int) -> None:
    labels = np.full((6, 7, 8), value, np.uint16)
    assert (labels_to_classes(labels) == value).all()
    targets = class_targets(labels)
    assert (targets.shape, targets.dtype) == ((1, 6, 7, 8), np.float32)


def test_loss_is_lowest_for_the_correct_class() -> None:
    targets = torch.from_numpy(class_targets(two_cells()))[None]
    scores = torch.nn.functional.one_hot(targets[:, 0].long(), 3).movedim(-1, 1).float() * 40 - 20
    wrong = scores.roll(1, dims=1)
    assert class_loss(scores, targets) == pytest.approx(0, abs=1e-3)
    assert class_loss(wrong, targets) > 10
    assert class_loss(torch.zeros_like(scores), targets) > math.log(3)


def test_dice_coefficients_are_computed_per_class() -> None:
    truth = np.array([[[0, 0, 1, 1]]])
    assert compute_dice(truth, truth)[:2] == [1, 1]
    assert math.isnan(compute_dice(truth, truth)[2])
    assert compute_dice(truth, np.array([[[0, 1, 1, 2]]])) == pytest.approx([2 / 3, 0.5, 0])
