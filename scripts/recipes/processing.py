"""What befalls a stack between the detector and the file: other noise, and what people and programs do to images.

Each step befalls a few stacks, so that most stay as they are and some meet two or three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, median_filter, zoom

from scripts.recipes.optics import Floats, log_uniform
from service.training.examples import Pair, Source

Step = Callable[[Generator, Floats], Floats]
"""Change of an image [Z, Y, X] whose values go from about 0 to about 1."""


def multiply_noise(rng: Generator, image: Floats) -> Floats:
    """Give every voxel a gain of its own, as the avalanche of a photomultiplier does."""
    shape = log_uniform(rng, 4, 40)
    return image * (rng.standard_gamma(shape, image.shape) / shape).astype(np.float32)


def correlate_noise(rng: Generator, image: Floats) -> Floats:
    """Add noise that neighbouring voxels share, as after interpolation, denoising or compression."""
    widths = [rng.uniform(0, 0.7), *[rng.uniform(0.4, 1.3)] * 2]
    noise = gaussian_filter(rng.standard_normal(image.shape, dtype=np.float32), widths, truncate=3)
    return image + noise * np.float32(log_uniform(rng, 0.01, 0.1) / noise.std())


def flicker(rng: Generator, image: Floats) -> Floats:
    """Change the brightness from plane to plane."""
    return image * rng.lognormal(0, rng.uniform(0.03, 0.2), (len(image), 1, 1)).astype(np.float32)


def jitter_rows(rng: Generator, image: Floats) -> Floats:
    """Change the brightness from row to row, as an unsteady laser of a scanning microscope does."""
    return image * rng.lognormal(0, rng.uniform(0.02, 0.1), (*image.shape[:2], 1)).astype(np.float32)


def clip_dark(rng: Generator, image: Floats) -> Floats:
    """Subtract so much that part of the voxels is exactly 0, as a high offset of the detector does."""
    return np.asarray(np.maximum(image - np.quantile(image, rng.uniform(0.05, 0.6)), 0), np.float32)


def smooth_by_median(rng: Generator, image: Floats) -> Floats:
    """Take the median of 3 x 3 pixels, or of 3 x 3 x 3 voxels."""
    return np.asarray(median_filter(image, (1, 3, 3) if rng.random() < 0.7 else 3), np.float32)


def sharpen(rng: Generator, image: Floats) -> Floats:
    """Sharpen by an unsharp mask, whose dark and bright seams deconvolution leaves, too."""
    blurred = gaussian_filter(image, [rng.uniform(0.3, 1.5), *[rng.uniform(0.7, 2.0)] * 2], truncate=3)
    return np.maximum(image + np.float32(rng.uniform(0.4, 1.5)) * (image - blurred), 0)


def sample_coarsely(rng: Generator, image: Floats) -> Floats:
    """Sample more coarsely along z, or along all axes, and interpolate what was left out."""
    factors = np.array([rng.uniform(0.35, 0.8), 1, 1] if rng.random() < 0.5 else [rng.uniform(0.5, 0.85)] * 3)
    coarse = zoom(image, factors, order=1, mode="nearest", grid_mode=True)
    back = np.array(image.shape) / coarse.shape
    return np.asarray(zoom(coarse, back, order=1, mode="nearest", grid_mode=True), np.float32)


STEPS: tuple[tuple[float, Step], ...] = (
    (0.08, sample_coarsely),
    (0.12, multiply_noise),
    (0.15, correlate_noise),
    (0.1, flicker),
    (0.06, jitter_rows),
    (0.08, smooth_by_median),
    (0.1, sharpen),
    (0.12, clip_dark),
)
"""Probability of each step, in their order."""


def process(rng: Generator, image: NDArray[Any]) -> NDArray[Any]:
    """Return an image [Z, Y, X] after those steps that befall it: float32 from 0 to about 1, or unchanged."""
    chosen = [step for share, step in STEPS if rng.random() < share]
    if not chosen:
        return image
    low, high = (np.float32(value) for value in (image.min(), np.quantile(image, 0.999)))
    result = (image.astype(np.float32) - low) / max(high - low, np.float32(1e-6))
    for step in chosen:
        result = step(rng, result)
    return result


def process_stacks(source: Source) -> Source:
    """Return a source whose images are processed."""

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        return process(rng, image), labels

    return draw
