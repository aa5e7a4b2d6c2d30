"""Intensity normalisation as the model's file asks for it.

Statistics are taken over the whole volume, a block of planes at a time. Normalised float32 pixels are computed only
where a window reads them, so the volume never exists in float32.
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

from service.core.errors import BadFile
from service.core.types import Array, Volume
from service.inference.preprocessing.percentiles import Channel, percentiles
from service.inference.windows.grid import Box
from service.inference.windows.kernels import window_kernels
from service.models.spec import (
    ModelSpec,
    Normalisation,
    PercentileNormalisation,
    RangeNormalisation,
    ZScoreNormalisation,
)

# Statistics read planes together up to this many voxels, which bounds their temporary memory.
BLOCK_VOXELS = 2**22

# Types that torch converts to float32 without rounding.
_EXACT_IN_FLOAT32 = (np.uint8, np.int8, np.uint16, np.int16, np.float16, np.float32)

# Limit of normalised values: one hot pixel among nearly equal ones would become infinite and spread through a window.
MAX_MAGNITUDE = 1e6


@dataclass(frozen=True)
class VolumeChannel:
    """One channel of a volume in blocks of planes, with NaN and infinity replaced by `substitute` unless it is None."""

    volume: Volume
    index: int
    substitute: float | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.volume.dtype

    @property
    def size(self) -> int:
        return self.volume.voxels

    def __iter__(self) -> Iterator[Array]:
        _, depth, height, width = self.volume.shape
        step = max(BLOCK_VOXELS // (height * width), 1)
        for z0 in range(0, depth, step):
            yield replace_nonfinite(self.volume.read(z0, min(z0 + step, depth))[self.index], self.substitute)


class SentPixels(Protocol):
    """All pixels of a volume on another device, as they are stored, in up to 16 bits."""

    def count_keys(self, index: int) -> NDArray[np.int64]:
        """Return the histogram of one channel, the only one of `percentiles.count_digits` for up to 16 bits."""

    def planes(self, index: int, first: int, end: int) -> Tensor:
        """Return planes [z, Y, X] of one channel."""


@dataclass(frozen=True)
class SentChannel(VolumeChannel):
    """One channel of a volume whose pixels are on another device too, which counts them."""

    sent: SentPixels = field(kw_only=True)

    def count_digits(self, _shift: int, _prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        return {0: self.sent.count_keys(self.index)}


def replace_nonfinite(pixels: Array, substitute: float | None) -> Array:
    """Return the pixels with NaN and infinity replaced, or unchanged where `substitute` is None."""
    return pixels if substitute is None else np.where(np.isfinite(pixels), pixels, pixels.dtype.type(substitute))


@dataclass(frozen=True)
class IntensityScaling:
    """Map x to (x - offset) / scale, clipped to [lowest, highest]; a scale of 0 maps everything to 0.

    NaN and infinity count as `substitute`; None states that there are none.
    """

    offset: float
    scale: float
    lowest: float = -MAX_MAGNITUDE
    highest: float = MAX_MAGNITUDE
    substitute: float | None = None

    @cached_property
    def _is_plain(self) -> bool:
        """Whether no pixel is replaced and the division is defined."""
        return self.substitute is None and self.scale != 0 and math.isfinite(self.offset) and math.isfinite(self.scale)

    def apply(self, pixels: Array) -> NDArray[np.float32]:
        """Return a new float32 array for pixels of any dtype and shape."""
        pixels = replace_nonfinite(pixels, self.substitute)
        if self.scale == 0 or not np.isfinite((self.offset, self.scale)).all():
            return np.zeros(pixels.shape, np.float32)
        dtype = np.float64 if pixels.dtype.itemsize > 4 or pixels.dtype in (np.int32, np.uint32) else np.float32
        with np.errstate(over="ignore"):
            scaled = np.subtract(pixels, self.offset, dtype=dtype)
            scaled /= self.scale
            np.clip(scaled, self.lowest, self.highest, out=scaled)
        return scaled.astype(np.float32, copy=False)

    def apply_into(self, pixels: Array, out: Tensor) -> None:
        """Write the scaled pixels into `out`, which has their shape and any floating dtype."""
        plain = self._is_plain
        if plain and window_kernels.can_scale(pixels, out):
            window_kernels.scale(pixels, out, self.offset, self.scale, (self.lowest, self.highest))
            return
        if not plain or out.dtype != torch.float32 or not _torch_reads(pixels):
            out.copy_(torch.from_numpy(self.apply(pixels)))
            return
        self.scale_into(torch.from_numpy(pixels), pixels.dtype, out)

    def send_into(self, pixels: Array, out: Tensor, send: Callable[[Array], Tensor]) -> None:
        """Write the scaled pixels into `out`, float32 on the device to which `send` copies an array.

        They are sent as they are stored, unless float32 cannot hold them, or some are replaced.
        """
        if self._is_plain and pixels.dtype in _EXACT_IN_FLOAT32:
            self.scale_into(send(pixels), pixels.dtype, out)
        else:
            out.copy_(send(self.apply(pixels)))

    def scale_into(self, stored: Tensor, dtype: np.dtype[Any], out: Tensor) -> None:
        """Write scaled pixels of `dtype`, which are on the device of `out`, into `out`, float32."""
        if self.scale == 0:
            out.zero_()
            return
        # In place and with all of torch's threads this takes a third of NumPy's time.
        out.copy_(stored).sub_(self.offset).div_(self.scale)
        if not self._stays_within_limits(dtype):
            out.clamp_(self.lowest, self.highest)

    def _stays_within_limits(self, dtype: np.dtype[Any]) -> bool:
        """Whether no pixel of this dtype can exceed the limits."""
        if dtype.kind == "f":
            return False
        ends = [(end - self.offset) / self.scale for end in (np.iinfo(dtype).min, np.iinfo(dtype).max)]
        return self.lowest <= min(ends) and max(ends) <= self.highest


def _torch_reads(pixels: Array) -> bool:
    """Whether a tensor can share the pixels' memory and convert them to float32 without rounding."""
    return pixels.dtype in _EXACT_IN_FLOAT32 and pixels.flags.writeable and min(pixels.strides) >= 0


