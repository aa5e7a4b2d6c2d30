from __future__ import annotations

import re

import numpy as np
import pytest

from scripts.recipes.reliability import bin_by_confidence, draw_diagram


def test_the_calibration_error_is_the_weighted_mean_difference() -> None:
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.15, 1.0])
    is_right = np.array([True, True, True, False, False, True])
    weights = np.array([1, 1, 1, 1, 4, 0.0])
    reliability = bin_by_confidence(confidence, is_right, weights)
    np.testing.assert_allclose(reliability.confidence, [0.15, 0.95])
    np.testing.assert_allclose(reliability.fraction, [0, 0.75])
    assert reliability.error == pytest.approx(0.5 * 0.15 + 0.5 * 0.2)


def test_the_diagram_has_one_dot_per_bin() -> None:
    reliability = bin_by_confidence(np.array([0.05, 0.5, 1.0]), np.array([False, True, True]), np.ones(3))
    svg = draw_diagram({"all": reliability, "recorded": reliability})
    assert re.findall(r'cy="([\d.]+)"', svg) == 2 * ["260.0", "0.0", "0.0"]
