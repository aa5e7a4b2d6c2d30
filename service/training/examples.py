"""Examples for training: volumes with their targets, kept in a pool from which augmented crops are drawn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import find_objects, gaussian_filter, rotate, zoom
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from service.training.instance_targets import instance_targets

Floats = NDArray[np.float32]
Pair = tuple[NDArray[Any], NDArray[Any]]
Source = Callable[[Generator], Pair]
Normalise = Callable[[NDArray[Any]], Floats]
Targets = Callable[[NDArray[Any]], Floats]

# Of volumes that are resampled to an object size; larger ones only take time, as crops of 48 are drawn from them.
LARGEST = (72, 88, 88)


class Example(NamedTuple):
    """One volume: normalised image [Z, Y, X], targets [T, Z, Y, X], the first of which is above 0 in objects."""

    image: Floats
    targets: Floats


@dataclass(frozen=True)
class Percentiles:
    """The normalisation that the model file states, over the whole volume."""

    low: float = 1.0
    high: float = 99.8

    def __call__(self, image: NDArray[Any]) -> Floats:
        low, high = (float(v) for v in np.percentile(image, [self.low, self.high]))
        return (image.astype(np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-6))


def synthetic(make: Callable[[Generator, tuple[int, int, int]], Pair]) -> Source:
    """A source of synthetic stacks of random size; one in five is thin, as stacks often are."""

    def draw(rng: Generator) -> Pair:
        depth = int(rng.integers(10, 32) if rng.random() < 0.2 else rng.integers(40, 65))
        width = int(rng.integers(64, 97))
        return make(rng, (depth, width, width))

    return draw


@dataclass(frozen=True)
class Recorded:
    """A source of recorded volumes (image, labels), each time zoomed a little along every axis.

    With `turning`, every second one is turned by any angle in the plane and cut to the square that is known all over,
    which costs small volumes more than it brings.
    """

    pairs: Sequence[Pair]
    turning: bool = False

    def __call__(self, rng: Generator) -> Pair:
        image, labels = self.pairs[int(rng.integers(len(self.pairs)))]
        factors = np.exp(rng.uniform(-0.2, 0.2) + rng.uniform(-0.12, 0.12, 3))
        angle = float(rng.uniform(0, 90)) if self.turning and rng.random() < 0.5 else 0.0
        return _zoom(*_turn(image, labels, angle), factors)


def stated(source: Source, diameter: float, share: float) -> Source:
    """Volumes of `source`, of which a `share` is resampled as for requests that state the size of the objects.

    Their objects become `diameter` voxels wide, give or take a few percent: in two of three such volumes along each
    axis, in the others by one factor for all axes. What would have to shrink by more than a third stays as it is.
    """

    def draw(rng: Generator) -> Pair:
        image, labels = source(rng)
        widths = object_widths(labels)
        if rng.random() >= share or widths is None:
            return image, labels
        if rng.random() < 1 / 3:
            widths = np.full(3, np.cbrt(np.prod(widths)))
        factors = diameter / widths * np.exp(rng.normal(0, 0.05) + rng.normal(0, 0.03, 3))
        if factors.min() < 2 / 3:
            return image, labels
        return _zoom(*_part(image, labels, np.asarray(LARGEST) / factors, rng), factors)

    return draw


def object_widths(labels: NDArray[Any]) -> NDArray[np.float64] | None:
    """Median extents of the objects along z, y and x in voxels, [3]; None without any object.

    Objects at the border, of which only a part is known, count only where there are fewer than three others.
    """
    boxes = [box for box in find_objects(labels) if box is not None]
    whole = [box for box in boxes if all(s.start > 0 and s.stop < n for s, n in zip(box, labels.shape, strict=True))]
    extents = [[s.stop - s.start for s in box] for box in (whole if len(whole) > 2 else boxes)]
    return np.asarray(np.median(extents, axis=0), np.float64) if extents else None


def _zoom(image: NDArray[Any], labels: NDArray[Any], factors: NDArray[np.float64]) -> Pair:
    return (
        zoom(image.astype(np.float32), factors, order=1, mode="nearest", grid_mode=True),
        zoom(labels, factors, order=0, mode="nearest", grid_mode=True),
    )


def _turn(image: NDArray[Any], labels: NDArray[Any], angle: float) -> Pair:
    """Turned in the plane by an angle in degrees, 0 to 90, and cut to the square that is known all over."""
    if not angle:
        return image, labels
    edge = int(min(image.shape[1:]) / (np.cos(np.radians(angle)) + np.sin(np.radians(angle))))
    y, x = ((length - edge) // 2 for length in image.shape[1:])
    square = (slice(None), slice(y, y + edge), slice(x, x + edge))
    turned = rotate(image.astype(np.float32), angle, axes=(1, 2), reshape=False, order=1, mode="nearest")
    return turned[square], rotate(labels, angle, axes=(1, 2), reshape=False, order=0, mode="nearest")[square]


def _part(image: NDArray[Any], labels: NDArray[Any], shape: NDArray[np.float64], rng: Generator) -> Pair:
    """A box of at most `shape` around some voxel of an object."""
    middle = np.unravel_index(int(rng.choice(np.flatnonzero(labels))), labels.shape)
    box = []
    for centre, length, size in zip(middle, labels.shape, np.ceil(shape).astype(int), strict=True):
        start = int(np.clip(centre - size // 2, 0, max(0, length - size)))
        box.append(slice(start, start + int(size)))
    return image[tuple(box)], labels[tuple(box)]


def mixed(first: Source, second: Source, share: float) -> Source:
    """Draws from `second` with probability `share`, else from `first`."""
    return lambda rng: second(rng) if rng.random() < share else first(rng)


@dataclass(frozen=True)
class Volumes(Dataset[Example]):
    """Examples by number, each made by a random generator of its own: the same whoever makes it, and when."""

    source: Source
    normalise: Normalise
    seed: int
    targets: Targets = instance_targets

    def __getitem__(self, number: int) -> Example:
        image, labels = self.source(np.random.default_rng([self.seed, 1, number]))
        return Example(self.normalise(image), self.targets(labels))


class Pool:
    """Volumes in memory, one of which is replaced whenever `refresh` is called.

    first    number of the oldest volume: such a pool is the one that began with 0 and was refreshed so often
    workers  processes that make the volumes; 0: a thread makes the next one while the network trains
    targets  makes of labels what the network learns
    """

    def __init__(  # noqa: PLR0913
        self,
        source: Source,
        normalise: Normalise,
        size: int,
        seed: int,
        *,
        first: int = 0,
        workers: int = 0,
        targets: Targets = instance_targets,
    ) -> None:
        volumes = Volumes(source, normalise, seed, targets)
        self._made: Iterator[Example] = _loaded(volumes, first, workers) if workers else _Ahead(volumes, first)
        self._number = first
        made = {number % size: next(self._made) for number in range(first, first + size)}
        self._examples = [made[place] for place in range(size)]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def refresh(self) -> None:
        """Replace the oldest volume by the one that is ready, waiting for it if need be, and order another."""
        self._examples[self._number % len(self)] = next(self._made)
        self._number += 1

    def close(self) -> None:
        if isinstance(self._made, _Ahead):
            self._made.close()
        # Workers end with the iterator that they feed.
        self._made = iter(())


class _Ahead:
    """Volumes in order, made in a thread, one ahead of those that were asked for."""

    def __init__(self, volumes: Volumes, first: int) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._ordered: deque[Future[Example]] = deque()
        self._orders = (self._executor.submit(volumes.__getitem__, number) for number in itertools.count(first))

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Example:
        while len(self._ordered) < 2:
            self._ordered.append(next(self._orders))
        return self._ordered.popleft().result()

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _loaded(volumes: Volumes, first: int, workers: int) -> Iterator[Example]:
    """Volumes in order, made by processes that live as long as the iterator.

    The generator of its own keeps the loader from drawing a number of torch's, which layers may draw from too.
    """
    loader = DataLoader(
        volumes,
        batch_size=None,
        sampler=itertools.count(first),
        num_workers=workers,
        collate_fn=_unchanged,
        generator=torch.Generator(),
    )
    return iter(loader)


def _unchanged(example: Any) -> Any:
    """Arrays stay arrays: tensors would travel through shared memory, of which containers have 64 MiB."""
    return example


def batch(pool: Pool, rng: Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
    """Images [size, 1, edge, edge, edge] and targets [size, T, edge, edge, edge], float32."""
    crops = [_augment(_crop(pool[int(rng.integers(len(pool)))], rng, edge), rng) for _ in range(size)]
    stacked = torch.from_numpy(np.stack(crops))
    return stacked[:, :1].contiguous(), stacked[:, 1:].contiguous()


def _crop(example: Example, rng: Generator, edge: int) -> Floats:
    """Image and targets from somewhere in the volume, [1 + T, edge, edge, edge].

    Outside of the volume are zeros, as sliding windows pad with them. Every second crop holds some voxel of an object
    at a random place, or crops of sparse volumes would often be empty.
    """
    crop = np.zeros((1 + len(example.targets), edge, edge, edge), np.float32)
    inner, outer = [], []
    shape = example.image.shape
    held = np.flatnonzero(example.targets[0]) if rng.random() < 0.5 else np.zeros(0, np.intp)
    voxel = np.unravel_index(int(rng.choice(held)), shape) if held.size else None
    for axis, length in enumerate(shape):
        low, high = min(0, length - edge), max(0, length - edge)
        if voxel is not None:
            low, high = max(low, int(voxel[axis]) - edge + 1), min(high, int(voxel[axis]))
        start = int(rng.integers(low, high + 1))
        begin, end = max(start, 0), min(start + edge, length)
        outer.append(slice(begin, end))
        inner.append(slice(begin - start, end - start))
    crop[0][tuple(inner)] = example.image[tuple(outer)]
    crop[1:][(slice(None), *inner)] = example.targets[(slice(None), *outer)]
    return crop


def _augment(crop: Floats, rng: Generator) -> Floats:
    """Mirror, turn in the plane, then change the image's contrast, gamma, sharpness and noise."""
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
