import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from label_series import Labels, make_box_series

from service.inference.series.overlap_linking import link_by_overlap


def link(labels: Labels) -> tuple[list[list[int]], list[int]]:
    found = link_by_overlap(labels)
    return [lookup[1:].tolist() for lookup in found.tracks], found.parents[1:].tolist()


@pytest.mark.parametrize(
    ("times", "expected", "parents"),
    [
        ([[(0, 10), (20, 30)], [(22, 32), (2, 12)], [(4, 14), (24, 34)]], [[1, 2], [2, 1], [1, 2]], [0, 0]),
        ([[(0, 10), (10, 20)], [(1, 11), (11, 21)]], [[1, 2], [1, 2]], [0, 0]),
        # The first object disappears, and the second one moves almost to its place.
        ([[(0, 10), (12, 22)], [(6, 16)]], [[1, 2], [1]], [0, 0]),
        ([[(0, 10)], [(0, 10), (30, 40)], [(30, 40)], [(0, 10), (30, 40)]], [[1], [1, 2], [2], [3, 2]], [0, 0, 0]),
        ([[(0, 20)], [(0, 9), (11, 20)], [(0, 9), (11, 20)]], [[1], [2, 3], [2, 3]], [0, 1, 1]),
        ([[(0, 20)], [(0, 17), (18, 20)]], [[1], [1, 2]], [0, 0]),
        ([[(0, 20)], [(8, 34), (0, 7)]], [[1], [1, 2]], [0, 0]),
        ([[], [(0, 5)], [], [(0, 5)]], [[], [1], [], [2]], [0, 0]),
    ],
    ids=["moving", "better overlap", "gone", "new or missing", "daughters", "fragment", "mostly outside", "empty"],
)
def test_objects_are_linked_by_their_overlap(times, expected, parents) -> None:
    assert link(make_box_series(*times)) == (expected, parents)


def test_unused_label_numbers_are_no_tracks() -> None:
    labels = make_box_series([(0, 5)], [(0, 5)])
    found = link_by_overlap(np.where(labels == 1, 7, 0))
    assert found.count == found.tracks[0].max() == 7
    assert np.count_nonzero(found.tracks[0]) == 1


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 12))
def test_each_object_has_a_track_of_its_own(seed: int, points: int, largest: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, largest + 1, (points, 2, 3, 5)).astype(np.uint16)
    found = link_by_overlap(labels)
    used: set[int] = set()
    for volume, lookup in zip(labels, found.tracks, strict=True):
        present = np.unique(volume[volume > 0])
        numbers = lookup[present]
        assert len(set(numbers.tolist())) == len(present)
        assert (numbers > 0).all()
        assert set(found.parents[numbers].tolist()) <= used | {0} | set(numbers.tolist())
        used |= set(numbers.tolist())
    assert used <= set(range(1, found.count + 1))
    assert (found.parents < np.arange(found.count + 1).clip(1)).all()
