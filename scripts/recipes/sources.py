"""Sources of training volumes for the bundled models: synthetic and recorded stacks, which can be mixed and resampled.

A source is a function that draws an image and its labels, both [Z, Y, X], with a random number generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import rotate

from service.core.quantities import Size
from service.training.examples import (
    Floats,
    Normalizer,
    Pair,
    StackSource,
    compute_median_extents,
    draw_zoom,
    zoom_pair,
)

# Maximum shape (Z, Y, X) of a resampled volume. Larger ones only cost time, because crops have an edge of 48 voxels.
MAX_RESAMPLED_SHAPE = (72, 88, 88)
# The service cannot estimate the diameter of spots, which are objects narrower than this. Their stacks are therefore
# seldom resampled to the diameter of the model.
MAX_SPOT_VOXELS = 8.0
# Fraction of the volumes of spots that are resampled in training.
RESAMPLED_SPOT_SHARE = 0.3
# The same fraction in `enlarge_spots`, and the maximum factor, which equals that of the trials of other diameters.
ENLARGED_SPOT_SHARE = 0.6
MAX_SPOT_FACTOR = 2.8
# Label of voxels that may belong to an unlabeled object.
UNKNOWN_LABEL = 65535
# Depth in voxels of synthetic flat nuclei after resampling.
FLAT_DEPTHS = (10.0, 24.0)
# Factors by which the planes of recorded stacks of flat nuclei are resampled, and the fraction of the volumes with
# factors from the first interval. The estimate of the diameter uses smaller factors than a request that states it.
FLAT_FACTORS = ((3.5, 9.6), (1.0, 3.5))
LARGE_FACTOR_SHARE = 0.7
# Fraction of the volumes of recorded flat nuclei that are normalized by their own brightness, not by that of the stack.
LOCAL_NORMALIZATION_SHARE = 0.15


@dataclass(frozen=True)
class PercentileNormalization:
    """Normalization by percentiles of the whole volume, with the defaults of the bundled models."""

    low: float = 1.0
    high: float = 99.8

    def __call__(self, image: NDArray[Any]) -> Floats:
        low, high = (float(v) for v in np.percentile(image, [self.low, self.high]))
        return (image.astype(np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-6))


def with_random_size(
    synthesize: Callable[[Generator, Size], Pair], max_width: int = 96, shallow_share: float = 0.2
) -> StackSource:
    """Return a source of synthetic stacks of random size, at most `max_width` voxels wide.

    The fraction `shallow_share` of the stacks has few planes, like many recorded stacks.
    """

    def draw(rng: Generator) -> Pair:
        depth = int(rng.integers(10, 32) if rng.random() < shallow_share else rng.integers(40, 65))
        width = int(rng.integers(64, max_width + 1))
        return synthesize(rng, (depth, width, width))

    return draw


@dataclass(frozen=True)
class AugmentedStacks:
    """Source of recorded stacks that are randomly zoomed. Half of them are also rotated in the plane.

    A rotated stack is cropped to the largest square that needs no padding. For small stacks, this loss of voxels
    outweighs the benefit of the rotation.
    """

    pairs: Sequence[Pair]

    def __call__(self, rng: Generator) -> Pair:
        image, labels = self.pairs[int(rng.integers(len(self.pairs)))]
        factors = draw_zoom(rng)
        angle = float(rng.uniform(0, 90)) if rng.random() < 0.5 else 0.0
        return zoom_pair(*_rotate(image, labels, angle), factors)


def resample_to_diameter(source: StackSource, diameter: float, share: float) -> StackSource:
    """Return a source that resamples a fraction of the volumes, like requests that specify the object diameter.

    In a resampled volume, objects are `diameter` voxels wide, within a few percent. In two thirds of these volumes,
    each axis has its own factor. In the others, all axes have the same factor. Volumes are returned unchanged if they
    would shrink by more than a third, as are most volumes of spots (see `RESAMPLED_SPOT_SHARE`).
    """

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        extents = compute_median_extents(labels)
        if extents is None or rng.random() >= (share if np.max(extents) >= MAX_SPOT_VOXELS else RESAMPLED_SPOT_SHARE):
            return image, labels
        if rng.random() < 1 / 3:
            extents = np.full(3, np.cbrt(np.prod(extents)))
        factors = diameter / extents * np.exp(rng.normal(0, 0.05) + rng.normal(0, 0.03, 3))
        if np.min(factors) < 2 / 3:
            return image, labels
        return zoom_pair(*_crop_around_object(image, labels, np.asarray(MAX_RESAMPLED_SHAPE) / factors, rng), factors)

    return draw


def resample_flat(source: StackSource, diameter: float) -> StackSource:
    """Return a source that resamples volumes of flat nuclei, like requests that specify their diameter along each axis.

    Nuclei become `diameter` pixels wide, within about 15 percent, and `FLAT_DEPTHS` voxels deep. Volumes are returned
    unchanged if a factor would be extreme.
    """

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        extents = compute_median_extents(labels)
        if extents is None:
            return image, labels
        depth = draw_log_uniform(rng, FLAT_DEPTHS)
        in_plane = diameter / np.sqrt(extents[1] * extents[2]) * np.exp(rng.normal(0, 0.12) + rng.normal(0, 0.05, 2))
        factors = np.array([depth / extents[0], *in_plane])
        if not 1 / 3 < np.min(factors) <= np.max(factors) < 13:
            return image, labels
        return zoom_pair(*_crop_around_object(image, labels, np.asarray(MAX_RESAMPLED_SHAPE) / factors, rng), factors)

    return draw


def enlarge_spots(source: StackSource, diameter: float) -> StackSource:
    """Return a source that enlarges most volumes of spots towards the diameter of the model."""

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        extents = compute_median_extents(labels)
        if extents is None or rng.random() >= ENLARGED_SPOT_SHARE:
            return image, labels
        scale = min(diameter / np.cbrt(np.prod(extents)), MAX_SPOT_FACTOR) * np.exp(rng.normal(0, 0.05))
        factors = np.full(3, scale)
        return zoom_pair(*_crop_around_object(image, labels, np.asarray(MAX_RESAMPLED_SHAPE) / factors, rng), factors)

    return draw


class FlatStacks:
    """Source of recorded stacks with nuclei a few planes deep, cropped around a nucleus, and resampled.

    Nuclei become `diameter` pixels wide, within about 15 percent. Planes are resampled by a factor from `FLAT_FACTORS`.
    Half of the stacks are rotated. The images are normalized by the percentiles of the whole stack, as in a request.
    Unknown voxels have the label `UNKNOWN_LABEL`.
    """

    def __init__(self, pairs: Sequence[Pair], diameter: float) -> None:
        normalize = PercentileNormalization()
        self._stacks = [(normalize(image), labels) for image, labels in pairs]
        self._diameter = diameter
        self._factors = []
        for _, labels in pairs:
            extents = compute_median_extents(clear_unknown(labels))
            if extents is None:
                raise ValueError("A stack for training has no labels.")
            self._factors.append(diameter / float(np.sqrt(extents[1] * extents[2])))

    def __call__(self, rng: Generator) -> Pair:
        index = int(rng.integers(len(self._stacks)))
        image, labels = self._stacks[index]
        if rng.random() < 0.5:
            angle = float(rng.uniform(0, 90))
            image = rotate(image, angle, axes=(1, 2), order=1, mode="constant")
            labels = rotate(labels, angle, axes=(1, 2), order=0, mode="constant")
        in_plane = self._factors[index] * np.exp(rng.normal(0, 0.15) + rng.normal(0, 0.05, 2))
        interval = FLAT_FACTORS[0 if rng.random() < LARGE_FACTOR_SHARE else 1]
        factors = np.array([draw_log_uniform(rng, interval), *in_plane])
        known = clear_unknown(labels)
        box = _draw_box(known, np.asarray(MAX_RESAMPLED_SHAPE) / factors, rng)
        image, labels = zoom_pair(image[box], labels[box], factors)
        if rng.random() < LOCAL_NORMALIZATION_SHARE:
            image = image / max(float(np.percentile(image, 99.8)), 0.2)
        return image, labels


def clear_unknown(labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels in which unknown voxels are background."""
    return np.where(labels == UNKNOWN_LABEL, 0, labels)


