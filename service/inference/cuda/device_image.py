"""An image on a device with memory of its own, which is sent there as it is stored, a layer of windows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.types import Array, StackShape, Volume
from service.engine.cuda.events import mark_end
from service.inference.preprocessing.normalize import NormalisedImage
from service.inference.windows.grid import Box, as_size

# Float32 images up to this size stay on the device as a whole: 256 x 1024 x 1024 voxels of one channel.
WHOLE_BYTES = 2**30
# Pixels are sent together up to this many bytes.
PIECE_BYTES = 2**23
# Neighbouring voxels, which often have the same intensity, are counted in different histograms, because a GPU
# serialises additions to the same address.
HISTOGRAMS = 32

StartCopy = Callable[[Tensor, Tensor], Callable[[], object]]


def start_copy(source: Tensor, target: Tensor) -> Callable[[], object]:
    """Start to copy to a device, and return a function that waits until `source` may be overwritten."""
    target.copy_(source, non_blocking=True)
    return mark_end(target.device)


class Upload:
    """Sends pixels through two buffers of `nbytes`, which hold a row at least: one is filled while the other is copied.

    Buffers for a CUDA device are pinned: of other memory the driver makes a copy first, for which it waits.
    """

    def __init__(self, device: torch.device, nbytes: int, start: StartCopy = start_copy) -> None:
        self._device, self._nbytes, self._start = device, nbytes, start
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._waits: list[Callable[[], object]] = [lambda: None, lambda: None]

    def __call__(self, pixels: Array) -> Tensor:
        """Return a copy of pixels [z, y, x] on the device, with the same dtype, for work on its current stream."""
        dtype = torch.from_numpy(np.empty(0, pixels.dtype)).dtype
        sent = torch.empty(pixels.shape, dtype=dtype, device=self._device)
        for piece in self._cut(pixels):
            self._buffers.reverse()
            self._waits.reverse()
            self._waits[0]()
            part = pixels[piece]
            staged = self._buffers[0][: part.nbytes].view(dtype).view(part.shape)
            np.copyto(staged.numpy(), part)
            self._waits[0] = self._start(staged, sent[piece])
        return sent

    def _cut(self, pixels: Array) -> Iterator[tuple[slice, slice]]:
        """Yield parts of pixels [z, y, x] that a buffer holds: several planes, or rows of one."""
        depth, height, width = pixels.shape
        rows = min(self._nbytes // (width * pixels.itemsize), height * depth)
        planes, rows = max(rows // height, 1), min(rows, height)
        for z in range(0, depth, planes):
            for y in range(0, height, rows):
                yield slice(z, z + planes), slice(y, y + rows)


class SentVolume:
    """The pixels of a volume on a device, as they are stored, with a histogram of each channel made there.

    They are copied while this is made, and counted as they arrive; the host waits for the device when it is asked for
    a histogram.

    volume  of 8-bit or 16-bit integers
    """

    def __init__(self, volume: Volume, device: torch.device) -> None:
        channels, depth, height, width = volume.shape
        bits, step = 8 * volume.dtype.itemsize, planes_sent((depth, height, width))
        least = -(1 << (bits - 1)) if volume.dtype.kind == "i" else 0
        dtype = torch.from_numpy(np.empty(0, volume.dtype)).dtype
        self._pixels = torch.empty(volume.shape, dtype=dtype, device=device)
        self._counts = torch.zeros((channels, HISTOGRAMS << bits), dtype=torch.int32, device=device)
        one = torch.ones((), dtype=torch.int32, device=device)
        # Key of each voxel's histogram for a pixel of the least value.
        first_keys = (torch.arange(step * height * width, device=device) % HISTOGRAMS << bits) - least
        upload = Upload(device, buffer_bytes((depth, height, width)))
        for z in range(0, depth, step):
            for index, planes in enumerate(volume.read(z, min(z + step, depth))):
                sent = upload(planes)
                self._pixels[index, z : z + step] = sent
                keys = sent.flatten().long() + first_keys[: sent.numel()]
                self._counts[index].scatter_add_(0, keys, one.expand(len(keys)))

    @staticmethod
    def takes(volume: Volume) -> bool:
        """Return whether pixels are integers of up to 16 bits, and few enough to be on a device as a whole."""
        counted = volume.dtype.kind in "iu" and volume.dtype.itemsize <= 2
        return counted and is_kept_whole(volume.shape[0], as_size(volume.shape[1:]))

    def count_keys(self, index: int) -> NDArray[np.int64]:
        """Return the histogram of one channel, the only one of `percentiles.count_digits` for up to 16 bits."""
        counts: NDArray[np.int64] = self._counts[index].view(HISTOGRAMS, -1).sum(0).cpu().numpy()
        return counts

    def planes(self, index: int, first: int, end: int) -> Tensor:
        """Return planes [z, Y, X] of one channel."""
        return self._pixels[index, first:end]


class DeviceImage:
    """The planes of an image that windows are cut from, float32 on a device; all of them where they are few.

    Index it with (0, channels, z, y, x), slices all but the first, like the float32 [1, C, Z, Y, X] that it stands for.
    What it returns is valid until the next index, for work on the device's current stream. One thread at a time may use
    it.

    source  image on the host; a tensor is float32 [1, C, Z, Y, X]
    depth   planes of a window
    `planes` are those that are on the device by now, float32 [C, z, Y, X].
    """

    def __init__(self, source: NormalisedImage | Tensor, depth: int, device: torch.device) -> None:
        self._source = source
        _, channels, *size = self.shape = tuple(source.shape)
        depth, self._step = count_planes(channels, as_size(size), depth), planes_sent(as_size(size))
        self._upload = Upload(device, buffer_bytes(as_size(size)))
        self.planes = torch.empty((channels, depth, *size[1:]), device=device)
        self._first = self._end = 0
        self._load(0)

    def __getitem__(self, box: Box) -> Tensor:
        _, channels, z, y, x = box
        first, end, _ = z.indices(self.shape[2])
        if not self._first <= first <= end <= self._end:
            self._load(first)
        if end > self._end:
            raise IndexError(f"{end - first} planes are asked for, and windows have {self.planes.shape[1]}")
        return self.planes[channels, first - self._first : end - self._first, y, x]

    def _load(self, first: int) -> None:
        """Fill the device's planes from plane `first` on, without sending again those that are there."""
        depth = self.planes.shape[1]
        moved, kept = first - self._first, max(self._end - first, 0) if first >= self._first else 0
        self._first = self._end = first
        # Source and target overlap where more planes are kept than left.
        for z in range(0, kept, max(moved, 1)):
            count = min(moved, kept - z)
            self.planes[:, z : z + count] = self.planes[:, z + moved : z + moved + count]
        for z in range(kept, min(depth, self.shape[2] - first), self._step):
            end = min(z + self._step, depth, self.shape[2] - first)
            self._send(first + z, first + end, self.planes[:, z:end])
        self._end = min(first + depth, self.shape[2])

    def _send(self, first: int, end: int, out: Tensor) -> None:
        if isinstance(self._source, NormalisedImage):
            self._source.send_planes(first, end, out, self._upload)
            return
        for channel, target in zip(self._source[0, :, first:end].numpy(), out, strict=True):
            target.copy_(self._upload(channel))


