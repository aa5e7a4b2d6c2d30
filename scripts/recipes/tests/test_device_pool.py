"""Tests of the pool of volumes on a device, with the CPU as device."""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from scripts.recipes.device_pool import DevicePool, augment_images, blur_images
from service.training.examples import ExampleDataset, Floats, Pair


def draw_numbered_voxels(rng: np.random.Generator) -> Pair:
    """Return a volume of a random depth whose image and labels are the same numbers."""
    labels = rng.integers(1, 2000, (int(rng.integers(3, 12)), 9, 9)).astype(np.uint16)
    return labels, labels


def normalize(image: Floats) -> Floats:
    return image.astype(np.float32)


def make_pool(size: int = 8) -> DevicePool:
    dataset = ExampleDataset(draw_numbered_voxels, normalize, 1, lambda labels: labels[None].astype(np.float32))
    return DevicePool(
        dataset, size, torch.device("cpu"), first_number=0, worker_count=0, augment=lambda images, _rng: images
    )


def test_image_and_targets_of_a_crop_stay_aligned() -> None:
    images, targets = make_pool().draw(np.random.default_rng(0), 16, 8)
    assert torch.equal(images, targets)
    assert images.shape == (16, 1, 8, 8, 8)
    # Crops of shallow volumes are padded with zeros.
    assert 0 < (images == 0).float().mean() < 1


def test_refreshing_replaces_the_oldest_volume() -> None:
    pool = make_pool(2)
    before = {float(value) for value in pool.draw(np.random.default_rng(0), 8, 8)[0].unique()}
    for _ in range(2):
        pool.refresh()
    after = {float(value) for value in pool.draw(np.random.default_rng(0), 8, 8)[0].unique()}
    assert len(before & after) < len(before) / 2


def test_each_image_has_its_own_gaussian_blur() -> None:
    """An impulse is spread over its neighbors, as by SciPy, or remains as it is."""
    impulse = torch.zeros(2, 1, 9, 9, 9)
    impulse[:, :, 4, 4, 4] = 1
    sigmas = np.array([[0.0, 0.9], [0.0, 0.5], [0.0, 0.5]])
    blurred = blur_images(impulse, sigmas)
    assert torch.allclose(blurred[0], impulse[0])
    expected = gaussian_filter(impulse[1, 0].numpy(), sigmas[:, 1], radius=2)
    assert np.allclose(blurred[1, 0], expected, atol=1e-5)


def test_augmented_images_remain_finite() -> None:
    images = torch.from_numpy(gaussian_filter(np.random.default_rng(0).normal(0, 1, (4, 1, 12, 12, 12)), 1)).float()
    assert augment_images(images, np.random.default_rng(1)).isfinite().all()