def draw_log_uniform(rng: Generator, limits: tuple[float, float]) -> float:
    """Draw a number whose logarithm is uniformly distributed."""
    return float(np.exp(rng.uniform(*np.log(limits))))


def _rotate(image: NDArray[Any], labels: NDArray[Any], angle: float) -> Pair:
    """Rotate a stack in the plane by 0 to 90 degrees, and crop it to the largest square that needs no padding."""
    if not angle:
        return image, labels
    edge = int(min(image.shape[1:]) / (np.cos(np.radians(angle)) + np.sin(np.radians(angle))))
    y, x = ((length - edge) // 2 for length in image.shape[1:])
    square = (slice(None), slice(y, y + edge), slice(x, x + edge))
    rotated = rotate(image.astype(np.float32), angle, axes=(1, 2), reshape=False, order=1, mode="nearest")
    return rotated[square], rotate(labels, angle, axes=(1, 2), reshape=False, order=0, mode="nearest")[square]


def _crop_around_object(image: NDArray[Any], labels: NDArray[Any], shape: NDArray[np.float64], rng: Generator) -> Pair:
    """Crop a stack to a box of at most `shape` around a random foreground voxel."""
    box = _draw_box(labels, shape, rng)
    return image[box], labels[box]


def _draw_box(labels: NDArray[Any], shape: NDArray[np.float64], rng: Generator) -> tuple[slice, ...]:
    """Return a box of at most `shape` around a random foreground voxel."""
    position = np.unravel_index(int(rng.choice(np.flatnonzero(labels))), labels.shape)
    box = []
    for center, length, size in zip(position, labels.shape, np.ceil(shape).astype(int), strict=True):
        start = int(np.clip(center - size // 2, 0, max(0, length - size)))
        box.append(slice(start, start + int(size)))
    return tuple(box)


def normalize_volumes(source: StackSource, normalize: Normalizer) -> StackSource:
    """Return a source of normalized volumes."""

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        return normalize(image), labels

    return draw


def mix_sources(first: StackSource, second: StackSource, share: float) -> StackSource:
    """Return a source that draws from `second` with probability `share`, otherwise from `first`."""
    return lambda rng: second(rng) if rng.random() < share else first(rng)
