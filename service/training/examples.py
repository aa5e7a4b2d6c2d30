"""Training examples: stacks with labels, volumes with targets, and batches of augmented crops."""

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
from scipy.ndimage import find_objects, zoom
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from service.core.errors import BadParameter
from service.core.sections.computing import Training
from service.core.types import Selection
from service.formats import stack_reader
from service.training.augmentation import augment
from service.training.targets.instances import compute_instance_targets

Floats = NDArray[np.float32]
Pair = tuple[NDArray[Any], NDArray[Any]]
"""The image and the labels of one stack, both [Z, Y, X]."""
StackSource = Callable[[np.random.Generator], Pair]
"""Function that returns a random image and its labels."""
Normalizer = Callable[[NDArray[Any]], Floats]
TargetFunction = Callable[[NDArray[Any]], Floats]
T = TypeVar("T")

# Maximum size of a decoded stack.
MAX_DECODED_BYTES = 4 * 2**30
# Number of training steps after which one example in the pool is replaced.
STEPS_PER_REFRESH = 2


def read_pairs(images: Sequence[Path], labels: Sequence[Path]) -> list[Pair]:
    """Read single-channel stacks and their labels. Raises BadFile.

    Raises BadParameter if the number of files or the shapes of a stack and its labels differ.
    """
    if len(images) != len(labels):
        raise BadParameter(
            f"Each image needs labels, but there are {len(images)} images and {len(labels)} label files."
        )
    pairs = []
    for image_path, labels_path in zip(images, labels, strict=True):
        pixels, label_pixels = (
            stack_reader.read(path, Selection(), MAX_DECODED_BYTES, None).read_all()[0]
            for path in (image_path, labels_path)
        )
        if pixels.shape != label_pixels.shape:
            raise BadParameter(
                f"{image_path} and {labels_path} differ in shape: {pixels.shape} and {label_pixels.shape}."
            )
        pairs.append((pixels, label_pixels))
    return pairs


