from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from service.training.examples import Pair, Percentiles, Pool, Recorded, Source, batch, mixed, object_widths, stated
from service.training.recipes.synthetic_nuclei import synthesise


def small(rng: np.random.Generator) -> Pair:
    return synthesise(rng, (12, 24, 24))


def made(source: Source, seed: int) -> Pool:
    return Pool(source, Percentiles(), 2, seed)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made_pool = made(small, 0)
    yield made_pool
    made_pool.close()


def test_a_batch_is_images_and_targets_of_one_shape(pool: Pool) -> None:
    images, targets = batch(pool, np.random.default_rng(0), 3, 16)
    assert images.shape == (3, 1, 16, 16, 16)
    assert targets.shape == (3, 2, 16, 16, 16)
    assert images.dtype == targets.dtype == torch.float32
    foreground, distance = targets.unbind(1)
    assert set(foreground.unique().tolist()) <= {0.0, 1.0}
    assert 0 <= distance.min() <= distance.max() <= 1
    assert not distance[foreground == 0].any()


def test_the_same_seed_gives_the_same_batch_and_the_same_next_volume() -> None:
    images = []
    for _ in range(2):
        pool = made(small, 3)
        pool.refresh()
        images.append(batch(pool, np.random.default_rng(1), 2, 16)[0])
        pool.close()
    assert torch.equal(*images)


# Python 3.12 warns of forks in processes that have threads; the loader's workers run no code that takes their locks.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_make_the_same_volumes_and_leave_torchs_generator_alone() -> None:
    batches = []
    for workers in (0, 2):
        torch.manual_seed(5)
        pool = Pool(small, Percentiles(), 2, 3, first=4, workers=workers)
        pool.refresh()
        batches.append([*batch(pool, np.random.default_rng(1), 2, 16), torch.rand(1)])
        pool.close()
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_refreshing_replaces_the_oldest_volume(pool: Pool) -> None:
    oldest, newest = pool[0], pool[1]
    pool.refresh()
    assert pool[0] is not oldest
    assert pool[1] is newest


def test_normalisation_is_the_one_of_the_model_file() -> None:
    image = np.arange(1001, dtype=np.uint16).reshape(7, 11, 13)
    scaled = Percentiles(10, 90)(image)
    assert scaled.dtype == np.float32
    assert (scaled.ravel()[100], scaled.ravel()[900]) == pytest.approx((0, 1))
    assert not Percentiles()(np.full((2, 3, 4), 7)).any()


def test_recorded_stacks_keep_their_objects() -> None:
    image = np.zeros((12, 24, 24), np.uint16)
    image[3:9, 6:18, 6:18] = 500
    zoomed, labels = Recorded([(image, (image > 0).astype(np.uint8))])(np.random.default_rng(0))
    assert zoomed.shape == labels.shape != image.shape
    assert set(np.unique(labels)) == {0, 1}
    assert np.median(zoomed[labels == 1]) == 500


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 1)])
def test_the_share_decides_between_two_sources(share: float, expected: int) -> None:
    def constant(value: int) -> Source:
        return lambda _rng: (np.full((1, 1, 1), value), np.full((1, 1, 1), value))

    image, _ = mixed(constant(0), constant(1), share)(np.random.default_rng(0))
    assert image.item() == expected


def box(widths: tuple[int, int, int], shape: tuple[int, int, int] = (60, 60, 60)) -> Pair:
    """A volume with eight boxes of these widths that touch no border."""
    labels = np.zeros(shape, np.uint16)
    for number in range(8):
        low = [2 + (number >> axis & 1) * (length // 2) for axis, length in enumerate(shape)]
        labels[tuple(slice(start, start + width) for start, width in zip(low, widths, strict=True))] = number + 1
    return (100 * (labels > 0)).astype(np.uint16), labels


def test_the_widths_of_objects_leave_those_at_the_border_out() -> None:
    _, labels = box((5, 9, 13))
    assert object_widths(labels) == pytest.approx((5, 9, 13))
    labels[-3:, -1:, :50] = 9
    assert object_widths(labels) == pytest.approx((5, 9, 13))
    assert object_widths(np.zeros((4, 5, 6), np.uint16)) is None
    only = np.zeros((4, 5, 6), np.uint16)
    only[0, :2, :3] = 7
    assert object_widths(only) == pytest.approx((1, 2, 3))


def test_stated_sizes_become_the_models() -> None:
    widths = []
    for seed in range(6):
        image, labels = stated(lambda _: box((5, 9, 13)), 20, 1.0)(np.random.default_rng(seed))
        assert image.shape == labels.shape
        assert np.corrcoef(image.ravel(), labels.ravel() > 0)[0, 1] > 0.8
        widths.append(object_widths(labels))
    each, together = (np.array([w for w in widths if (w.max() / w.min() < 1.5) == kind]) for kind in (True, False))
    assert each == pytest.approx(20, rel=0.2)
    assert np.cbrt(together.prod(axis=1)) == pytest.approx(20, rel=0.2)
    assert len(each) > 0 < len(together)


def test_what_is_far_larger_than_stated_and_what_is_not_chosen_stays() -> None:
    for widths, share in (((5, 9, 13), 0.0), ((28, 28, 28), 1.0)):
        pair = box(widths)
        image, labels = stated(lambda _, pair=pair: pair, 14, share)(np.random.default_rng(0))
        assert image is pair[0]
        assert labels is pair[1]


def test_recorded_stacks_are_turned_together_with_their_labels() -> None:
    pair = box((8, 20, 12), (40, 60, 60))
    shapes = set()
    for seed in range(6):
        image, labels = Recorded([pair], turning=True)(np.random.default_rng(seed))
        assert image.shape == labels.shape
        assert np.corrcoef(image.ravel(), labels.ravel() > 0)[0, 1] > 0.8
        shapes.add(image.shape[1] < 0.85 * image.shape[0] * 60 / 40)
    assert shapes == {True, False}
