"""Volume -> image, normalised and resampled as the model's file says; and the way back to the volume's grid.

Normalising takes statistics of the whole volume, but its float32 pixels are made only where a window reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.errors import BadFile, BadParameter
from service.repository import (
    ModelSpec,
    Normalisation,
    PercentileNormalisation,
    RangeNormalisation,
    ZScoreNormalisation,
)
from service.volume import Diameter, Extent, Segmentation, Volume, VoxelSize, label_dtype

Size = tuple[int, int, int]
Array = NDArray[Any]

# A stack whose voxels are more than so many times larger or smaller than the model's was given a wrong voxel size.
MOST_RESAMPLING = 64.0

# Objects smaller than this part of what the model wants are not to be seen in the stack.
MOST_ENLARGING = 16.0

# One hot pixel among nearly equal ones would otherwise become infinite, and spread through the whole window.
FARTHEST = 1e6


@dataclass(frozen=True)
class Scaling:
    """x -> (x - offset) / scale, then at least `lowest` and at most `highest`; scale 0: everything becomes 0."""

    offset: float
    scale: float
    lowest: float = -FARTHEST
    highest: float = FARTHEST

    def apply(self, pixels: Array) -> NDArray[np.float32]:
        """Pixels of any dtype and shape -> a new float32 array."""
        if self.scale == 0 or not np.isfinite((self.offset, self.scale)).all():
            return np.zeros(pixels.shape, np.float32)
        dtype = np.float64 if pixels.dtype.itemsize > 4 or pixels.dtype in (np.int32, np.uint32) else np.float32
        with np.errstate(over="ignore"):
            scaled = np.subtract(pixels, self.offset, dtype=dtype)
            scaled /= self.scale
            np.clip(scaled, self.lowest, self.highest, out=scaled)
        return scaled.astype(np.float32, copy=False)


class Image:
    """Channels of a volume that are normalised where they are read.

    Indexed with (0, channels, z, y, x), slices all but the first, like the float32 [1, C, Z, Y, X] that it stands for.
    """

    def __init__(self, channels: Sequence[Array], scalings: Sequence[Scaling]) -> None:
        self._channels, self._scalings = channels, scalings
        self.shape = (1, len(channels), *channels[0].shape)

    def __getitem__(self, box: tuple[int, slice, slice, slice, slice]) -> Tensor:
        _, channels, *place = box
        chosen = zip(self._channels[channels], self._scalings[channels], strict=True)
        parts = [torch.from_numpy(scaling.apply(channel[tuple(place)])) for channel, scaling in chosen]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def tensor(self) -> Tensor:
        """All of it, float32 [1, C, Z, Y, X]; plane by plane, so that nothing wider exists of the whole volume."""
        whole = torch.empty(self.shape)
        for z in range(self.shape[2]):
            whole[0, :, z : z + 1] = self[0, slice(None), slice(z, z + 1), slice(None), slice(None)]
        return whole


class Prepared(NamedTuple):
    """What the network gets. `image`: float32 [1, C, Z, Y, X]; `notes`: what was done that a user should know."""

    image: Image | Tensor
    notes: tuple[str, ...]


def prepare(volume: Volume, spec: ModelSpec, diameter: Diameter | None = None) -> Prepared:
    """Normalise each channel over the whole volume, and resample it to `working_size`.

    NaN and infinite pixels count as the lowest finite value; a constant channel becomes zeros. Raises BadFile where
    a channel has no finite pixel, and what `working_size` does.
    """
    channels, replaced = [], 0
    for channel in volume.array():
        finite, bad = _finite(channel)
        channels.append(finite)
        replaced += bad
    image = Image(channels, [scaling(channel, spec.input.normalisation) for channel in channels])
    notes = [f"{replaced} NaN or infinite pixels were taken for the lowest finite intensity."] if replaced else []
    target = working_size(volume, spec, diameter)
    if target == volume.shape[1:]:
        return Prepared(image, tuple(notes))
    reason = "the model's voxel size" if diameter is None else f"objects of {spec.input.diameter:g} voxels"
    notes.append(f"Resampled from {_times(volume.shape[1:])} to {_times(target)} voxels for {reason}.")
    resampled = functional.interpolate(image.tensor(), size=target, mode="trilinear", align_corners=False)
    return Prepared(resampled, tuple(notes))


def on_grid(segmentation: Segmentation, size: Size) -> Segmentation:
    """The way back: a segmentation on a grid of `size` (Z, Y, X), labels by nearest voxel, probabilities trilinear.

    Objects too small for the grid vanish; the remaining ones are renumbered without gaps.
    """
    pixels = segmentation.pixels
    if pixels.shape[-3:] == size:
        return segmentation
    if segmentation.kind == "probabilities":
        scores = torch.from_numpy(pixels)[None]
        resampled = functional.interpolate(scores, size=size, mode="trilinear", align_corners=False)
        return replace(segmentation, pixels=resampled[0].numpy())
    places = (((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(pixels.shape, size, strict=True))
    nearest = pixels[np.ix_(*places)]
    if segmentation.kind == "classes":
        return replace(segmentation, pixels=nearest)
    present = np.zeros(int(nearest.max(initial=0)) + 1, bool)
    present[nearest] = True
    present[0] = False
    count = int(np.count_nonzero(present))
    numbers = np.where(present, np.cumsum(present), 0).astype(label_dtype(count))
    return replace(segmentation, pixels=numbers[nearest], count=count)


def working_size(volume: Extent, spec: ModelSpec, diameter: Diameter | None = None) -> Size:
    """(Z, Y, X) of the grid that the network works on.

    With a `diameter`, objects of that size become as wide as the model wants them; else the volume's own grid, unless
    the voxel sizes of both model and volume are known. Raises BadParameter where that cannot be, and BadFile for a
    column of single pixels, whose windows would be padding and nothing else.
    """
    _, z, y, x = volume.shape
    if z > 1 and y == x == 1:
        raise BadFile(
            f"The stack's {z} planes are single pixels, so there is nothing to segment. If its axes are other ones, say"
            " so with axes=, slowest first."
        )
    if diameter is not None:
        return scaled_size((z, y, x), _object_scale(volume, spec, diameter))
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return z, y, x
    return resampled_size((z, y, x), volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def resampled_size(size: Size, have: VoxelSize, want: VoxelSize) -> Size:
    """The same extent in other voxels, at least one along each axis; up to 1 % of difference is left alone.

    Raises BadParameter for voxels so far from the model's that one of the two must be wrong.
    """
    factors = [h / w for h, w in zip(have, want, strict=True)]
    if not all(1 / MOST_RESAMPLING <= factor <= MOST_RESAMPLING for factor in factors):
        stated, wanted = (", ".join(f"{edge:g}" for edge in edges) for edges in (have, want))
        raise BadParameter(
            f"The voxel size {stated} um is too far from the {wanted} um that the model works at; "
            "correct it with voxel_size=Z,Y,X in micrometres."
        )
    return scaled_size(size, factors)


def scaled_size(size: Size, factors: Sequence[float]) -> Size:
    """So many times the voxels along each axis, at least one; up to 1 % of difference is left alone."""
    z, y, x = (
        length if abs(factor - 1) < 0.01 else max(1, round(length * factor))
        for length, factor in zip(size, factors, strict=True)
    )
    return z, y, x


def _object_scale(volume: Extent, spec: ModelSpec, diameter: Diameter) -> list[float]:
    wanted = spec.input.diameter
    if wanted is None:
        raise BadParameter(f"{spec.name} does not say how wide it wants objects to be; leave diameter out.")
    have = diameter.voxels(volume.voxel_size)
    if have is None:
        raise BadParameter(
            "The file states no voxel size, so a diameter in um means nothing; give voxel_size=Z,Y,X too, or diameter "
            "in voxels, such as 15px."
        )
    factors = [wanted / length for length in have]
    if not all(1 / MOST_ENLARGING <= factor <= MOST_ENLARGING for factor in factors):
        widths = " x ".join(f"{length:.3g}" for length in have)
        raise BadParameter(
            f"Objects of {widths} voxels are too far from the {wanted:g} voxels that {spec.name} works at; correct "
            "diameter, or voxel_size where it is in um."
        )
    return factors


def normalise(pixels: Array, normalisation: Normalisation) -> NDArray[np.float32]:
    """One channel [Z, Y, X] of finite numbers -> float32 [Z, Y, X], within plus and minus `FARTHEST`."""
    return scaling(pixels, normalisation).apply(pixels)


def scaling(pixels: Array, normalisation: Normalisation) -> Scaling:
    """How one channel [Z, Y, X] of finite numbers is normalised."""
    match normalisation:
        case PercentileNormalisation(low=low, high=high, clip=clip):
            at_low, at_high = percentiles(pixels, low, high)
            if at_low == at_high:
                # Hardly any pixel differs from the background, and those that do are all that there is to see.
                at_low, at_high = float(pixels.min()), float(pixels.max())
            return Scaling(at_low, at_high - at_low, *(clip or ()))
        case ZScoreNormalisation():
            with np.errstate(over="ignore", invalid="ignore"):
                mean, deviation = (float(f(pixels, dtype=np.float64)) for f in (np.mean, np.std))
            return Scaling(mean, deviation)
        case RangeNormalisation(low=low, high=high, clip=clip):
            return Scaling(low, high - low, *(clip or ()))
        case _:
            assert_never(normalisation)


def percentiles(pixels: Array, low: float, high: float) -> tuple[float, float]:
    """Two percentiles over all pixels, linearly interpolated like `numpy.percentile`.

    Up to 16 bits a histogram gives them exactly in one pass; other dtypes are partially sorted.
    """
    if pixels.dtype.kind not in "biu" or pixels.dtype.itemsize > 2:
        # Half precision would round the result, and overflow on the way to it.
        exact = pixels.astype(np.float32) if pixels.dtype == np.float16 else pixels
        a, b = np.percentile(exact, (low, high))
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
    """The channel without NaN and infinity, and how many there were; BadFile where there is nothing else."""
    if channel.dtype.kind != "f":
        return channel, 0
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(channel.sum(dtype=np.float64)):
            return channel, 0
    bad = ~np.isfinite(channel)
    if bad.all():
        raise BadFile("Every pixel is NaN or infinite. Export the file again, or choose another channel.")
    replaced = channel.copy()
    replaced[bad] = channel[~bad].min()
    return replaced, int(bad.sum())


def _times(size: Size) -> str:
    return " x ".join(map(str, size))
