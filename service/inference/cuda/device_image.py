"""Image in a device's own memory. Pixels are uploaded in their stored dtype, one layer of windows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.types import Array, StackShape, Volume
from service.engine.cuda.events import record_end
from service.inference.preprocessing.normalize import NormalizedImage
from service.inference.windows.grid import Box, as_size

# Maximum size of a float32 image that is held on the device in full: 256 x 1024 x 1024 voxels of one channel.
MAX_WHOLE_IMAGE_BYTES = 2**30
# Maximum number of bytes that are copied in one transfer.
MAX_TRANSFER_BYTES = 2**23
# Number of histograms per channel. Neighboring voxels often have the same intensity, and a GPU serializes additions to
# the same address, so neighboring voxels are counted in different histograms.
NUM_HISTOGRAMS = 32

StartCopy = Callable[[Tensor, Tensor], Callable[[], object]]


def start_copy(source: Tensor, target: Tensor) -> Callable[[], object]:
    """Start a copy to a device, and return a function that waits until `source` may be overwritten."""
    target.copy_(source, non_blocking=True)
    return record_end(target.device)


class Uploader:
    """Uploads pixels through two buffers of `nbytes` bytes each: while one buffer is copied, the other is filled.

    `nbytes` must be at least the size of one row. Buffers for a CUDA device are pinned, because the driver would first
    copy unpinned memory synchronously.
    """

    def __init__(self, device: torch.device, nbytes: int, start: StartCopy = start_copy) -> None:
        self._device, self._nbytes, self._start = device, nbytes, start
        is_pinned = device.type == "cuda"
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        self._wait_functions: list[Callable[[], object]] = [lambda: None, lambda: None]

    def __call__(self, pixels: Array) -> Tensor:
        """Return a copy of pixels [z, y, x] on the device, with the same dtype, for use on its current stream."""
        dtype = torch.from_numpy(np.empty(0, pixels.dtype)).dtype
        device_pixels = torch.empty(pixels.shape, dtype=dtype, device=self._device)
        for part_slices in self._divide_into_transfers(pixels):
            self._buffers.reverse()
            self._wait_functions.reverse()
            self._wait_functions[0]()
            part = pixels[part_slices]
            staging_buffer = self._buffers[0][: part.nbytes].view(dtype).view(part.shape)
            np.copyto(staging_buffer.numpy(), part)
            self._wait_functions[0] = self._start(staging_buffer, device_pixels[part_slices])
        return device_pixels

    def _divide_into_transfers(self, pixels: Array) -> Iterator[tuple[slice, slice]]:
        """Yield the parts of pixels [z, y, x] that fit in a buffer: several planes, or rows of one plane."""
        depth, height, width = pixels.shape
        num_rows = min(self._nbytes // (width * pixels.itemsize), height * depth)
        num_planes, num_rows = max(num_rows // height, 1), min(num_rows, height)
        for z in range(0, depth, num_planes):
            for y in range(0, height, num_rows):
                yield slice(z, z + num_planes), slice(y, y + num_rows)


class UploadedVolume:
    """Pixels of a volume on a device, in their stored dtype, and a histogram of each channel.

    The constructor copies the pixels, and the device counts intensities as the pixels arrive. Only reading a histogram
    waits for the device.

    volume  volume of 8-bit or 16-bit integers
    """

    def __init__(self, volume: Volume, device: torch.device) -> None:
        channels, depth, height, width = volume.shape
        bits, step = 8 * volume.dtype.itemsize, count_planes_per_transfer((depth, height, width))
        min_value = -(1 << (bits - 1)) if volume.dtype.kind == "i" else 0
        dtype = torch.from_numpy(np.empty(0, volume.dtype)).dtype
        self._pixels = torch.empty(volume.shape, dtype=dtype, device=device)
        self._counts = torch.zeros((channels, NUM_HISTOGRAMS << bits), dtype=torch.int32, device=device)
        ones = torch.ones((), dtype=torch.int32, device=device)
        # Offset of each voxel's histogram, to which the pixel value is added to get the index of the bin.
        bin_offsets = (torch.arange(step * height * width, device=device) % NUM_HISTOGRAMS << bits) - min_value
        upload = Uploader(device, count_buffer_bytes((depth, height, width)))
        for z in range(0, depth, step):
            for index, planes in enumerate(volume.read(z, min(z + step, depth))):
                device_planes = upload(planes)
                self._pixels[index, z : z + step] = device_planes
                bins = device_planes.flatten().long() + bin_offsets[: device_planes.numel()]
                self._counts[index].scatter_add_(0, bins, ones.expand(len(bins)))

    @staticmethod
    def supports(volume: Volume) -> bool:
        """Return whether the pixels are integers of up to 16 bits and the volume is small enough to upload in full."""
        has_supported_type = volume.dtype.kind in "iu" and volume.dtype.itemsize <= 2
        return has_supported_type and fits_on_device(volume.shape[0], as_size(volume.shape[1:]))

    def compute_histogram(self, index: int) -> NDArray[np.int64]:
        """Return the histogram of one channel, in the same form as `percentiles.count_digits` for up to 16 bits."""
        counts: NDArray[np.int64] = self._counts[index].view(NUM_HISTOGRAMS, -1).sum(0).cpu().numpy()
        return counts

    def get_planes(self, index: int, first: int, end: int) -> Tensor:
        """Return the planes from `first` up to, but not including, `end` of one channel, [z, Y, X]."""
        return self._pixels[index, first:end]


class DeviceImage:
    """Image of which one layer of windows is held on a device in float32, or all planes if the image is small.

    Index it like a float32 tensor [1, C, Z, Y, X] with (0, channels, z, y, x), where channels, z, y and x are slices.
    The result is valid until the next access, for use on the device's current stream. Not thread-safe.

    source  image on the host; a tensor must be float32 [1, C, Z, Y, X]
    depth   number of planes of a window
    planes  planes that are currently on the device, float32 [C, z, Y, X]
    """

    def __init__(self, source: NormalizedImage | Tensor, depth: int, device: torch.device) -> None:
        self._source = source
        _, channels, *size = self.shape = tuple(source.shape)
        depth, self._step = count_planes(channels, as_size(size), depth), count_planes_per_transfer(as_size(size))
        self._upload = Uploader(device, count_buffer_bytes(as_size(size)))
        self.planes = torch.empty((channels, depth, *size[1:]), device=device)
        self._first = self._end = 0
        self._load(0)

    def __getitem__(self, box: Box) -> Tensor:
        _, channels, z, y, x = box
        first, end, _ = z.indices(self.shape[2])
        if not self._first <= first <= end <= self._end:
            self._load(first)
        if end > self._end:
            raise IndexError(
                f"cannot read {end - first} planes at a time, because windows have only {self.planes.shape[1]} planes"
            )
        return self.planes[channels, first - self._first : end - self._first, y, x]

    def _load(self, first: int) -> None:
        """Load planes, starting at `first`. Planes that are already on the device are not copied again."""
        depth = self.planes.shape[1]
        num_shifted, num_reused = first - self._first, max(self._end - first, 0) if first >= self._first else 0
        self._first = self._end = first
        # If more planes are reused than dropped, source and target overlap, so the planes are moved in several steps.
        for z in range(0, num_reused, max(num_shifted, 1)):
            num_moved = min(num_shifted, num_reused - z)
            self.planes[:, z : z + num_moved] = self.planes[:, z + num_shifted : z + num_shifted + num_moved]
        for z in range(num_reused, min(depth, self.shape[2] - first), self._step):
            end = min(z + self._step, depth, self.shape[2] - first)
            self._upload_planes(first + z, first + end, self.planes[:, z:end])
        self._end = min(first + depth, self.shape[2])

    def _upload_planes(self, first: int, end: int, out: Tensor) -> None:
        if isinstance(self._source, NormalizedImage):
            self._source.upload_planes(first, end, out, self._upload)
            return
        for channel, target in zip(self._source[0, :, first:end].numpy(), out, strict=True):
            target.copy_(self._upload(channel))


def fits_on_device(channels: int, size: Size) -> bool:
    """Return whether all planes of an image of `size` (Z, Y, X) are held on the device."""
    return count_planes(channels, size, 1) == size[0]


def count_planes(channels: int, size: Size, depth: int) -> int:
    """Return the number of planes held on the device for an image of `size` (Z, Y, X) and windows of `depth` planes."""
    num_planes, height, width = size
    return num_planes if 4 * channels * num_planes * height * width <= MAX_WHOLE_IMAGE_BYTES else min(depth, num_planes)


def count_buffer_bytes(size: Size) -> int:
    """Return the size in bytes of each of the two buffers through which an image of `size` (Z, Y, X) is copied."""
    num_planes, height, width = size
    return 4 * width * min(max(MAX_TRANSFER_BYTES // (4 * width), 1), num_planes * height)


def count_planes_per_transfer(size: Size) -> int:
    """Return the number of planes of one channel that are copied together, for an image of `size` (Z, Y, X)."""
    return min(max(MAX_TRANSFER_BYTES // (4 * size[1] * size[2]), 1), size[0])


def count_image_bytes(channels: int, size: Size, depth: int) -> int:
    """Return the device memory in bytes for an image of `size` (Z, Y, X) and two blocks of unconverted pixels."""
    return (
        4 * size[1] * size[2] * (channels * count_planes(channels, size, depth) + 2 * count_planes_per_transfer(size))
    )


def count_uploaded_bytes(shape: StackShape) -> int:
    """Return the device memory in bytes for the stored pixels of a volume [C, Z, Y, X] while intensities are counted.

    This includes one block of pixels and the 16-bit histograms. Returns 0 if the volume is too large to upload in
    full.
    """
    channels, size = shape[0], as_size(shape[1:])
    if not fits_on_device(channels, size):
        return 0
    return (
        2 * math.prod(shape)
        + 32 * size[1] * size[2] * count_planes_per_transfer(size)
        + 4 * (NUM_HISTOGRAMS << 16) * channels
    )
