"""Sources of training volumes for the bundled models: synthetic and recorded stacks, mixed and resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import rotate

from service.core.quantities import Size
from service.training.examples import Floats, Pair, Source, draw_zoom, median_extents, zoom_pair

# Largest shape (Z, Y, X) of a resampled volume. A larger one only takes time, as crops have an edge of 48 voxels.
LARGEST = (72, 88, 88)
# Requests seldom know of objects narrower than so many voxels, as the service's estimate does not tell their width.
SPOT, SPOT_SHARE = 8.0, 0.3


@dataclass(frozen=True)
class Percentiles:
    """Normalisation by percentiles of the whole volume, with the values that the bundled model files state."""

    low: float = 1.0
    high: float = 99.8

    def __call__(self, image: NDArray[Any]) -> Floats:
        low, high = (float(v) for v in np.percentile(image, [self.low, self.high]))
        return (image.astype(np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-6))


def random_size(synthesise: Callable[[Generator, Size], Pair], widest: int = 96) -> Source:
    """Return a source of synthetic stacks of random size up to `widest`; one in five is thin, as many recorded are."""

    def draw(rng: Generator) -> Pair:
        depth = int(rng.integers(10, 32) if rng.random() < 0.2 else rng.integers(40, 65))
        width = int(rng.integers(64, widest + 1))
        return synthesise(rng, (depth, width, width))

    return draw


@dataclass(frozen=True)
class TurnedStacks:
    """Source of recorded stacks, each zoomed a little, and every second one turned by any angle in the plane.

    A turned stack is cut to the square that is known all over, which costs small volumes more than it brings them.
    """

    pairs: Sequence[Pair]

    def __call__(self, rng: Generator) -> Pair:
        image, labels = self.pairs[int(rng.integers(len(self.pairs)))]
        factors = draw_zoom(rng)
        angle = float(rng.uniform(0, 90)) if rng.random() < 0.5 else 0.0
        return zoom_pair(*_turn(image, labels, angle), factors)


def resample_to_diameter(source: Source, diameter: float, share: float) -> Source:
    """Return a source that resamples a `share` of the volumes, like a request that states the size of the objects.

    Their objects become `diameter` voxels wide, give or take a few percent: in two of three such volumes along each
    axis, in the others by one factor for all axes. A volume that would shrink by more than a third stays as it is, as
    do seven of ten volumes of spots.
    """

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        widths = median_extents(labels)
        if widths is None or rng.random() >= (share if np.max(widths) >= SPOT else SPOT_SHARE):
            return image, labels
        if rng.random() < 1 / 3:
            widths = np.full(3, np.cbrt(np.prod(widths)))
        factors = diameter / widths * np.exp(rng.normal(0, 0.05) + rng.normal(0, 0.03, 3))
        if np.min(factors) < 2 / 3:
            return image, labels
        return zoom_pair(*_crop_around_object(image, labels, np.asarray(LARGEST) / factors, rng), factors)

    return draw


def _turn(image: NDArray[Any], labels: NDArray[Any], angle: float) -> Pair:
    """Turn a stack in the plane by an angle in degrees, 0 to 90, and cut it to the square that is known all over."""
    if not angle:
        return image, labels
    edge = int(min(image.shape[1:]) / (np.cos(np.radians(angle)) + np.sin(np.radians(angle))))
    y, x = ((length - edge) // 2 for length in image.shape[1:])
    square = (slice(None), slice(y, y + edge), slice(x, x + edge))
    turned = rotate(image.astype(np.float32), angle, axes=(1, 2), reshape=False, order=1, mode="nearest")
    return turned[square], rotate(labels, angle, axes=(1, 2), reshape=False, order=0, mode="nearest")[square]


def _crop_around_object(image: NDArray[Any], labels: NDArray[Any], shape: NDArray[np.float64], rng: Generator) -> Pair:
    """Cut a box of at most `shape` around a random voxel of an object."""
    middle = np.unravel_index(int(rng.choice(np.flatnonzero(labels))), labels.shape)
    box = []
    for centre, length, size in zip(middle, labels.shape, np.ceil(shape).astype(int), strict=True):
        start = int(np.clip(centre - size // 2, 0, max(0, length - size)))
        box.append(slice(start, start + int(size)))
    return image[tuple(box)], labels[tuple(box)]


def mix(first: Source, second: Source, share: float) -> Source:
    """Return a source that draws from `second` with probability `share`, else from `first`."""
    return lambda rng: second(rng) if rng.random() < share else first(rng)
