import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import basins_of, decode, hills
from skimage.measure import label
from skimage.morphology import local_maxima
from skimage.segmentation import watershed

from service.inference.decoding.basin_merging import Persistence, find_shallow_passes
from service.inference.decoding.watershed import NEIGHBOUR_BATCH, Planes, Watershed
from service.training.evaluate import score


@settings(max_examples=65, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(1, 9), st.integers(1, 23), st.integers(1, 19)),
    levels=st.sampled_from([0, 1, 3]),
    cuts=st.sets(st.integers(1, 22)),
    planes=st.integers(0, 6),
    along_y=st.booleans(),
)
def test_basins_depend_neither_on_slabs_nor_on_blocks_nor_on_their_axis(
    seed, size, levels, cuts, planes, along_y
) -> None:
    """With ties and plateaus, whose basins depend on the places of their voxels; no block holds less than a plane."""
    heights = hills(seed, size) if max(size) > 1 else np.ones(size, np.float32)
    if levels:
        heights = np.round(heights * levels) / levels
    persistence = Persistence(0.1, logits=False)
    expected = basins_of(heights, persistence)
    inner = tuple(sorted(cut for cut in cuts if cut < size[along_y]))
    block = planes * (size[not along_y] + 2) * (size[2] + 2)
    found = basins_of(heights, persistence, inner, block, along_y=along_y)
    assert found.pieces.shape == size
    assert torch.equal(found.basin_of[found.pieces.long()], expected.basin_of[expected.pieces.long()])
    assert torch.equal(found.peaks, expected.peaks)
    assert torch.equal(found.voxels, expected.voxels)
    for one, other in zip(
        find_shallow_passes(found, persistence), find_shallow_passes(expected, persistence), strict=True
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("flips", [(), (0,), (2,), (0, 1, 2)])
def test_a_path_that_winds_through_many_blocks_is_followed_to_its_end(flips: tuple[int, ...]) -> None:
    """A corridor up, down and up again through all planes, rising by one with every voxel."""
    heights = np.full((12, 3, 36), -np.inf)
    x = np.arange(36)
    z = np.abs((x + 11) % 22 - 11)
    heights[z, 1, x] = x + 1
    heights = np.flip(heights, flips).copy()
    labels, count = decode(heights, block=1)
    assert count == 1
    assert np.array_equal(labels > 0, heights > -np.inf)


@pytest.mark.parametrize("seed", range(3))
def test_basins_are_those_of_the_watershed_of_scikit_image(seed: int) -> None:
    heights = hills(seed, (24, 40, 40), sigma=3)
    inside = heights > -np.inf
    markers = label(local_maxima(np.where(inside, heights, -1), connectivity=3), connectivity=3)
    expected = watershed(-np.where(inside, heights, 0), markers, mask=inside, connectivity=3)
    labels, count = decode(heights)
    agreement = score(expected, labels)
    assert count == expected.max()
    assert (agreement.f1, agreement.splits, agreement.merges) == (1.0, 0, 0)
    assert agreement.iou > 0.9
    assert np.array_equal(labels > 0, inside)


def test_the_passes_are_the_highest_ones_between_neighbours() -> None:
    heights = hills(1, (12, 30, 30))
    persistence = Persistence(np.inf, logits=False)
    basins = basins_of(heights, persistence, block=1)
    basin = basins.basin_of.numpy()[basins.pieces.numpy()]
    expected: dict[tuple[int, int], float] = {}
    for step in itertools.product((-1, 0, 1), repeat=3):
        here, there = (
            tuple(slice(max(s * sign, 0), edge + min(s * sign, 0)) for s, edge in zip(step, heights.shape, strict=True))
            for sign in (1, -1)
        )
        crossing = (basin[here] >= 0) & (basin[there] > basin[here])
        lower = np.minimum(heights[here], heights[there])[crossing]
        for a, b, height in zip(basin[here][crossing], basin[there][crossing], lower, strict=True):
            expected[a, b] = max(expected.get((a, b), -np.inf), float(height))
    first, second, height = (column.numpy() for column in find_shallow_passes(basins, persistence))
    assert len(expected) > 5
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == set(expected)
    for a, b, found in zip(first, second, height, strict=True):
        assert found == pytest.approx(expected[a, b], rel=2**-18)
    assert (np.diff(height) <= 0).all()


def test_heights_of_either_sign_keep_their_order() -> None:
    heights = np.array([-3.0, -1e30, 1e-30, 0.0, -0.5, 2e30, 7.0]).reshape(1, 1, -1)
    labels, count = decode(heights)
    assert count == 3
    assert labels.ravel().tolist() == [1, 2, 2, 2, 3, 3, 3]


def test_more_voxels_near_tops_than_are_looked_at_together_find_the_same_passes() -> None:
    heights = np.random.default_rng(4).uniform(0.9, 1, (12, 150, 151)).astype(np.float32)
    assert (heights > 0.97).sum() > NEIGHBOUR_BATCH
    together, count = decode(heights, persistence=0.03)
    apart, other = decode(heights, persistence=0.03, block=NEIGHBOUR_BATCH // 2)
    assert 1 < count == other
    assert np.array_equal(together, apart)


def test_watersheds_on_a_device_share_no_tensors() -> None:
    """Each could run in a stream of its own, which does not wait for tensors of other streams."""

    def tensors() -> dict[int, torch.Tensor]:
        made = Watershed(Planes((3, 4, 5), torch.device("meta")), lambda peaks: peaks)
        return {id(value): value for value in vars(made).values() if isinstance(value, torch.Tensor)}

    one, other = tensors(), tensors()
    assert len(one) > 4
    assert not one.keys() & other.keys()
