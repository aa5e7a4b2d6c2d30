"""Examples for training: volumes with their targets, kept in a pool from which augmented crops are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, zoom
from torch import Tensor

from service.training.synthesis import synthesise
from service.training.targets import distance_target

Floats = NDArray[np.float32]
Pair = tuple[NDArray[Any], NDArray[Any]]
Source = Callable[[Generator], Pair]
Normalise = Callable[[NDArray[Any]], Floats]


class Example(NamedTuple):
    """One volume, all [Z, Y, X]: normalised image float32, foreground bool, distance float32."""

    image: Floats
    foreground: NDArray[np.bool_]
    distance: Floats


@dataclass(frozen=True)
class Percentiles:
    """The normalisation that the model file states, over the whole volume."""

    low: float = 1.0
    high: float = 99.8

    def __call__(self, image: NDArray[Any]) -> Floats:
        low, high = (float(v) for v in np.percentile(image, [self.low, self.high]))
        return (image.astype(np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-6))


def synthetic(rng: Generator) -> Pair:
    """A synthetic stack of random size; one in five is thin, as stacks often are."""
    depth = int(rng.integers(10, 32) if rng.random() < 0.2 else rng.integers(40, 65))
    width = int(rng.integers(64, 97))
    return synthesise(rng, (depth, width, width))


def recorded(pairs: Sequence[Pair]) -> Source:
    """A source of recorded volumes (image, labels), each time zoomed a little along every axis."""

    def draw(rng: Generator) -> Pair:
        image, labels = pairs[int(rng.integers(len(pairs)))]
        factors = np.exp(rng.uniform(-0.2, 0.2) + rng.uniform(-0.12, 0.12, 3))
        return (
            zoom(image.astype(np.float32), factors, order=1, mode="nearest", grid_mode=True),
            zoom(labels, factors, order=0, mode="nearest", grid_mode=True),
        )

    return draw


def mixed(first: Source, second: Source, share: float) -> Source:
    """Draws from `second` with probability `share`, else from `first`."""
    return lambda rng: second(rng) if rng.random() < share else first(rng)


class Pool:
    """Volumes in memory, one of which is replaced whenever `refresh` is called.

    The next volume is made in a second thread while the network trains. Every volume has a number and a random
    generator of its own, so that a pool which begins with volume `first` is the one that was refreshed so often.
    """

    def __init__(self, source: Source, normalise: Normalise, size: int, seed: int, first: int = 0) -> None:
        self._source = source
        self._normalise = normalise
        self._seed = seed
        self._executor = ThreadPoolExecutor(1)
        self._number = first
        made = {number % size: self._make(number) for number in range(first, first + size)}
        self._examples = [made[place] for place in range(size)]
        self._next: Future[Example] = self._executor.submit(self._make, first + size)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def refresh(self) -> None:
        """Replace the oldest volume by the one that is ready, waiting for it if need be, and order another."""
        self._examples[self._number % len(self)] = self._next.result()
        self._number += 1
        self._next = self._executor.submit(self._make, self._number + len(self))

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _make(self, number: int) -> Example:
        image, labels = self._source(np.random.default_rng([self._seed, 1, number]))
        return Example(self._normalise(image), labels > 0, distance_target(labels))


def batch(pool: Pool, rng: Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
    """Images [size, 1, edge, edge, edge] and targets [size, 2, edge, edge, edge] (foreground, distance), float32."""
    crops = [_augment(_crop(pool[int(rng.integers(len(pool)))], rng, edge), rng) for _ in range(size)]
    stacked = torch.from_numpy(np.stack(crops))
    return stacked[:, :1].contiguous(), stacked[:, 1:].contiguous()


def _crop(example: Example, rng: Generator, edge: int) -> Floats:
    """[3, edge, edge, edge] from somewhere in the volume; zeros outside, as sliding windows pad with them."""
    crop = np.zeros((3, edge, edge, edge), np.float32)
    inner, outer = [], []
    for length in example.image.shape:
        low, high = min(0, length - edge), max(0, length - edge)
        start = int(rng.integers(low, high + 1))
        begin, end = max(start, 0), min(start + edge, length)
        outer.append(slice(begin, end))
        inner.append(slice(begin - start, end - start))
    for channel, source in zip(crop, example, strict=True):
        channel[tuple(inner)] = source[tuple(outer)]
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
