import itertools

import numpy as np
import pytest
from landscapes import compute_basins, decode, make_hills
from skimage.measure import label
from skimage.morphology import local_maxima
from skimage.segmentation import watershed

from service.inference.decoding import watershed as torch_watershed
from service.inference.decoding.pieces import WatershedParameters
from service.inference.decoding.watershed_kernel import watershed_kernel
from service.training.evaluate import score


@pytest.mark.parametrize("flips", [(), (0,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("kernel", [None, watershed_kernel])
def test_a_path_through_many_blocks_is_followed_to_its_end(flips: tuple[int, ...], kernel) -> None:
    """A corridor goes up, down and up again through all planes, and rises by one with every voxel."""
    heights = np.full((12, 3, 36), -np.inf)
    x = np.arange(36)
    z = np.abs((x + 11) % 22 - 11)
    heights[z, 1, x] = x + 1
    heights = np.flip(heights, flips).copy()
    labels, count = decode(heights, block_planes=1, kernel=kernel)
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
    parameters = WatershedParameters(0.0, np.inf, heights_are_logits=False)
    basin, basins = compute_basins(heights, parameters)
    expected: dict[tuple[int, int], float] = {}
    for step in itertools.product((-1, 0, 1), repeat=3):
        voxels, neighbors = (
            tuple(slice(max(s * sign, 0), edge + min(s * sign, 0)) for s, edge in zip(step, heights.shape, strict=True))
            for sign in (1, -1)
        )
        crossing = (basin[voxels] > 0) & (basin[neighbors] > basin[voxels])
        lower = np.minimum(heights[voxels], heights[neighbors])[crossing]
        for a, b, height in zip(basin[voxels][crossing], basin[neighbors][crossing], lower, strict=True):
            expected[a, b] = max(expected.get((a, b), -np.inf), float(height))
    first, second = basins.passes[:2] + 1
    heights_of_passes = parameters.get_distances(basins.passes[2])
    assert len(expected) > 5
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == set(expected)
    for a, b, pass_height in zip(first, second, heights_of_passes, strict=True):
        assert pass_height == pytest.approx(expected[a, b], rel=2**-18)


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
