import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.metrics import adapted_rand_error, variation_of_information

from service.training.stacks.overlaps import (
    compute_adapted_rand_error,
    compute_variation_of_information,
    count_shared_voxels,
    tabulate_overlaps,
)

RNG = np.random.default_rng(0)
HALVES = np.repeat([1, 2], 8).astype(np.uint16).reshape(2, 2, 4)


def draw_labels(max_label: int) -> NDArray[np.uint32]:
    """Return random labels [4, 6, 8] from 0 to `max_label` in coarse blocks."""
    return np.kron(RNG.integers(0, max_label + 1, (2, 3, 4)), np.ones((2, 2, 2))).astype(np.uint32)


@pytest.mark.parametrize("max_label", [1, 3, 40])
def test_errors_equal_those_of_scikit_image(max_label: int) -> None:
    truth, labels = draw_labels(max_label), np.roll(draw_labels(max_label), 1, axis=2)
    table = tabulate_overlaps(truth, labels)
    expected = variation_of_information(truth, labels, ignore_labels=(0,))
    assert compute_variation_of_information(table) == pytest.approx(tuple(expected))
    assert compute_adapted_rand_error(table) == pytest.approx(adapted_rand_error(truth, labels)[0])


def test_splits_and_merges_are_measured_separately() -> None:
    whole = np.ones_like(HALVES)
    assert compute_variation_of_information(tabulate_overlaps(whole, HALVES)) == (1.0, 0.0)
    assert compute_variation_of_information(tabulate_overlaps(HALVES, whole)) == (0.0, 1.0)
    # 120 pairs of voxels in the whole, 56 of which are in the same half
    assert compute_adapted_rand_error(tabulate_overlaps(HALVES, whole)) == pytest.approx(1 - 2 * 56 / (120 + 56))


def test_volumes_without_true_objects_have_no_errors() -> None:
    table = tabulate_overlaps(np.zeros_like(HALVES), HALVES)
    assert (*compute_variation_of_information(table), compute_adapted_rand_error(table)) == (0.0, 0.0, 0.0)


def test_large_label_numbers_need_no_large_table() -> None:
    table = tabulate_overlaps(HALVES, HALVES.astype(np.uint64) << 60)
    assert (table.true_count, table.found_count, table.voxels.tolist()) == (2, 2, [8, 8])
    assert count_shared_voxels(HALVES, HALVES).tolist() == [[0, 0, 0], [0, 8, 0], [0, 0, 8]]
