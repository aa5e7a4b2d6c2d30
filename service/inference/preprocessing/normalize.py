"""Intensity normalization as defined in `model.yaml`.

Statistics are computed over the whole volume, a block of planes at a time. Pixels are normalized to float32 when they
are read for a window, so the whole volume is never held in float32.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.types import Array, Volume
from service.inference.preprocessing.percentiles import (
    Channel,
    compute_percentiles,
    describe_replaced_pixels,
    find_substitute,
    replace_missing,
)
from service.inference.windows.grid import Box
from service.inference.windows.kernels import window_kernels
from service.models.spec import ModelSpec
from service.models.spec_parts import Normalization, PercentileNormalization, RangeNormalization, ZScoreNormalization

# Number of voxels that are read together for statistics, which limits temporary memory.
BLOCK_VOXELS = 2**22

# Dtypes that PyTorch converts to float32 without rounding.
_DTYPES_EXACT_IN_FLOAT32 = (np.uint8, np.int8, np.uint16, np.int16, np.float16, np.float32)

# Maximum magnitude of normalized values. If almost all pixels are equal, a single hot pixel would otherwise become
# infinite and affect the whole window.
MAX_MAGNITUDE = 1e6
# Maximum difference between adjacent numbers in float64 near the intensities, as a fraction of their scale. Integers of
# 64 bits with a large offset exceed it.
MAX_STEP = 2.0**-10


@dataclass(frozen=True)
class VolumeChannel:
    """One channel of a volume, read in blocks of planes. Missing pixels become `substitute` unless it is None."""

    volume: Volume
    index: int
    substitute: float | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.volume.dtype

    @property
    def size(self) -> int:
        return self.volume.voxel_count

    def __iter__(self) -> Iterator[Array]:
        _, depth, height, width = self.volume.shape
        step = max(BLOCK_VOXELS // (height * width), 1)
        for z0 in range(0, depth, step):
            yield replace_missing(self.volume.read(z0, min(z0 + step, depth))[self.index], self.substitute)


class DevicePixels(Protocol):
    """All pixels of a volume in their stored dtype of up to 16 bits, on a device other than the host."""

    def compute_histogram(self, index: int) -> NDArray[np.int64]:
        """Return the histogram of one channel, like `percentiles.count_digits` for up to 16 bits."""

    def get_planes(self, index: int, first: int, end: int) -> Tensor:
        """Return the planes from `first` to `end` of one channel, [z, Y, X]."""


@dataclass(frozen=True)
class DeviceChannel(VolumeChannel):
    """One channel of a volume whose pixels are also stored on another device, which computes their histogram."""

    device_pixels: DevicePixels = field(kw_only=True)

    def count_digits(self, _shift: int, _prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        return {0: self.device_pixels.compute_histogram(self.index)}


@dataclass(frozen=True)
class IntensityScaling:
    """Mapping of x to (x - offset) / scale, clipped to [minimum, maximum]. A scale of 0 maps all pixels to 0.

    Missing pixels are replaced with `substitute`; None means that all pixels are intensities.
    """

    offset: float
    scale: float
    minimum: float = -MAX_MAGNITUDE
    maximum: float = MAX_MAGNITUDE
    substitute: float | None = None

    @cached_property
    def _is_plain_scaling(self) -> bool:
        """Whether no pixels are replaced and the division is defined."""
        return self.substitute is None and self.scale != 0 and math.isfinite(self.offset) and math.isfinite(self.scale)

    def apply(self, pixels: Array) -> NDArray[np.float32]:
        """Return the scaled pixels in a new float32 array. `pixels` may have any dtype and shape."""
        pixels = replace_missing(pixels, self.substitute)
        if self.scale == 0 or not np.isfinite((self.offset, self.scale)).all():
            return np.zeros(pixels.shape, np.float32)
        dtype = np.float64 if pixels.dtype.itemsize > 4 or pixels.dtype in (np.int32, np.uint32) else np.float32
        with np.errstate(over="ignore"):
            scaled = np.subtract(pixels, self.offset, dtype=dtype)
            scaled /= self.scale
            np.clip(scaled, self.minimum, self.maximum, out=scaled)
        return scaled.astype(np.float32, copy=False)

    def apply_into(self, pixels: Array, out: Tensor) -> None:
        """Write the scaled pixels into `out`, which has their shape and any floating-point dtype."""
        is_plain_scaling = self._is_plain_scaling
        if is_plain_scaling and window_kernels.can_scale(pixels, out):
            window_kernels.scale(pixels, out, self.offset, self.scale, (self.minimum, self.maximum))
            return
        if not is_plain_scaling or out.dtype != torch.float32 or not _can_share_memory(pixels):
            out.copy_(torch.from_numpy(self.apply(pixels)))
            return
        self.scale_into(torch.from_numpy(pixels), pixels.dtype, out)

    def upload_into(self, pixels: Array, out: Tensor, upload: Callable[[Array], Tensor]) -> None:
        """Write the scaled pixels into `out`, a float32 tensor on another device.

        `upload` copies an array to that device. Pixels are uploaded in their stored dtype, unless float32 cannot
        represent them exactly or some pixels are replaced.
        """
        if self._is_plain_scaling and pixels.dtype in _DTYPES_EXACT_IN_FLOAT32:
            self.scale_into(upload(pixels), pixels.dtype, out)
        else:
            out.copy_(upload(self.apply(pixels)))

    def scale_into(self, stored_pixels: Tensor, dtype: np.dtype[Any], out: Tensor) -> None:
        """Write scaled pixels into `out`, float32. `stored_pixels` has this `dtype` and is on the same device."""
        if self.scale == 0:
            out.zero_()
            return
        # In place and with all PyTorch threads, this takes a third of the time that NumPy needs.
        out.copy_(stored_pixels).sub_(self.offset).div_(self.scale)
        if not self._stays_within_limits(dtype):
            out.clamp_(self.minimum, self.maximum)

    def _stays_within_limits(self, dtype: np.dtype[Any]) -> bool:
        """Return whether no pixel of this dtype can exceed the limits."""
        if dtype.kind == "f":
            return False
        limits = [(limit - self.offset) / self.scale for limit in (np.iinfo(dtype).min, np.iinfo(dtype).max)]
        return self.minimum <= min(limits) and max(limits) <= self.maximum


def _can_share_memory(pixels: Array) -> bool:
    """Return whether a tensor can share the pixels' memory and convert them to float32 without rounding."""
    return pixels.dtype in _DTYPES_EXACT_IN_FLOAT32 and pixels.flags.writeable and min(pixels.strides) >= 0


