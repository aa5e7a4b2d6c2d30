from __future__ import annotations

import numpy as np
import pytest

from service.training.object_size import mean_diameter, median_extents


def test_the_widths_of_objects_leave_those_at_the_border_out() -> None:
    labels = np.zeros((60, 60, 60), np.uint16)
    for number in range(8):
        z, y, x = (2 + 30 * (number >> axis & 1) for axis in range(3))
        labels[z : z + 5, y : y + 9, x : x + 13] = number + 1
    assert median_extents(labels) == pytest.approx((5, 9, 13))
    labels[-3:, -1:, :50] = 9
    assert median_extents(labels) == pytest.approx((5, 9, 13))
    assert median_extents(np.zeros((4, 5, 6), np.uint16)) is None
    only = np.zeros((4, 5, 6), np.uint16)
    only[0, :2, :3] = 7
    assert median_extents(only) == pytest.approx((1, 2, 3))


@pytest.mark.parametrize("background", [0, 2**32 - 9])
def test_numbers_may_be_as_large_as_they_can_be(background: int) -> None:
    labels = np.full((4, 5, 6), background, np.uint32)
    labels[0, :2, :3], labels[1:4, :2, :3] = 2**32 - 1, 2**32 - 2
    sizes = [(1, 2, 3), (3, 2, 3), *([(4, 5, 6)] if background else [])]
    assert median_extents(labels) == pytest.approx(np.median(sizes, axis=0))


def test_the_mean_diameter_is_that_of_spheres() -> None:
    z, y, x = np.ogrid[:31, :31, :31]
    ball = ((z - 15) ** 2 + (y - 15) ** 2 + (x - 15) ** 2 <= 100).astype(np.uint8)
    assert mean_diameter(ball) == pytest.approx(20, rel=0.02)