def is_kept_whole(channels: int, size: Size) -> bool:
    """Return whether all planes of an image of `size` (Z, Y, X) are on the device."""
    return count_planes(channels, size, 1) == size[0]


def count_planes(channels: int, size: Size, depth: int) -> int:
    """Return how many planes of an image of `size` (Z, Y, X) are on the device, where windows have `depth` planes."""
    planes, height, width = size
    return planes if 4 * channels * planes * height * width <= WHOLE_BYTES else min(depth, planes)


def buffer_bytes(size: Size) -> int:
    """Return the bytes of each of the two buffers through which an image of `size` (Z, Y, X) is sent."""
    planes, height, width = size
    return 4 * width * min(max(PIECE_BYTES // (4 * width), 1), planes * height)


def planes_sent(size: Size) -> int:
    """Return how many planes of one channel of an image of `size` (Z, Y, X) are sent together."""
    return min(max(PIECE_BYTES // (4 * size[1] * size[2]), 1), size[0])


def image_bytes(channels: int, size: Size, depth: int) -> int:
    """Return the bytes of a device for an image of `size` (Z, Y, X), with those of two channels that have just come."""
    return 4 * size[1] * size[2] * (channels * count_planes(channels, size, depth) + 2 * planes_sent(size))


def sent_bytes(shape: StackShape) -> int:
    """Return the bytes of a device for the pixels of a volume [C, Z, Y, X] as they are stored, while they are counted.

    That is a block of them besides, and histograms of 16 bits; 0 where the volume is too large to be sent as a whole.
    """
    channels, size = shape[0], as_size(shape[1:])
    if not is_kept_whole(channels, size):
        return 0
    return 2 * math.prod(shape) + 32 * size[1] * size[2] * planes_sent(size) + 4 * (HISTOGRAMS << 16) * channels
