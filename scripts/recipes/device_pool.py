"""A pool of training volumes in the memory of a GPU, which also crops and augments them.

The CPU only creates volumes. It could not crop and augment as many as a GPU needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from service.training.examples import Example, ExampleDataset, place_crop

# Number of object voxels per volume around which crops are placed.
MAX_ANCHORS = 512
# Number of volumes with which training begins, while the pool grows.
INITIAL_VOLUMES = 256
# Kernel size of the blur, in voxels.
BLUR_WIDTH = 5


Augmentation = Callable[[Tensor, np.random.Generator], Tensor]


class PackedVolume(NamedTuple):
    """An image and its targets, float16 [1 + T, Z, Y, X], and positions of object voxels [N, 3]."""

    channels: NDArray[np.float16]
    anchors: NDArray[np.intp]


@dataclass(frozen=True)
class PackedDataset(Dataset[PackedVolume]):
    """Numbered volumes in half precision, which are small enough to be sent between processes."""

    examples: ExampleDataset

    def __getitem__(self, number: int) -> PackedVolume:
        example: Example = self.examples[number]
        voxels = np.flatnonzero(example.targets[0])
        rng = np.random.default_rng(number)
        chosen = rng.choice(voxels, MAX_ANCHORS) if voxels.size else voxels
        anchors = np.stack(np.unravel_index(chosen, example.image.shape), 1)
        channels = np.concatenate([example.image[None], example.targets]).astype(np.float16)
        return PackedVolume(channels, anchors)


class DevicePool:
    """A pool of up to `size` volumes on a device. `refresh` adds a volume, or replaces the oldest one.

    first_number  number of the oldest volume
    worker_count  number of processes that create volumes
    augment       function that varies images [B, 1, z, y, x]
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: ExampleDataset,
        size: int,
        device: torch.device,
        *,
        first_number: int,
        worker_count: int,
        augment: Augmentation | None = None,
    ) -> None:
        self._device, self._size, self._oldest = device, size, 0
        self._augment = augment or augment_images
        loader = DataLoader(
            PackedDataset(dataset),
            batch_size=None,
            sampler=itertools.count(first_number),
            num_workers=worker_count,
            prefetch_factor=4 if worker_count else None,
            collate_fn=_keep_arrays,
            generator=torch.Generator(),
        )
        self._source: Iterator[PackedVolume] = iter(loader)
        self._volumes = [self._load() for _ in range(min(INITIAL_VOLUMES, size))]

    def refresh(self) -> None:
        """Add the next volume. Wait until it is available."""
        if len(self._volumes) < self._size:
            self._volumes.append(self._load())
            return
        self._volumes[self._oldest] = self._load()
        self._oldest = (self._oldest + 1) % self._size

    def close(self) -> None:
        """Stop the processes."""
        self._source = iter(())

    def draw(self, rng: np.random.Generator, size: int, edge: int) -> tuple[Tensor, Tensor]:
        """Draw images [size, 1, edge, edge, edge] and targets [size, T, edge, edge, edge], float32."""
        count = self._volumes[0][0].shape[0]
        batch = torch.zeros((size, count, edge, edge, edge), dtype=torch.float16, device=self._device)
        for crop in batch:
            self._crop(crop, rng, edge)
        images = self._augment(batch[:, :1].float(), rng)
        return images, batch[:, 1:].float()

    def _load(self) -> tuple[Tensor, NDArray[np.intp]]:
        channels, anchors = next(self._source)
        return torch.from_numpy(channels).to(self._device), anchors

    def _crop(self, crop: Tensor, rng: np.random.Generator, edge: int) -> None:
        """Copy a random part of a random volume to a random position in `crop`, flipped and transposed at random."""
        volume, anchors = self._volumes[int(rng.integers(len(self._volumes)))]
        anchor = anchors[int(rng.integers(len(anchors)))] if len(anchors) and rng.random() < 0.5 else None
        crop_slices, volume_slices = place_crop(volume.shape[1:], edge, anchor, rng)
        target = crop.transpose(2, 3) if rng.random() < 0.5 else crop
        target[(slice(None), *crop_slices)] = volume[(slice(None), *volume_slices)]
        if flips := [axis for axis in (1, 2, 3) if rng.random() < 0.5]:
            crop.copy_(crop.flip(flips))


def augment_images(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Vary gamma, sharpness, noise and contrast of images [B, 1, z, y, x], like `service.training.examples`."""
    count = len(images)

    def per_image(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(images.device)[:, None, None, None, None]

    gamma = np.where(rng.random(count) < 0.5, np.exp(rng.uniform(-0.4, 0.4, count)), 1.0)
    images = images.sign() * images.abs().pow(per_image(gamma))
    is_blurred = rng.random(count) < 0.15
    sigmas = np.stack([rng.uniform(0, 1.2, count), *[rng.uniform(0, 0.9, count)] * 2]) * is_blurred
    images = blur_images(images, sigmas)
    noise = np.where(rng.random(count) < 0.3, rng.uniform(0.01, 0.12, count), 0.0)
    images = images + per_image(noise) * torch.randn_like(images)
    contrast, offset = np.exp(rng.uniform(-0.35, 0.35, count)), rng.uniform(-0.06, 0.06, count)
    return images * per_image(contrast) + per_image(offset)


def blur_images(images: Tensor, sigmas: NDArray[np.float64]) -> Tensor:
    """Blur images [B, 1, z, y, x] with a Gaussian for each image; `sigmas` [3, B] in voxels."""
    count, radius = len(images), BLUR_WIDTH // 2
    offsets = np.arange(-radius, radius + 1)
    kernels = np.exp(-0.5 * (offsets / np.maximum(sigmas, 0.1)[..., None]) ** 2)
    kernels /= kernels.sum(-1, keepdims=True)
    weights = torch.from_numpy(kernels.astype(np.float32)).to(images.device)
    blurred = images.transpose(0, 1)
    for axis in range(3):
        shape, padding = [1, 1, 1], [0, 0, 0]
        shape[axis], padding[axis] = BLUR_WIDTH, radius
        blurred = functional.conv3d(blurred, weights[axis].view(count, 1, *shape), padding=padding, groups=count)
    return blurred.transpose(0, 1)


def _keep_arrays(volume: Any) -> Any:
    """Return a volume unchanged, as arrays. Tensors would need shared memory, which containers limit to 64 MiB."""
    return volume
