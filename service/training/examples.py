"""Examples for training: stacks and sizes of their objects, volumes with targets, and augmented crops in batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import find_objects, gaussian_filter, zoom
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from service.core.errors import BadParameter
from service.core.sections.computing import Training
from service.core.types import Selection
from service.formats import stack_reader
from service.training.instance_targets import instance_targets

Floats = NDArray[np.float32]
Pair = tuple[NDArray[Any], NDArray[Any]]
"""Image and labels of one stack, both [Z, Y, X]."""
Source = Callable[[np.random.Generator], Pair]
Normalise = Callable[[NDArray[Any]], Floats]
Targets = Callable[[NDArray[Any]], Floats]
Made = TypeVar("Made")

LIMIT_BYTES = 4 * 2**30
STEPS_PER_VOLUME = 2


def read_pairs(images: Sequence[Path], labels: Sequence[Path]) -> list[Pair]:
    """Read stacks of one channel and their labels. Raises BadFile, and BadParameter for unequal numbers or shapes."""
    if len(images) != len(labels):
        raise BadParameter(f"Every image needs its labels: there are {len(images)} images and {len(labels)} labels.")
    pairs = []
    for image, truth in zip(images, labels, strict=True):
        pixels, numbers = (
            stack_reader.read(path, Selection(), LIMIT_BYTES, None).array()[0] for path in (image, truth)
        )
        if pixels.shape != numbers.shape:
            raise BadParameter(f"{image} and {truth} differ in shape: {pixels.shape} and {numbers.shape}.")
        pairs.append((pixels, numbers))
    return pairs


def split_pairs(pairs: Sequence[Pair], share: float) -> tuple[list[Pair], list[Pair]]:
    """Split every stack along its longest axis: the last `share` is for validation, the rest for training.

    Raises BadParameter where a part has no object.
    """
    training: list[Pair] = []
    validation: list[Pair] = []
    for number, (image, labels) in enumerate(pairs):
        axis = int(np.argmax(image.shape))
        cut = round(image.shape[axis] * (1 - share))
        parts = [np.split(volume, [cut], axis) for volume in (image, labels)]
        for kept, index, name in ((training, 0, "training"), (validation, 1, "validation")):
            if not parts[1][index].any():
                raise BadParameter(f"Stack {number + 1}: the part for {name} has no object; change --validation.")
            kept.append((parts[0][index], parts[1][index]))
    return training, validation


def median_extents(labels: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return the median extents of the objects in labels [Z, Y, X] along z, y and x in voxels, [3]; None without any.

    Objects at the border, of which only a part is known, count only where there are fewer than three others.
    """
    if labels.max(initial=0) > labels.size:
        # `find_objects` has a place in memory for every number up to the largest.
        labels = np.searchsorted(np.union1d([0], labels), labels)
    boxes = [box for box in find_objects(labels) if box is not None]
    whole = [box for box in boxes if _is_inside(box, labels.shape)]
    extents = [[s.stop - s.start for s in box] for box in (whole if len(whole) > 2 else boxes)]
    return np.asarray(np.median(extents, axis=0), np.float64) if extents else None


def _is_inside(box: Sequence[slice], shape: Sequence[int]) -> bool:
    """Return whether a box touches no border."""
    return all(side.start > 0 and side.stop < length for side, length in zip(box, shape, strict=True))


def mean_diameter(labels: NDArray[Any]) -> float:
    """Return the mean diameter in voxels of spheres of the objects' volumes; 1 without any object."""
    volumes = np.unique(labels[labels > 0], return_counts=True)[1]
    return float(np.mean(np.cbrt(6 * volumes / np.pi))) if len(volumes) else 1.0


class Example(NamedTuple):
    """One volume: normalised image [Z, Y, X], targets [T, Z, Y, X], the first of which is above 0 in objects."""

    image: Floats
    targets: Floats


@dataclass(frozen=True)
class RecordedStacks:
    """Source of recorded stacks, each zoomed a little at random."""

    pairs: Sequence[Pair]

    def __call__(self, rng: np.random.Generator) -> Pair:
        image, labels = self.pairs[int(rng.integers(len(self.pairs)))]
        return zoom_pair(image, labels, draw_zoom(rng))


