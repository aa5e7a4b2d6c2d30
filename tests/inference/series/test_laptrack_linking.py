from importlib.util import find_spec

import numpy as np
import pytest
from label_series import Labels, make_box_series

from service.core.quantities import VoxelSize
from service.inference.series.laptrack_linking import link_by_distance

pytestmark = pytest.mark.skipif(find_spec("laptrack") is None, reason="laptrack is not installed")


def link(labels: Labels, voxel_size: VoxelSize | None = None) -> tuple[list[list[int]], list[int]]:
    found = link_by_distance(labels, voxel_size)
    return [lookup[1:].tolist() for lookup in found.tracks], found.parents[1:].tolist()


def test_objects_without_overlap_keep_their_numbers() -> None:
    """Objects move by more than their length along x, so nothing overlaps, but by less than their equivalent width."""
    labels = np.zeros((3, 8, 8, 60), np.uint16)
    for time in range(3):
        labels[time, :, :, 7 * time : 7 * time + 6] = 1 + time % 2
        labels[time, :, :, 30 + 7 * time : 36 + 7 * time] = 2 - time % 2
    assert link(labels) == ([[1, 2], [2, 1], [1, 2]], [0, 0])


def test_missing_objects_keep_their_tracks_and_daughters_get_their_mother_as_parent() -> None:
    missed = make_box_series([(0, 4), (30, 34)], [(30, 34)], [(0, 4), (30, 34), (50, 54)])
    assert link(missed) == ([[1, 2], [2], [1, 2, 3]], [0, 0, 0])
    divided = make_box_series([(20, 28), (50, 54)], *[[(19, 23), (25, 29), (50, 54)]] * 2)
    assert link(divided) == ([[1, 2], [3, 4, 2], [3, 4, 2]], [0, 0, 1, 1])


def test_distances_are_measured_in_micrometers() -> None:
    """Two planes are within reach if the planes are thin, and out of reach if the planes are far apart."""
    labels = np.zeros((2, 8, 6, 6), np.uint16)
    labels[0, :2] = labels[1, 4:6] = 1
    assert link(labels, VoxelSize(0.2, 1, 1))[0] == [[1], [1]]
    assert link(labels, VoxelSize(9, 1, 1))[0] == [[1], [2]]


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (3, 2, 3, 4)])
def test_empty_time_points_have_no_tracks(shape: tuple[int, ...]) -> None:
    assert link(np.zeros(shape, np.uint8)) == ([[] for _ in range(shape[0])], [])
    single = np.zeros(shape, np.uint8)
    single[-1, 0, 0, 0] = 1
    assert link(single) == ([[] for _ in range(shape[0] - 1)] + [[1]], [0])
