from __future__ import annotations

import numpy as np
import pytest

from scripts.recipes.stated_diameters import measure_true_diameters
from service.core.quantities import VoxelSize
from service.core.types import Volume


def test_true_diameters_of_flat_objects_depend_on_the_voxel_size() -> None:
    z, y, x = np.indices((12, 40, 40)) - np.array([5.5, 19.5, 19.5])[:, None, None, None]
    truth = ((2 * z / 6) ** 2 + (2 * y / 24) ** 2 + (2 * x / 24) ** 2 <= 1).astype(np.uint16)
    volumes = [Volume.from_array(np.zeros((1, 12, 40, 40), np.uint8), size) for size in (None, VoxelSize(4, 1, 1))]
    unknown, known = (measure_true_diameters(volume, truth) for volume in volumes)
    assert unknown == pytest.approx((24 / 4 ** (1 / 3), 24), rel=0.03)
    assert known == pytest.approx((24, 24), rel=0.03)