def draw_zoom(rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw zoom factors along z, y and x, [3]: a common one, and a smaller one for each axis."""
    return np.asarray(np.exp(rng.uniform(-0.2, 0.2) + rng.uniform(-0.12, 0.12, 3)))


def zoom_pair(image: NDArray[Any], labels: NDArray[Any], factors: NDArray[np.float64]) -> Pair:
    """Resample image (linearly) and labels (nearest voxel), both [Z, Y, X], by factors along each axis."""
    return (
        zoom(image.astype(np.float32), factors, order=1, mode="nearest", grid_mode=True),
        zoom(labels, factors, order=0, mode="nearest", grid_mode=True),
    )


@dataclass(frozen=True)
class ExampleDataset(Dataset[Example]):
    """Examples by number, each made by a random generator of its own: equal in every process and at any time."""

    source: Source
    normalise: Normalise
    seed: int
    targets: Targets = instance_targets

    def __getitem__(self, number: int) -> Example:
        image, labels = self.source(np.random.default_rng([self.seed, 1, number]))
        return Example(self.normalise(image), self.targets(labels))


class ExamplePool:
    """Examples in memory, one of which is replaced whenever `refresh` is called.

    first    number of the oldest example: such a pool equals one that began at 0 and was refreshed `first` times
    workers  processes that make the examples; 0: a thread makes the next one while the network trains
    """

    def __init__(self, dataset: ExampleDataset, size: int, *, first: int = 0, workers: int = 0) -> None:
        self._source: Iterator[Example] = (
            _load_in_processes(dataset, first, workers) if workers else _prefetch(dataset.__getitem__, first)
        )
        self._oldest = first
        made = {number % size: next(self._source) for number in range(first, first + size)}
        self._examples = [made[place] for place in range(size)]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def refresh(self) -> None:
        """Replace the oldest example by the next one, waiting for it if need be."""
        self._examples[self._oldest % len(self)] = next(self._source)
        self._oldest += 1

    def close(self) -> None:
        """End the thread or the processes that make examples."""
        # They end with the iterator that they feed.
        self._source = iter(())


def _prefetch(make: Callable[[int], Made], first: int) -> Generator[Made, None, None]:
    """Yield what `make` returns for `first`, `first + 1`, ..., computed in a thread, one call ahead."""
    with ThreadPoolExecutor(1) as executor:
        ahead = executor.submit(make, first)
        for number in itertools.count(first + 1):
            made, ahead = ahead, executor.submit(make, number)
            yield made.result()


def _load_in_processes(dataset: ExampleDataset, first: int, workers: int) -> Iterator[Example]:
    """Examples in order, made by processes that live as long as the iterator.

    The loader gets a generator of its own, or it would draw a number of torch's, which layers may draw from too.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=itertools.count(first),
        num_workers=workers,
        collate_fn=_keep_arrays,
        generator=torch.Generator(),
    )
    return iter(loader)


def _keep_arrays(example: Any) -> Any:
    """Return arrays as they are: tensors would travel through shared memory, of which containers have 64 MiB."""
    return example


def draw_batch(pool: ExamplePool, rng: np.random.Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
    """Draw images [size, 1, edge, edge, edge] and targets [size, T, edge, edge, edge], float32."""
    crops = [_augment(_crop(pool[int(rng.integers(len(pool)))], rng, edge), rng) for _ in range(size)]
    stacked = torch.from_numpy(np.stack(crops))
    return stacked[:, :1].contiguous(), stacked[:, 1:].contiguous()


def _crop(example: Example, rng: np.random.Generator, edge: int) -> Floats:
    """Cut image and targets somewhere in the volume, [1 + T, edge, edge, edge].

    Outside of the volume are zeros, because sliding windows pad with them. Every second crop holds some voxel of an
    object at a random place, or crops of sparse volumes would often be empty.
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


def _augment(crop: Floats, rng: np.random.Generator) -> Floats:
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


def prefetch_batches(
    pool: ExamplePool, plan: Training, first: int, *, pinned: bool
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield images and targets of steps `first`, `first + 1`, ..., in page-locked memory if `pinned`.

    The next ones are made while the device trains on the current ones. The pool is refreshed before a step, so that a
    resumed training begins that step with an equal pool.
    """

    def make(step: int) -> tuple[Tensor, Tensor]:
        if step > first and step % STEPS_PER_VOLUME == 0:
            pool.refresh()
        rng = np.random.default_rng([plan.seed, 2, step])
        images, targets = draw_batch(pool, rng, plan.batch_size, plan.edge)
        return (images.pin_memory(), targets.pin_memory()) if pinned else (images, targets)

    return _prefetch(make, first)


def cut_tiles(pair: Pair, normalise: Normalise, edge: int) -> tuple[Tensor, Tensor]:
    """Cut up to eight cubes, one per corner of a stack: images [B, 1, e, e, e] and targets [B, 2, e, e, e]."""
    image, labels = pair
    stacked = np.concatenate([normalise(image)[None], instance_targets(labels)])
    stacked = np.pad(stacked, [(0, 0), *((0, max(0, edge - length)) for length in image.shape)])
    corners = [sorted({0, length - edge}) for length in stacked.shape[1:]]
    cubes = [
        stacked[:, z : z + edge, y : y + edge, x : x + edge] for z in corners[0] for y in corners[1] for x in corners[2]
    ]
    tiles = torch.from_numpy(np.ascontiguousarray(np.stack(cubes), dtype=np.float32))
    return tiles[:, :1].contiguous(), tiles[:, 1:].contiguous()
