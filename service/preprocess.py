"""Volume -> tensor: normalisation and resampling, as the model's file says."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.repository import (
    ModelSpec,
    Normalisation,
    PercentileNormalisation,
    RangeNormalisation,
    ZScoreNormalisation,
)
from service.volume import Volume, VoxelSize

Size = tuple[int, int, int]
Array = NDArray[Any]


class Prepared(NamedTuple):
    """What the network gets. `image`: float32 [1, C, Z, Y, X]; `notes`: what was done that a user should know."""

    image: Tensor
    notes: tuple[str, ...]


class Scaling(NamedTuple):
    """Pixels become (x - offset) / scale."""

    offset: float
    scale: float


def prepare(volume: Volume, spec: ModelSpec) -> Prepared:
    """Normalise each channel over the whole volume, and resample where model and volume both state a voxel size.

    NaN and infinite pixels count as the lowest finite value; a constant channel becomes zeros.
    """
    notes: list[str] = []
    pixels = volume.array()
    channels = []
    for channel in pixels:
        finite, replaced = _finite(channel)
        if replaced:
            notes.append(f"{replaced} NaN or infinite pixels were taken for the lowest finite intensity.")
        channels.append(normalise(finite, spec.input.normalisation))
    image = (
        torch.from_numpy(np.stack(channels))[None] if len(channels) > 1 else torch.from_numpy(channels[0])[None, None]
    )
    target = working_size(volume, spec)
    if target != volume.shape[1:]:
        image = functional.interpolate(image, size=target, mode="trilinear", align_corners=False)
        notes.append(
            f"Resampled from {_times(volume.shape[1:])} to {_times(target)} voxels for the model's voxel size."
        )
    return Prepared(image, tuple(notes))


def working_size(volume: Volume, spec: ModelSpec) -> Size:
    """(Z, Y, X) of the grid that the network works on: the volume's own, unless both voxel sizes are known."""
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return volume.shape[1:]
    return resampled_size(volume.shape[1:], volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def resampled_size(size: Size, have: VoxelSize, want: VoxelSize) -> Size:
    """The same extent in other voxels, at least one along each axis; up to 1 % of difference is left alone."""
    z, y, x = (
        length if abs(h / w - 1) < 0.01 else max(1, round(length * h / w))
        for length, h, w in zip(size, have, want, strict=True)
    )
    return z, y, x


def normalise(pixels: Array, normalisation: Normalisation) -> NDArray[np.float32]:
    """One channel [Z, Y, X] of finite numbers -> float32 [Z, Y, X]."""
    match normalisation:
        case PercentileNormalisation(low=low, high=high, clip=clip):
            at_low, at_high = percentiles(pixels, low, high)
            scaled = _scale(pixels, Scaling(at_low, at_high - at_low))
            return scaled if clip is None else np.clip(scaled, *clip, out=scaled)
        case ZScoreNormalisation():
            return _scale(pixels, Scaling(float(pixels.mean(dtype=np.float64)), float(pixels.std(dtype=np.float64))))
        case RangeNormalisation(low=low, high=high):
            return _scale(pixels, Scaling(low, high - low))
        case _:
            assert_never(normalisation)


def percentiles(pixels: Array, low: float, high: float) -> tuple[float, float]:
    """Two percentiles over all pixels, linearly interpolated like `numpy.percentile`.

    Up to 16 bits a histogram gives them exactly in one pass; other dtypes are partially sorted.
    """
    if pixels.dtype.kind not in "biu" or pixels.dtype.itemsize > 2:
        a, b = np.percentile(pixels, (low, high))
        return float(a), float(b)
    lowest = int(np.iinfo(pixels.dtype).min) if pixels.dtype.kind == "i" else 0
    unsigned = pixels if pixels.dtype.kind == "u" else (pixels.astype(np.int32) - lowest)
    cumulated = np.cumsum(_histogram(unsigned))
    a, b = (_rank(cumulated, share / 100 * (pixels.size - 1)) + lowest for share in (low, high))
    return a, b


def _histogram(pixels: Array) -> NDArray[np.int64]:
    """Counts by value. Plane by plane, since bincount widens its input to 64 bits."""
    total = np.zeros(2**16, np.int64)
    for plane in pixels:
        counts = np.bincount(plane.ravel(), minlength=1)
        total[: len(counts)] += counts
    return total


def _rank(cumulated: NDArray[np.int64], rank: float) -> float:
    """The value at a fractional rank of the sorted pixels, from their cumulated histogram."""
    below, above = np.searchsorted(cumulated, (np.floor(rank), np.ceil(rank)), side="right")
    return float(below + (above - below) * (rank - np.floor(rank)))


def _finite(channel: Array) -> tuple[Array, int]:
    """The channel without NaN and infinity, and how many there were."""
    if channel.dtype.kind != "f" or np.isfinite(channel.sum(dtype=np.float64)):
        return channel, 0
    bad = ~np.isfinite(channel)
    replaced = channel.copy()
    replaced[bad] = channel[~bad].min() if not bad.all() else 0
    return replaced, int(bad.sum())


def _scale(pixels: Array, scaling: Scaling) -> NDArray[np.float32]:
    """Plane by plane, so that no copy in a wider dtype of the whole volume is made."""
    scaled = np.empty(pixels.shape, np.float32)
    if scaling.scale == 0:
        scaled.fill(0)
        return scaled
    dtype = np.float64 if pixels.dtype.itemsize > 4 or pixels.dtype in (np.int32, np.uint32) else np.float32
    for plane, out in zip(pixels, scaled, strict=True):
        difference = np.subtract(plane, scaling.offset, dtype=dtype)
        np.divide(difference, scaling.scale, out=out, casting="same_kind")
    return scaled


def _times(size: Size) -> str:
    return " x ".join(map(str, size))
