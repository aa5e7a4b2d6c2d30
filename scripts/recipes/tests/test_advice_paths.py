"""Tests of the scores and the repetition check of `scripts.recipes.advice_paths`."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.recipes.advice_paths import Step, is_tried, score_centers
from service.core.types import Options


def test_centers_are_matched_once_within_the_radius() -> None:
    labels = np.zeros((4, 20, 20), np.uint16)
    for label, (y, x) in enumerate(((3, 3), (3, 12), (15, 15)), start=1):
        labels[1:3, y : y + 2, x : x + 2] = label
    spots = np.array([[1, 3, 3], [1, 4, 4], [1, 3, 12], [1, 9, 2]])
    assert score_centers(labels, spots, (1.0, 1.0, 1.0), 2.0) == pytest.approx(2 * 2 / (3 + 4))
    # Far along z if the planes are far apart.
    assert score_centers(labels, spots - [1, 0, 0], (10.0, 1.0, 1.0), 2.0) == 0.0
    assert score_centers(np.zeros_like(labels), spots, (1.0, 1.0, 1.0), 2.0) == 0.0


def test_suggestions_are_not_repeated() -> None:
    step = Step("nuclei", Options(), "", np.zeros(0), 0.1, "20,50,50px; estimated", {}, has_warning=True)
    assert is_tried(step, step, {"diameter": "19,48,48px"})
    assert not is_tried(step, step, {"diameter": "14px"})
    assert not is_tried(step, step._replace(model="embryos"), {"diameter": "20,50,50px"})
    assert is_tried(step, step, {"model": "nuclei"})
    assert not is_tried(step, step, {"model": "membranes"})
