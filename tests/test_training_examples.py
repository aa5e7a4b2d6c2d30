from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from service.training.examples import Pair, Percentiles, Pool, Source, batch, mixed, recorded
from service.training.synthesis import synthesise


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
    zoomed, labels = recorded([(image, (image > 0).astype(np.uint8))])(np.random.default_rng(0))
    assert zoomed.shape == labels.shape != image.shape
    assert set(np.unique(labels)) == {0, 1}
    assert np.median(zoomed[labels == 1]) == 500


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 1)])
def test_the_share_decides_between_two_sources(share: float, expected: int) -> None:
    def constant(value: int) -> Source:
        return lambda _rng: (np.full((1, 1, 1), value), np.full((1, 1, 1), value))

    image, _ = mixed(constant(0), constant(1), share)(np.random.default_rng(0))
    assert image.item() == expected