class NormalisedImage:
    """A volume whose channels are normalised where they are read.

    Index it with (0, channels, z, y, x), slices all but the first, like the float32 [1, C, Z, Y, X] that it stands for.
    The planes of the last box are cached, because windows come in layers of planes. Several threads may use it at once.
    """

    def __init__(self, volume: Volume, scalings: Sequence[IntensityScaling], sent: SentPixels | None = None) -> None:
        self._volume, self.scalings, self._sent = volume, tuple(scalings), sent
        self.shape = (1, *volume.shape)
        # First plane, end plane, and the planes of each channel between them.
        self._cached: tuple[int, int, tuple[Array, ...]] = (0, 0, ())
        self._lock = threading.Lock()

    def __getitem__(self, box: Box) -> Tensor:
        pairs = zip(self._read(box), self.scalings[box[1]], strict=True)
        channels = [torch.from_numpy(scaling.apply(pixels)) for pixels, scaling in pairs]
        return channels[0][None] if len(channels) == 1 else torch.stack(channels)

    def read_into(self, box: Box, out: Iterable[Tensor]) -> None:
        """Write the normalised box into `out`: one tensor [z, y, x] of any floating dtype for each channel."""
        for target, pixels, scaling in zip(out, self._read(box), self.scalings[box[1]], strict=True):
            scaling.apply_into(pixels, target)

    def send_planes(self, first: int, end: int, out: Tensor, send: Callable[[Array], Tensor]) -> None:
        """Write the normalised planes from `first` to `end` into `out`, float32 [C, z, Y, X] on another device.

        `send` returns a copy of an array on that device.
        """
        if self._sent is not None:
            for index, (target, scaling) in enumerate(zip(out, self.scalings, strict=True)):
                scaling.scale_into(self._sent.planes(index, first, end), self._volume.dtype, target)
            return
        for target, pixels, scaling in zip(out, self._volume.read(first, end), self.scalings, strict=True):
            scaling.send_into(pixels, target, send)

    def _read(self, box: Box) -> list[Array]:
        _, channels, z, y, x = box
        first, end, _ = z.indices(self.shape[2])
        return [planes[:, y, x] for planes in self._read_planes(first, end)[channels]]

    def _read_planes(self, first: int, end: int) -> tuple[Array, ...]:
        cached_first, cached_end, planes = self._cached
        if (cached_first, cached_end) == (first, end):
            return planes
        with self._lock:
            if self._cached[:2] != (first, end):
                # The old planes are dropped first: of a large volume they are most of the memory in use.
                planes, self._cached = (), (0, 0, ())
                self._cached = (first, end, tuple(self._volume.read(first, end)))
            return self._cached[2]

    def tensor(self) -> Tensor:
        """Return the whole image, float32 [1, C, Z, Y, X], converted plane by plane to bound temporary memory."""
        whole = torch.empty(self.shape)
        for z in range(self.shape[2]):
            whole[0, :, z : z + 1] = self[0, slice(None), slice(z, z + 1), slice(None), slice(None)]
        return whole