class NormalizedImage:
    """A volume whose channels are normalized when they are read.

    Index it like a float32 tensor [1, C, Z, Y, X] with (0, channels, z, y, x). All indices except the first are slices.
    The planes of the last box are cached, because windows are read in layers of planes. The image is thread-safe.
    """

    def __init__(
        self, volume: Volume, scalings: Sequence[IntensityScaling], device_pixels: DevicePixels | None = None
    ) -> None:
        self._volume, self.scalings, self._device_pixels = volume, tuple(scalings), device_pixels
        self.shape = (1, *volume.shape)
        # First plane, end plane (exclusive), and these planes of each channel.
        self._cached_planes: tuple[int, int, tuple[Array, ...]] = (0, 0, ())
        self._lock = threading.Lock()

    def __getitem__(self, box: Box) -> Tensor:
        pairs = zip(self._read(box), self.scalings[box[1]], strict=True)
        channels = [torch.from_numpy(scaling.apply(pixels)) for pixels, scaling in pairs]
        return channels[0][None] if len(channels) == 1 else torch.stack(channels)

    def read_into(self, box: Box, out: Iterable[Tensor]) -> None:
        """Write the normalized box into `out`, one tensor [z, y, x] of any floating-point dtype per channel."""
        for target, pixels, scaling in zip(out, self._read(box), self.scalings[box[1]], strict=True):
            scaling.apply_into(pixels, target)

    def upload_planes(self, first: int, end: int, out: Tensor, upload: Callable[[Array], Tensor]) -> None:
        """Write the normalized planes from `first` to `end` into `out`, float32 [C, z, Y, X] on another device.

        `upload` returns a copy of an array on that device.
        """
        if self._device_pixels is not None:
            for index, (target, scaling) in enumerate(zip(out, self.scalings, strict=True)):
                scaling.scale_into(self._device_pixels.get_planes(index, first, end), self._volume.dtype, target)
            return
        for target, pixels, scaling in zip(out, self._volume.read(first, end), self.scalings, strict=True):
            scaling.upload_into(pixels, target, upload)

    def _read(self, box: Box) -> list[Array]:
        _, channels, z, y, x = box
        first, end, _ = z.indices(self.shape[2])
        return [planes[:, y, x] for planes in self._read_planes(first, end)[channels]]

    def _read_planes(self, first: int, end: int) -> tuple[Array, ...]:
        cached_first, cached_end, planes = self._cached_planes
        if (cached_first, cached_end) == (first, end):
            return planes
        with self._lock:
            if self._cached_planes[:2] != (first, end):
                # Free the old planes first: for a large volume, they occupy most of the memory in use.
                planes, self._cached_planes = (), (0, 0, ())
                self._cached_planes = (first, end, tuple(self._volume.read(first, end)))
            return self._cached_planes[2]

    def find_limits(self) -> list[tuple[float, float]]:
        """Return the lowest and the highest normalized value of each channel."""
        limits = list[tuple[float, float]]()
        for index, scaling in enumerate(self.scalings):
            blocks = VolumeChannel(self._volume, index, scaling.substitute)
            extremes = [pixels for block in blocks for pixels in (block.min(), block.max())]
            values = scaling.apply(np.array(extremes, self._volume.dtype))
            limits.append((float(values.min()), float(values.max())))
        return limits

    def to_tensor(self) -> Tensor:
        """Return the whole image as float32 [1, C, Z, Y, X]. Planes are converted one at a time to save memory."""
        pixels = torch.empty(self.shape)
        for z in range(self.shape[2]):
            pixels[0, :, z : z + 1] = self[0, slice(None), slice(z, z + 1), slice(None), slice(None)]
        return pixels


