from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from scripts.recipes.optics import apply_wide_blur, expose, log_uniform, smooth_noise


class Camera(NamedTuple):
    photons: float = 100.0
    read_noise: float = 0.0
    bits: int = 16
    saturation: float = 0.0


def test_log_uniform_numbers_cover_orders_of_magnitude_evenly() -> None:
    rng = np.random.default_rng(0)
    numbers = np.array([log_uniform(rng, 1, 100) for _ in range(500)])
    assert 1 <= numbers.min() < numbers.max() <= 100
    assert (numbers < 10).mean() == pytest.approx(0.5, abs=0.08)


def test_smooth_noise_varies_over_the_requested_length() -> None:
    fine, coarse = (smooth_noise(np.random.default_rng(1), (30, 40, 50), length) for length in (2.0, 15.0))
    assert fine.shape == coarse.shape == (30, 40, 50)
    assert np.abs(np.diff(fine, axis=2)).mean() > 3 * np.abs(np.diff(coarse, axis=2)).mean()


def test_wide_blur_preserves_the_total_intensity() -> None:
    assert apply_wide_blur(np.full((16, 32, 32), 3, np.float32), (4, 8)) == pytest.approx(3, rel=1e-4)
    point = np.zeros((33, 65, 65), np.float32)
    point[14:18, 28:36, 28:36] = 1
    wide = apply_wide_blur(point, (3, 6))
    assert wide.sum() == pytest.approx(point.sum(), rel=0.15)
    assert wide.max() < 0.5


@pytest.mark.parametrize(("bits", "dtype", "top"), [(8, np.uint8, 255), (16, np.uint16, 60000)])
def test_bit_depth_determines_dtype_and_maximum(bits: int, dtype: type, top: int) -> None:
    light = np.linspace(0, 2, 16 * 16 * 16, dtype=np.float32).reshape(16, 16, 16)
    image = expose(np.random.default_rng(2), Camera(bits=bits), light)
    assert image.dtype == dtype
    assert image.max() <= top
    assert image[-4:].mean() > 3 * image[:4].mean()


def test_fewer_photons_give_more_noise() -> None:
    light = np.ones((16, 16, 16), np.float32)
    noisy, clean = (expose(np.random.default_rng(3), Camera(photons=n), light) for n in (5.0, 500.0))
    assert noisy.std() / noisy.mean() > 3 * clean.std() / clean.mean()


def test_saturation_clips_the_brightest_voxels() -> None:
    light = np.linspace(0, 1, 16 * 16 * 16, dtype=np.float32).reshape(16, 16, 16)
    image = expose(np.random.default_rng(4), Camera(bits=8, saturation=0.1), light)
    assert (image == 255).mean() == pytest.approx(0.1, abs=0.06)