def normalise_volume(
    volume: Volume, spec: ModelSpec, sent: SentPixels | None = None
) -> tuple[NormalisedImage, tuple[str, ...]]:
    """Return the volume with each channel normalised over the whole of it, and notes for the user.

    `sent` has the volume's pixels on another device, where they are counted for percentiles, and scaled. NaN and
    infinite pixels count as the lowest finite value; a constant channel becomes zeros. Raises BadFile where a channel
    has no finite pixel.
    """
    scalings, replaced = [], 0
    for index in range(volume.shape[0]):
        substitute, nonfinite = _find_substitute(VolumeChannel(volume, index))
        channel: Channel = VolumeChannel(volume, index, substitute)
        if sent is not None:
            channel = SentChannel(volume, index, sent=sent)
        scalings.append(replace(fit_scaling(channel, spec.input.normalisation), substitute=substitute))
        replaced += nonfinite
    return NormalisedImage(volume, scalings, sent), note_replaced(replaced)


def note_replaced(replaced: int) -> tuple[str, ...]:
    """Return what to tell the user of so many pixels that are not finite."""
    return (f"{replaced} NaN or infinite pixels were taken for the lowest finite intensity.",) if replaced else ()


def normalise(pixels: Array, normalisation: Normalisation) -> NDArray[np.float32]:
    """Normalise one channel [Z, Y, X] of finite numbers to float32 [Z, Y, X], within +-`MAX_MAGNITUDE`."""
    return fit_scaling(pixels, normalisation).apply(pixels)


def fit_scaling(channel: Channel, normalisation: Normalisation) -> IntensityScaling:
    """Return the scaling that normalises one channel of finite numbers."""
    match normalisation:
        case PercentileNormalisation(low=low, high=high, clip=clip):
            at_low, at_high = percentiles(channel, low, high)
            if at_low == at_high:
                # Hardly any pixel differs from the background, and those that do are all that there is to see.
                at_low, at_high = percentiles(channel, 0, 100)
            return IntensityScaling(at_low, at_high - at_low, *(clip or ()))
        case ZScoreNormalisation():
            return IntensityScaling(*_mean_and_std(channel))
        case RangeNormalisation(low=low, high=high, clip=clip):
            return IntensityScaling(low, high - low, *(clip or ()))
        case _:
            assert_never(normalisation)


def _mean_and_std(channel: Channel) -> tuple[float, float]:
    """Return mean and standard deviation like `numpy.mean` and `numpy.std` in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(sum(block.sum(dtype=np.float64) for block in channel) / channel.size)
        squares = (np.square(np.subtract(block, mean, dtype=np.float64)).sum() for block in channel)
        return mean, float(np.sqrt(sum(squares) / channel.size))


def _find_substitute(channel: Channel) -> tuple[float | None, int]:
    """Return the lowest finite value and the number of NaN and infinite pixels; None and 0 where all are finite.

    Raises BadFile where no pixel is finite.
    """
    if channel.dtype.kind != "f" or _all_finite(channel):
        return None, 0
    lowest, nonfinite = np.inf, 0
    for block in channel:
        is_finite = np.isfinite(block)
        nonfinite += block.size - int(np.count_nonzero(is_finite))
        lowest = min(lowest, float(block.min(where=is_finite, initial=np.inf)))
    return choose_substitute(lowest, nonfinite, channel.size), nonfinite


def choose_substitute(lowest: float, nonfinite: int, size: int) -> float | None:
    """Return what stands for pixels that are not finite: the `lowest` of the others, None where there are no such.

    Raises BadFile where all pixels of a channel of this size are not finite.
    """
    if nonfinite == size:
        raise BadFile("Every pixel is NaN or infinite. Export the file again, or choose another channel.")
    return lowest if nonfinite else None


def _all_finite(blocks: Iterable[Array]) -> bool:
    """Whether every block's sum is finite. One NaN or infinity makes it not so; a sum may also overflow by itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        return all(np.isfinite(block.sum(dtype=np.float64)) for block in blocks)