def compute_median_extents(labels: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return the median extents [3] in voxels of the objects in labels [Z, Y, X], or None if there are no objects.

    Objects that touch a face of the stack may be cut off. Such objects are included only if there are fewer than three
    other objects.
    """
    if labels.max(initial=0) > labels.size:
        # Renumber the objects, because `find_objects` allocates memory for all numbers up to the largest one. A
        # background of another type would convert 64-bit labels to floats, and merge some of them.
        labels = np.searchsorted(np.union1d(np.zeros(1, labels.dtype), labels), labels)
    boxes = [box for box in find_objects(labels) if box is not None]
    complete_boxes = [box for box in boxes if _is_complete(box, labels.shape)]
    extents = [[s.stop - s.start for s in box] for box in (complete_boxes if len(complete_boxes) > 2 else boxes)]
    return np.asarray(np.median(extents, axis=0), np.float64) if extents else None


def _is_complete(box: Sequence[slice], shape: Sequence[int]) -> bool:
    """Return whether a box does not touch any face of the stack."""
    return all(side.start > 0 and side.stop < length for side, length in zip(box, shape, strict=True))


def compute_mean_diameter(labels: NDArray[Any]) -> float:
    """Return the mean diameter in voxels of spheres with the volumes of the objects, or 1 if there are no objects."""
    volumes = np.unique(labels[labels > 0], return_counts=True)[1]
    return float(np.mean(np.cbrt(6 * volumes / np.pi))) if len(volumes) else 1.0


class Example(NamedTuple):
    """A normalized image [Z, Y, X] and its targets [T, Z, Y, X]. The first target is positive inside objects."""

    image: Floats
    targets: Floats


def draw_zoom(rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw random zoom factors [3] along z, y and x: a common factor, and a smaller variation for each axis."""
    return np.asarray(np.exp(rng.uniform(-0.2, 0.2) + rng.uniform(-0.12, 0.12, 3)))


def zoom_pair(image: NDArray[Any], labels: NDArray[Any], factors: NDArray[np.float64]) -> Pair:
    """Resample an image (linear) and labels (nearest neighbor), both [Z, Y, X], by a factor along each axis."""
    return (
        zoom(image.astype(np.float32), factors, order=1, mode="nearest", grid_mode=True),
        zoom(labels, factors, order=0, mode="nearest", grid_mode=True),
    )


@dataclass(frozen=True)
class ExampleDataset(Dataset[Example]):
    """Numbered examples. Each example has its own random generator, and is reproducible in any process and order."""

    source: StackSource
    normalize: Normalizer
    seed: int
    compute_targets: TargetFunction = compute_instance_targets

    def __getitem__(self, number: int) -> Example:
        image, labels = self.source(np.random.default_rng([self.seed, 1, number]))
        return Example(self.normalize(image), self.compute_targets(labels))


class ExamplePool:
    """A pool of examples in memory. Each call to `refresh` replaces one of the examples.

    first_number  number of the oldest example; equals the number of refreshes of a pool that began with example 0
    worker_count  number of processes that create examples; if 0, a thread creates the next example during training
    """

    def __init__(self, dataset: Dataset[Example], size: int, *, first_number: int = 0, worker_count: int = 0) -> None:
        self._source: Iterator[Example] = (
            _load_in_processes(dataset, first_number, worker_count)
            if worker_count
            else _prefetch(dataset.__getitem__, first_number)
        )
        self._oldest_number = first_number
        examples = {number % size: next(self._source) for number in range(first_number, first_number + size)}
        self._examples = [examples[index] for index in range(size)]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def refresh(self) -> None:
        """Replace the oldest example with the next one. Wait until the next example is available."""
        self._examples[self._oldest_number % len(self)] = next(self._source)
        self._oldest_number += 1

    def close(self) -> None:
        """Stop the thread or the processes that create examples."""
        # The thread or the processes stop when the iterator is garbage-collected.
        self._source = iter(())


def _prefetch(function: Callable[[int], T], start: int) -> Generator[T, None, None]:
    """Yield `function(start)`, `function(start + 1)`, ... Compute the next value in a thread in advance."""
    with ThreadPoolExecutor(1) as executor:
        next_future = executor.submit(function, start)
        for number in itertools.count(start + 1):
            current_future, next_future = next_future, executor.submit(function, number)
            yield current_future.result()


def _load_in_processes(dataset: Dataset[Example], start: int, worker_count: int) -> Iterator[Example]:
    """Return an iterator over examples in order. The worker processes live as long as the iterator.

    The loader has its own random generator. Otherwise, it would change the state of the global PyTorch generator.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=itertools.count(start),
        num_workers=worker_count,
        collate_fn=_keep_arrays,
        generator=torch.Generator(),
    )
    return iter(loader)


def _keep_arrays(example: Any) -> Any:
    """Return an example unchanged, as arrays. Tensors would need shared memory, which containers limit to 64 MiB."""
    return example


def draw_batch(pool: ExamplePool, rng: np.random.Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
    """Draw a random batch of images [size, 1, edge, edge, edge] and targets [size, T, edge, edge, edge], float32."""
    crops = [augment(_crop(pool[int(rng.integers(len(pool)))], rng, edge), rng) for _ in range(size)]
    batch = torch.from_numpy(np.stack(crops))
    return batch[:, :1].contiguous(), batch[:, 1:].contiguous()


def _crop(example: Example, rng: np.random.Generator, edge: int) -> Floats:
    """Return a random crop [1 + T, edge, edge, edge] of image and targets.

    Like a sliding window, the crop is padded with zeros outside the volume. With a probability of one half, the crop is
    placed so that it contains a randomly chosen object voxel. Otherwise, many crops of sparse volumes would be empty.
    """
    crop = np.zeros((1 + len(example.targets), edge, edge, edge), np.float32)
    shape = example.image.shape
    object_voxels = np.flatnonzero(example.targets[0]) if rng.random() < 0.5 else np.zeros(0, np.intp)
    voxel = np.unravel_index(int(rng.choice(object_voxels)), shape) if object_voxels.size else None
    crop_slices, volume_slices = place_crop(shape, edge, voxel, rng)
    crop[0][crop_slices] = example.image[volume_slices]
    crop[1:][(slice(None), *crop_slices)] = example.targets[(slice(None), *volume_slices)]
    return crop


def place_crop(
    shape: Sequence[int], edge: int, voxel: Sequence[np.intp] | NDArray[np.intp] | None, rng: np.random.Generator
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Draw the position of a crop of edge length `edge` in a volume, so that it contains `voxel` if given.

    Returns where the voxels are in the crop, and in the volume. The rest of the crop is outside the volume.
    """
    crop_slices, volume_slices = [], []
    for axis, length in enumerate(shape):
        min_start, max_start = min(0, length - edge), max(0, length - edge)
        if voxel is not None:
            min_start, max_start = max(min_start, int(voxel[axis]) - edge + 1), min(max_start, int(voxel[axis]))
        start = int(rng.integers(min_start, max_start + 1))
        volume_start, volume_stop = max(start, 0), min(start + edge, length)
        volume_slices.append(slice(volume_start, volume_stop))
        crop_slices.append(slice(volume_start - start, volume_stop - start))
    return tuple(crop_slices), tuple(volume_slices)


def prefetch_batches(
    pool: ExamplePool, plan: Training, first_step: int, *, pin_memory: bool
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield images and targets for steps `first_step`, `first_step + 1`, ..., in pinned memory if `pin_memory` is set.

    The next batch is created while the device trains on the current batch. The pool is refreshed before a step, so that
    training that is resumed at this step begins with an identical pool.
    """

    def make_batch(step: int) -> tuple[Tensor, Tensor]:
        if step > first_step and step % STEPS_PER_REFRESH == 0:
            pool.refresh()
        rng = np.random.default_rng([plan.seed, 2, step])
        images, targets = draw_batch(pool, rng, plan.batch_size, plan.edge)
        return (images.pin_memory(), targets.pin_memory()) if pin_memory else (images, targets)

    return _prefetch(make_batch, first_step)


def cut_tiles(example: Example, edge: int) -> tuple[Tensor, Tensor]:
    """Return images [B, 1, e, e, e] and targets [B, T, e, e, e] of up to eight cubes, one at each corner of a stack."""
    channels = np.concatenate([example.image[None], example.targets])
    channels = np.pad(channels, [(0, 0), *((0, max(0, edge - length)) for length in example.image.shape)])
    corners = [sorted({0, length - edge}) for length in channels.shape[1:]]
    cubes = [
        channels[:, z : z + edge, y : y + edge, x : x + edge]
        for z in corners[0]
        for y in corners[1]
        for x in corners[2]
    ]
    tiles = torch.from_numpy(np.ascontiguousarray(np.stack(cubes), dtype=np.float32))
    return tiles[:, :1].contiguous(), tiles[:, 1:].contiguous()
