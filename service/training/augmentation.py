"""Random variations of the crops on which a network is trained."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Floats = NDArray[np.float32]


def augment(crop: Floats, rng: np.random.Generator) -> Floats:
    """Flip and transpose a crop at random. Then vary the gamma, sharpness, noise and contrast of its image."""
    flips = tuple(axis for axis in (1, 2, 3) if rng.random() < 0.5)
    crop = np.flip(crop, flips)
    if rng.random() < 0.5:
        crop = crop.swapaxes(2, 3)
    crop = np.ascontiguousarray(crop)
    image = crop[0]
    if rng.random() < 0.5:
        gamma = np.exp(rng.uniform(-0.4, 0.4))
        image = np.sign(image) * np.abs(image) ** np.float32(gamma)
    if rng.random() < 0.15:
        image = gaussian_filter(image, [rng.uniform(0, 1.2), *[rng.uniform(0, 0.9)] * 2], truncate=2)
    if rng.random() < 0.3:
        image = image + np.float32(rng.uniform(0.01, 0.12)) * rng.standard_normal(image.shape, dtype=np.float32)
    crop[0] = image * np.float32(np.exp(rng.uniform(-0.35, 0.35))) + np.float32(rng.uniform(-0.06, 0.06))
    return crop
