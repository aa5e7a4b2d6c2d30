from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.recipes.sources import Percentiles
from scripts.recipes.synthetic_nuclei import synthesise
from service.core.errors import BadParameter
from service.core.types import Segmentation
from service.formats.tiff import writer as tiff_writer
from service.training.examples import ExampleDataset, ExamplePool, Pair, RecordedStacks, Source, draw_batch, read_pairs


def small(rng: np.random.Generator) -> Pair:
    return synthesise(rng, (12, 24, 24))


def made(source: Source, seed: int) -> ExamplePool:
    return ExamplePool(ExampleDataset(source, Percentiles(), seed), 2)


@pytest.fixture
def pool() -> Iterator[ExamplePool]:
    made_pool = made(small, 0)
    yield made_pool
    made_pool.close()


def test_a_batch_is_images_and_targets_of_one_shape(pool: ExamplePool) -> None:
    images, targets = draw_batch(pool, np.random.default_rng(0), 3, 16)
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
        images.append(draw_batch(pool, np.random.default_rng(1), 2, 16)[0])
        pool.close()
    assert torch.equal(*images)


# Python 3.12 warns of forks in processes that have threads; the loader's workers run no code that takes their locks.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_make_the_same_volumes_and_leave_torchs_generator_alone() -> None:
    batches = []
    for workers in (0, 2):
        torch.manual_seed(5)
        pool = ExamplePool(ExampleDataset(small, Percentiles(), 3), 2, first=4, workers=workers)
        pool.refresh()
        batches.append([*draw_batch(pool, np.random.default_rng(1), 2, 16), torch.rand(1)])
        pool.close()
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_refreshing_replaces_the_oldest_volume(pool: ExamplePool) -> None:
    oldest, newest = pool[0], pool[1]
    pool.refresh()
    assert pool[0] is not oldest
    assert pool[1] is newest


def test_recorded_stacks_keep_their_objects() -> None:
    image = np.zeros((12, 24, 24), np.uint16)
    image[3:9, 6:18, 6:18] = 500
    zoomed, labels = RecordedStacks([(image, (image > 0).astype(np.uint8))])(np.random.default_rng(0))
    assert zoomed.shape == labels.shape != image.shape
    assert set(np.unique(labels)) == {0, 1}
    assert np.median(zoomed[labels == 1]) == 500


def test_pairs_must_fit(tmp_path: Path) -> None:
    paths = []
    for depth in (4, 5):
        paths.append(tmp_path / f"{depth}.tif")
        tiff_writer.write(Segmentation(np.ones((depth, 6, 7), np.uint16), "labels"), paths[-1])
    (image, labels), *_ = read_pairs(paths[:1], paths[:1])
    assert image.shape == labels.shape == (4, 6, 7)
    with pytest.raises(BadParameter, match="differ in shape"):
        read_pairs(paths[:1], paths[1:])
    with pytest.raises(BadParameter, match="2 images and 1 labels"):
        read_pairs(paths, paths[:1])
