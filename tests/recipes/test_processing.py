from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from scripts.recipes import processing
from scripts.recipes.processing import STEPS, Step, process, process_stacks

STEPS_BY_NAME = {step.__name__: step for _share, step in STEPS}


def blobs() -> np.ndarray:
    noise = np.random.default_rng(5).standard_normal((16, 40, 40), dtype=np.float32)
    smooth = gaussian_filter(noise, 3)
    return (smooth - smooth.min()) / (smooth.max() - smooth.min())


@pytest.mark.parametrize("step", STEPS_BY_NAME.values(), ids=STEPS_BY_NAME)
def test_a_step_changes_the_image_but_not_what_it_shows(step: Step) -> None:
    image = blobs()
    for seed in range(5):
        result = step(np.random.default_rng(seed), image.copy())
        assert result.dtype == np.float32
        assert result.shape == image.shape
        assert np.isfinite(result).all()
        assert not np.array_equal(result, image)
        smoothed, before = (gaussian_filter(part, 2).ravel() for part in (result, image))
        assert np.corrcoef(smoothed, before)[0, 1] > 0.75


def test_noise_that_is_shared_is_smoother_than_noise_of_each_voxel() -> None:
    image, rng = np.full((16, 40, 40), 0.5, np.float32), np.random.default_rng(0)
    shared, own = processing.correlate_noise(rng, image) - image, processing.multiply_noise(rng, image) - image
    roughness = [np.abs(np.diff(noise, axis=2)).mean() / noise.std() for noise in (shared, own)]
    assert roughness[0] < 0.75 * roughness[1]


def test_part_of_a_clipped_image_is_black() -> None:
    result = processing.clip_dark(np.random.default_rng(0), blobs())
    assert 0.03 < np.mean(result == 0) < 0.65


def test_some_images_stay_as_they_are_and_labels_always_do() -> None:
    image, labels = (blobs() * 250).astype(np.uint8), np.arange(16 * 1600).reshape(16, 40, 40)
    source = process_stacks(lambda _rng: (image, labels))
    results = [source(np.random.default_rng(seed)) for seed in range(40)]
    assert all(truth is labels for _image, truth in results)
    kept = sum(result is image for result, _truth in results)
    assert 8 < kept < 32
    again = process(np.random.default_rng(7), image)
    assert np.array_equal(results[7][0], again)
