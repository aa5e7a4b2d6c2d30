"""Measurements of objects in the windows of a probe."""

import numpy as np

from service.inference.diameter.scale_probe import measure_extents


def test_extents_are_known_only_along_axes_where_no_face_cuts_off_the_object() -> None:
    labels = np.zeros((6, 8, 9), np.uint16)
    labels[1:4, 2:4, 3:8] = 1
    labels[3:, 5:7, 1:2] = 2
    np.testing.assert_array_equal(measure_extents(labels, 2), [[3, 2, 5], [np.nan, 2, 1]])
