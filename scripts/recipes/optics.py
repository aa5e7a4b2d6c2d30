"""Image formation in synthetic stacks: stray light, spatially varying noise, and the camera."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, zoom

Floats = NDArray[np.float32]


class Camera(Protocol):
    """Camera parameters, documented in `scripts.recipes.synthetic_nuclei.Scene`."""

    @property
    def photons(self) -> float: ...
    @property
    def read_noise(self) -> float: ...
    @property
    def bits(self) -> int: ...
    @property
    def saturation(self) -> float: ...


def log_uniform(rng: Generator, low: float, high: float) -> float:
    """Draw a number from the log-uniform distribution between `low` and `high`."""
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def smooth_noise(rng: Generator, shape: tuple[int, ...], length: float) -> Floats:
    """Draw smooth noise [z, y, x] that varies over about `length` voxels and has a standard deviation near 1."""
    coarse = [max(2, math.ceil(edge / max(length, 1)) + 1) for edge in shape]
    noise = rng.standard_normal(coarse, dtype=np.float32)
    factors = [edge / small for edge, small in zip(shape, coarse, strict=True)]
    return np.asarray(zoom(noise, factors, order=1, mode="nearest", grid_mode=True) * np.float32(1.5))


def apply_wide_blur(light: Floats, sigmas: tuple[float, float]) -> Floats:
    """Apply a wide Gaussian blur to light [z, y, x], with standard deviations along z and in the plane.

    The blur is computed on every second plane and every fourth pixel, because the result is smooth.
    """
    sigma_z, sigma_yx = sigmas
    small = gaussian_filter(light[::2, ::4, ::4], [sigma_z / 2, sigma_yx / 4, sigma_yx / 4], truncate=2.5)
    factors = [edge / coarse for edge, coarse in zip(light.shape, small.shape, strict=True)]
    return np.asarray(zoom(small, factors, order=1, mode="nearest", grid_mode=True))


def expose(rng: Generator, camera: Camera, light: Floats) -> NDArray[Any]:
    """Simulate a camera: convert light to gray values of type uint8 or uint16, both [Z, Y, X].

    The light must not be negative. It is 1 for an object of typical brightness.
    """
    counts = rng.poisson(light * np.float32(camera.photons)).astype(np.float32)
    counts += np.float32(camera.read_noise) * rng.standard_normal(light.shape, dtype=np.float32)
    if rng.random() < 0.25:
        counts = gaussian_filter(counts, rng.uniform(0.3, 0.7), truncate=2)
    top = float(np.quantile(counts[::2, ::2, ::2], 1 - camera.saturation))
    full = 255 if camera.bits == 8 else int(rng.integers(600, 60000))
    offset = 0.02 * full * rng.random()
    scaled = counts * ((full - offset) / max(top, 1e-3)) + offset
    dtype = np.uint8 if camera.bits == 8 else np.uint16
    return np.asarray(np.clip(np.rint(scaled), 0, full), dtype)
