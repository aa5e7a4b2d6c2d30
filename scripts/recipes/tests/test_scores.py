from __future__ import annotations

import numpy as np
import pytest

from scripts.recipes.scores import find_spots, fragment_fraction, main, spot_recall

POSITIONS = np.array([[8, 8, 8], [8, 24, 8], [20, 12, 26]])


def spots() -> np.ndarray:
    """Return an image of three spots about five voxels wide, with noise."""
    axes = np.indices((32, 32, 32))
    light = sum(np.exp(-((axes - position[:, None, None, None]) ** 2).sum(axis=0) / 8) for position in POSITIONS)
    return 100 * light + np.random.default_rng(0).normal(0, 2, light.shape)


def test_exactly_the_existing_spots_are_found() -> None:
    assert sorted(map(tuple, find_spots(spots()))) == sorted(map(tuple, POSITIONS))


def test_object_that_covers_several_spots_counts_once() -> None:
    labels = np.zeros((32, 32, 32), np.uint16)
    assert spot_recall(spots(), labels) == 0
    labels[6:11] = 1
    assert spot_recall(spots(), labels) == pytest.approx(1 / 3)
    labels[18:23] = 2
    assert spot_recall(spots(), labels) == pytest.approx(2 / 3)


def test_fragments_are_small_relative_to_the_larger_half_of_the_objects() -> None:
    labels = np.repeat(np.arange(6), [100, 50, 50, 50, 5, 5])
    assert fragment_fraction(labels) == pytest.approx(2 / 5)
    assert fragment_fraction(np.zeros(4, np.uint16)) == 1


def test_command_requires_a_folder_or_the_grid_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--grid" in capsys.readouterr().err
