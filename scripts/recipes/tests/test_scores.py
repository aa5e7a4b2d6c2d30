from __future__ import annotations

import numpy as np
import pytest

from scripts.recipes.scores import find_spots, main, recall_of_spots, share_of_fragments

PLACES = np.array([[8, 8, 8], [8, 24, 8], [20, 12, 26]])


def spots() -> np.ndarray:
    """Three balls about five voxels wide, in noise."""
    axes = np.indices((32, 32, 32))
    light = sum(np.exp(-((axes - place[:, None, None, None]) ** 2).sum(axis=0) / 8) for place in PLACES)
    return 100 * light + np.random.default_rng(0).normal(0, 2, light.shape)


def test_spots_are_found_where_they_are_and_nowhere_else() -> None:
    assert sorted(map(tuple, find_spots(spots()))) == sorted(map(tuple, PLACES))


def test_an_object_counts_for_one_spot() -> None:
    labels = np.zeros((32, 32, 32), np.uint16)
    assert recall_of_spots(spots(), labels) == 0
    labels[6:11] = 1
    assert recall_of_spots(spots(), labels) == pytest.approx(1 / 3)
    labels[18:23] = 2
    assert recall_of_spots(spots(), labels) == pytest.approx(2 / 3)


def test_fragments_are_small_beside_the_larger_half() -> None:
    labels = np.repeat(np.arange(6), [100, 50, 50, 50, 5, 5])
    assert share_of_fragments(labels) == pytest.approx(2 / 5)
    assert share_of_fragments(np.zeros(4, np.uint16)) == 1


def test_nothing_to_score_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--grid" in capsys.readouterr().err
