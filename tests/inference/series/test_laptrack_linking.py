from importlib.util import find_spec

import numpy as np
import pytest
from label_series import Labels, boxes

from service.core.quantities import VoxelSize
from service.inference.series.laptrack_linking import link_by_distance

pytestmark = pytest.mark.skipif(find_spec("laptrack") is None, reason="laptrack is not installed")


def tracks(labels: Labels, voxel_size: VoxelSize | None = None) -> tuple[list[list[int]], list[int]]:
    found = link_by_distance(labels, voxel_size)
    return [lookup[1:].tolist() for lookup in found.tracks], found.parents[1:].tolist()


def test_objects_that_leave_their_place_keep_their_numbers() -> None:
    """They move by more than their length along x, so that nothing overlaps, and less than the width of their ball."""
    labels = np.zeros((3, 8, 8, 60), np.uint16)
    for time in range(3):
        labels[time, :, :, 7 * time : 7 * time + 6] = 1 + time % 2
        labels[time, :, :, 30 + 7 * time : 36 + 7 * time] = 2 - time % 2
    assert tracks(labels) == ([[1, 2], [2, 1], [1, 2]], [0, 0])


def test_what_is_missed_keeps_its_track_and_what_is_new_begins_one_with_its_mother_as_parent() -> None:
    missed = boxes([(0, 4), (30, 34)], [(30, 34)], [(0, 4), (30, 34), (50, 54)])
    assert tracks(missed) == ([[1, 2], [2], [1, 2, 3]], [0, 0, 0])
    divided = boxes([(20, 28), (50, 54)], *[[(19, 23), (25, 29), (50, 54)]] * 2)
    assert tracks(divided) == ([[1, 2], [3, 4, 2], [3, 4, 2]], [0, 0, 1, 1])


def test_distances_count_in_micrometres() -> None:
    """Two planes up is near where planes are thin, and beyond reach where they are far apart."""
    labels = np.zeros((2, 8, 6, 6), np.uint16)
    labels[0, :2] = labels[1, 4:6] = 1
    assert tracks(labels, VoxelSize(0.2, 1, 1))[0] == [[1], [1]]
    assert tracks(labels, VoxelSize(9, 1, 1))[0] == [[1], [2]]


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (3, 2, 3, 4)])
def test_nothing_is_linked_where_there_is_nothing(shape: tuple[int, ...]) -> None:
    assert tracks(np.zeros(shape, np.uint8)) == ([[] for _ in range(shape[0])], [])
    lone = np.zeros(shape, np.uint8)
    lone[-1, 0, 0, 0] = 1
    assert tracks(lone) == ([[] for _ in range(shape[0] - 1)] + [[1]], [0])
