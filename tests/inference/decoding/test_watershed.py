import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import compute_basins, decode, make_hills
from skimage.measure import label
from skimage.morphology import local_maxima
from skimage.segmentation import watershed

from service.inference.decoding import watershed as torch_watershed
from service.inference.decoding.basin_merging import Persistence, find_shallow_passes
from service.training.evaluate import score


@settings(max_examples=65, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(1, 9), st.integers(1, 23), st.integers(1, 19)),
    levels=st.sampled_from([0, 1, 3]),
    block_planes=st.integers(1, 6),
)
def test_basins_do_not_depend_on_blocks(seed, size, levels, block_planes) -> None:
    """The cases include ties and plateaus, which are resolved by positions, and blocks of a single plane."""
    heights = make_hills(seed, size) if max(size) > 1 else np.ones(size, np.float32)
    if levels:
        heights = np.round(heights * levels) / levels
    persistence = Persistence(0.1, heights_are_logits=False)
    expected, found = compute_basins(heights, persistence), compute_basins(heights, persistence, block_planes)
    assert found.pieces.shape == size
    assert torch.equal(found.basin_of_piece[found.pieces.long()], expected.basin_of_piece[expected.pieces.long()])
    assert torch.equal(found.peaks, expected.peaks)
    assert torch.equal(found.voxels, expected.voxels)
    for found_column, expected_column in zip(
        find_shallow_passes(found, persistence), find_shallow_passes(expected, persistence), strict=True
    ):
        assert np.array_equal(found_column, expected_column)


@pytest.mark.parametrize("flips", [(), (0,), (2,), (0, 1, 2)])
def test_a_path_through_many_blocks_is_followed_to_its_end(flips: tuple[int, ...]) -> None:
    """A corridor goes up, down and up again through all planes, and rises by one with every voxel."""
    heights = np.full((12, 3, 36), -np.inf)
    x = np.arange(36)
    z = np.abs((x + 11) % 22 - 11)
    heights[z, 1, x] = x + 1
    heights = np.flip(heights, flips).copy()
    labels, count = decode(heights, block_planes=1)
    assert count == 1
    assert np.array_equal(labels > 0, heights > -np.inf)


@pytest.mark.parametrize("seed", range(3))
def test_basins_equal_those_of_scikit_image(seed: int) -> None:
    heights = make_hills(seed, (24, 40, 40), sigma=3)
    mask = heights > -np.inf
    markers = label(local_maxima(np.where(mask, heights, -1), connectivity=3), connectivity=3)
    expected = watershed(-np.where(mask, heights, 0), markers, mask=mask, connectivity=3)
    labels, count = decode(heights)
    agreement = score(expected, labels)
    assert count == expected.max()
    assert (agreement.f1, agreement.splits, agreement.merges) == (1.0, 0, 0)
    assert agreement.iou > 0.9
    assert np.array_equal(labels > 0, mask)


def test_passes_are_the_highest_points_between_neighboring_basins() -> None:
    heights = make_hills(1, (12, 30, 30))
    persistence = Persistence(np.inf, heights_are_logits=False)
    basins = compute_basins(heights, persistence, block_planes=1)
    basin = basins.basin_of_piece.numpy()[basins.pieces.numpy()]
    expected: dict[tuple[int, int], float] = {}
    for step in itertools.product((-1, 0, 1), repeat=3):
        voxels, neighbors = (
            tuple(slice(max(s * sign, 0), edge + min(s * sign, 0)) for s, edge in zip(step, heights.shape, strict=True))
            for sign in (1, -1)
        )
        crossing = (basin[voxels] >= 0) & (basin[neighbors] > basin[voxels])
        lower = np.minimum(heights[voxels], heights[neighbors])[crossing]
        for a, b, height in zip(basin[voxels][crossing], basin[neighbors][crossing], lower, strict=True):
            expected[a, b] = max(expected.get((a, b), -np.inf), float(height))
    first, second, height = (column.numpy() for column in find_shallow_passes(basins, persistence))
    assert len(expected) > 5
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == set(expected)
    for a, b, pass_height in zip(first, second, height, strict=True):
        assert pass_height == pytest.approx(expected[a, b], rel=2**-18)
    assert (np.diff(height) <= 0).all()


def test_positive_and_negative_heights_keep_their_order() -> None:
    heights = np.array([-3.0, -1e30, 1e-30, 0.0, -0.5, 2e30, 7.0]).reshape(1, 1, -1)
    labels, count = decode(heights)
    assert count == 3
    assert labels.ravel().tolist() == [1, 2, 2, 2, 3, 3, 3]


def test_passes_do_not_depend_on_the_batch_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = np.random.default_rng(4).uniform(0.9, 1, (12, 50, 51)).astype(np.float32)
    in_one_batch, count = decode(heights, persistence=0.03)
    monkeypatch.setattr(torch_watershed, "NEIGHBOR_BATCH_VOXELS", 1000)
    in_many_batches, other_count = decode(heights, persistence=0.03)
    assert 1 < count == other_count
    assert np.array_equal(in_one_batch, in_many_batches)