def normalize_volume(
    volume: Volume, spec: ModelSpec, device_pixels: DevicePixels | None = None
) -> tuple[NormalizedImage, tuple[str, ...]]:
    """Return the volume with each channel normalized over the whole volume, and notes for the user.

    If `device_pixels` is specified, histograms are computed and pixels are scaled on its device. NaN, infinite pixels
    and values for missing data are replaced with the lowest intensity. A constant channel becomes zeros. Raises BadFile
    if a channel has no intensities.
    """
    scalings, num_replaced, notes = [], 0, list[str]()
    for index in range(volume.shape[0]):
        substitute, num_missing = find_substitute(VolumeChannel(volume, index))
        channel: Channel = VolumeChannel(volume, index, substitute)
        if device_pixels is not None:
            channel = DeviceChannel(volume, index, device_pixels=device_pixels)
        scalings.append(replace(fit_scaling(channel, spec.input.get_normalization(index)), substitute=substitute))
        if volume.dtype.itemsize > 2:
            blocks = VolumeChannel(volume, index, substitute)
            notes += describe_limited_pixels(
                (float(find()) for block in blocks for find in (block.min, block.max)), scalings[-1]
            )
        num_replaced += num_missing
    return NormalizedImage(volume, scalings, device_pixels), (*describe_replaced_pixels(num_replaced), *notes)


def describe_limited_pixels(extremes: Iterable[float], scaling: IntensityScaling) -> Iterator[str]:
    """Yield notes if normalized pixels exceed `MAX_MAGNITUDE`, or if float64 does not distinguish their intensities.

    `extremes` contains the extremes of all pixels.
    """
    if scaling.scale == 0:
        return
    farthest = max(extremes, key=lambda value: abs(value - scaling.offset))
    if (step := float(np.spacing(abs(scaling.offset)))) > max(1, MAX_STEP * abs(scaling.scale)):
        yield (
            f"The image has pixels with values such as {farthest:.17g}, of which differences below {step:.3g} are lost."
            " Labels may be wrong. Subtract the lowest intensity from the image, and segment it again."
        )
    if scaling.maximum == MAX_MAGNITUDE and abs(farthest - scaling.offset) > MAX_MAGNITUDE * abs(scaling.scale):
        yield (
            f"The image has pixels with the value {farthest:.3g}, far from the other intensities. Labels near these"
            " pixels may be wrong, and there may be false objects. Set these pixels to the intensity of the background,"
            " or crop the image, and segment it again."
        )


def fit_scaling(channel: Channel, normalisation: Normalization) -> IntensityScaling:
    """Return the scaling that normalizes one channel of finite numbers."""
    match normalisation:
        case PercentileNormalization(low=low, high=high, eps=eps, clip=clip):
            low_value, high_value = compute_percentiles(channel, low, high)
            if low_value == high_value:
                # Almost all pixels are background, so scale by the range of the few pixels that differ.
                low_value, high_value = compute_percentiles(channel, 0, 100)
            return IntensityScaling(low_value, high_value - low_value + eps, *(clip or ()))
        case ZScoreNormalization(eps=eps):
            mean, std = _compute_mean_and_std(channel)
            return IntensityScaling(mean, std + eps)
        case RangeNormalization(low=low, high=high, clip=clip):
            return IntensityScaling(low, high - low, *(clip or ()))
        case _:
            assert_never(normalisation)


def _compute_mean_and_std(channel: Channel) -> tuple[float, float]:
    """Return the mean and standard deviation like `numpy.mean` and `numpy.std` in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(sum(block.sum(dtype=np.float64) for block in channel) / channel.size)
        squares = (np.square(np.subtract(block, mean, dtype=np.float64)).sum() for block in channel)
        return mean, float(np.sqrt(sum(squares) / channel.size))
