from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.recipes.sources import PercentileNormalization
from scripts.recipes.synthetic_nuclei import synthesize
from service.core.errors import BadParameter
from service.core.types import Segmentation
from service.formats.tiff import writer as tiff_writer
from service.training.examples import (
    ExampleDataset,
    ExamplePool,
    Pair,
    compute_mean_diameter,
    compute_median_extents,
    draw_batch,
    read_pairs,
)


def make_small_pair(rng: np.random.Generator) -> Pair:
    return synthesize(rng, (12, 24, 24))


@pytest.fixture
def pool() -> Iterator[ExamplePool]:
    example_pool = ExamplePool(ExampleDataset(make_small_pair, PercentileNormalization(), 0), 2)
    yield example_pool
    example_pool.close()


def test_batch_contains_images_and_targets_of_the_same_shape(pool: ExamplePool) -> None:
    images, targets = draw_batch(pool, np.random.default_rng(0), 3, 16)
    assert images.shape == (3, 1, 16, 16, 16)
    assert targets.shape == (3, 2, 16, 16, 16)
    assert images.dtype == targets.dtype == torch.float32
    foreground, distance = targets.unbind(1)
    assert set(foreground.unique().tolist()) <= {0.0, 1.0}
    assert 0 <= distance.min() <= distance.max() <= 1
    assert not distance[foreground == 0].any()


# Python 3.12 warns about forks in multithreaded processes. The workers of the loader use no locks held by threads.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_batches_are_reproducible_with_workers_and_do_not_use_the_global_generator() -> None:
    batches = []
    for worker_count in (0, 0, 2):
        torch.manual_seed(5)
        pool = ExamplePool(
            ExampleDataset(make_small_pair, PercentileNormalization(), 3), 2, first_number=4, worker_count=worker_count
        )
        pool.refresh()
        batches.append([*draw_batch(pool, np.random.default_rng(1), 2, 16), torch.rand(1)])
        pool.close()
    assert all(
        torch.equal(first, other) for batch in batches[1:] for first, other in zip(batches[0], batch, strict=True)
    )


def test_refresh_replaces_the_oldest_volume(pool: ExamplePool) -> None:
    oldest, newest = pool[0], pool[1]
    pool.refresh()
    assert pool[0] is not oldest
    assert pool[1] is newest


def test_images_and_labels_must_match(tmp_path: Path) -> None:
    paths = []
    for depth in (4, 5):
        paths.append(tmp_path / f"{depth}.tif")
        tiff_writer.write(Segmentation(np.ones((depth, 6, 7), np.uint16), "labels"), paths[-1])
    (image, labels), *_ = read_pairs(paths[:1], paths[:1])
    assert image.shape == labels.shape == (4, 6, 7)
    with pytest.raises(BadParameter, match="differ in shape"):
        read_pairs(paths[:1], paths[1:])
    with pytest.raises(BadParameter, match="2 images and 1 label files"):
        read_pairs(paths, paths[:1])


def test_median_extents_exclude_objects_at_the_faces() -> None:
    labels = np.zeros((60, 60, 60), np.uint16)
    for number in range(8):
        z, y, x = (2 + 30 * (number >> axis & 1) for axis in range(3))
        labels[z : z + 5, y : y + 9, x : x + 13] = number + 1
    assert compute_median_extents(labels) == pytest.approx((5, 9, 13))
    labels[-3:, -1:, :50] = 9
    assert compute_median_extents(labels) == pytest.approx((5, 9, 13))
    assert compute_median_extents(np.zeros((4, 5, 6), np.uint16)) is None
    border_object = np.zeros((4, 5, 6), np.uint16)
    border_object[0, :2, :3] = 7
    assert compute_median_extents(border_object) == pytest.approx((1, 2, 3))
    # Label numbers can be as large as the dtype allows.
    for dtype, background in ((np.uint32, 0), (np.uint32, 2**32 - 9), (np.uint64, 0), (np.int64, 2**60)):
        largest = int(np.iinfo(dtype).max)
        labels = np.full((4, 5, 6), background, dtype)
        labels[0, :2, :3], labels[1:4, :2, :3] = largest, largest - 1
        sizes = [(1, 2, 3), (3, 2, 3), *([(4, 5, 6)] if background else [])]
        assert compute_median_extents(labels) == pytest.approx(np.median(sizes, axis=0))


def test_mean_diameter_of_a_sphere_is_its_diameter() -> None:
    z, y, x = np.ogrid[:31, :31, :31]
    sphere = ((z - 15) ** 2 + (y - 15) ** 2 + (x - 15) ** 2 <= 100).astype(np.uint8)
    assert compute_mean_diameter(sphere) == pytest.approx(20, rel=0.02)
