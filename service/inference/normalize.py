"""Volume -> image, normalised and resampled as the model's file says; and the way back to the volume's grid.

Normalising takes statistics of the whole volume, block of planes by block, but its float32 pixels are made only where a
window reads them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.errors import BadFile
from service.core.volume import Array, Volume
from service.inference.windows.kernels import stitching
from service.models.spec import (
    ModelSpec,
    Normalisation,
    PercentileNormalisation,
    RangeNormalisation,
    ZScoreNormalisation,
)

Box = tuple[int, slice, slice, slice, slice]


# Statistics take planes together until they hold so many voxels: what they need beside them stays small.
BLOCK_VOXELS = 2**22

# Counting widens values to 64 bits: so many at a time stay in a cache, and leave no hole of 32 MiB among what stays.
COUNTED_VOXELS = 2**18

# Types that torch can convert too, without rounding.
_EXACT_IN_FLOAT32 = (np.uint8, np.int8, np.uint16, np.int16, np.float16, np.float32)

# One hot pixel among nearly equal ones would otherwise become infinite, and spread through the whole window.
FARTHEST = 1e6


class Channel(Protocol):
    """All pixels of one channel in blocks, as often as they are asked for; a 3D array gives its planes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of every block."""

    @property
    def size(self) -> int:
        """Number of voxels."""

    def __iter__(self) -> Iterator[Array]:
        """Blocks of any shape, together every voxel once."""


@dataclass(frozen=True)
class Blocks:
    """A channel of a volume, a few planes at a time; what is not finite comes as `substitute`, if there is one."""

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
            yield finite(self.volume.read(z0, min(z0 + step, depth))[self.index], self.substitute)


def finite(pixels: Array, substitute: float | None) -> Array:
    """The pixels, with `substitute` in the place of NaN and infinity; None: there are none."""
    return pixels if substitute is None else np.where(np.isfinite(pixels), pixels, pixels.dtype.type(substitute))


@dataclass(frozen=True)
class Scaling:
    """x -> (x - offset) / scale, then at least `lowest` and at most `highest`; scale 0: everything becomes 0.

    NaN and infinity count as `substitute`; None: there are none.
    """

    offset: float
    scale: float
    lowest: float = -FARTHEST
    highest: float = FARTHEST
    substitute: float | None = None

    @cached_property
    def _is_plain(self) -> bool:
        """Whether every pixel counts, and division makes sense."""
        return self.substitute is None and self.scale != 0 and math.isfinite(self.offset) and math.isfinite(self.scale)

    def apply(self, pixels: Array) -> NDArray[np.float32]:
        """Pixels of any dtype and shape -> a new float32 array."""
        pixels = finite(pixels, self.substitute)
        if self.scale == 0 or not np.isfinite((self.offset, self.scale)).all():
            return np.zeros(pixels.shape, np.float32)
        dtype = np.float64 if pixels.dtype.itemsize > 4 or pixels.dtype in (np.int32, np.uint32) else np.float32
        with np.errstate(over="ignore"):
            scaled = np.subtract(pixels, self.offset, dtype=dtype)
            scaled /= self.scale
            np.clip(scaled, self.lowest, self.highest, out=scaled)
        return scaled.astype(np.float32, copy=False)

    def write(self, pixels: Array, out: Tensor) -> None:
        """The same into `out`, of the pixels' shape and any floating dtype."""
        plain = self._is_plain
        if plain and stitching.cuts(pixels, out):
            stitching.cut(pixels, out, self.offset, self.scale, (self.lowest, self.highest))
            return
        if not plain or out.dtype != torch.float32 or not _torch_reads(pixels):
            out.copy_(torch.from_numpy(self.apply(pixels)))
            return
        # In place, and with all threads of torch: a third of the time that NumPy takes for it.
        out.copy_(torch.from_numpy(pixels)).sub_(self.offset).div_(self.scale)
        if not self._contains(pixels.dtype):
            out.clamp_(self.lowest, self.highest)

    def _contains(self, dtype: np.dtype[Any]) -> bool:
        """Whether no pixel of this dtype can get beyond the limits."""
        if dtype.kind == "f":
            return False
        ends = [(end - self.offset) / self.scale for end in (np.iinfo(dtype).min, np.iinfo(dtype).max)]
        return self.lowest <= min(ends) and max(ends) <= self.highest


def _torch_reads(pixels: Array) -> bool:
    """Whether a tensor can share the pixels' memory and make float32 of them without rounding."""
    return pixels.dtype in _EXACT_IN_FLOAT32 and pixels.flags.writeable and min(pixels.strides) >= 0


class Image:
    """A volume whose channels are normalised where they are read.

    Indexed with (0, channels, z, y, x), slices all but the first, like the float32 [1, C, Z, Y, X] that it stands for.
    The planes of the last box are kept, as windows come in layers. Safe to use from several threads.
    """

    def __init__(self, volume: Volume, scalings: Sequence[Scaling]) -> None:
        self._volume, self._scalings = volume, scalings
        self.shape = (1, *volume.shape)
        # From which plane to before which, and these of each channel.
        self._kept: tuple[int, int, tuple[Array, ...]] = (0, 0, ())
        self._lock = threading.Lock()

    def __getitem__(self, box: Box) -> Tensor:
        pixels = self._pixels(box)
        parts = [torch.from_numpy(each.apply(one)) for one, each in zip(pixels, self._scalings[box[1]], strict=True)]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def write(self, box: Box, out: Iterable[Tensor]) -> None:
        """The same into `out`: for each channel [z, y, x] of any floating dtype."""
        for slot, pixels, scaling in zip(out, self._pixels(box), self._scalings[box[1]], strict=True):
            scaling.write(pixels, slot)

    def _pixels(self, box: Box) -> list[Array]:
        _, channels, z, y, x = box
        first, end, _ = z.indices(self.shape[2])
        return [planes[:, y, x] for planes in self._planes(first, end)[channels]]

    def _planes(self, first: int, end: int) -> tuple[Array, ...]:
        kept_first, kept_end, planes = self._kept
        if (kept_first, kept_end) == (first, end):
            return planes
        with self._lock:
            if self._kept[:2] != (first, end):
                # The old ones go first: of a large volume they are most of what is in memory.
                planes, self._kept = (), (0, 0, ())
                self._kept = (first, end, tuple(self._volume.read(first, end)))
            return self._kept[2]

    def tensor(self) -> Tensor:
        """All of it, float32 [1, C, Z, Y, X]; plane by plane, so that nothing wider exists of the whole volume."""
        whole = torch.empty(self.shape)
        for z in range(self.shape[2]):
            whole[0, :, z : z + 1] = self[0, slice(None), slice(z, z + 1), slice(None), slice(None)]
        return whole


def normalised(volume: Volume, spec: ModelSpec) -> tuple[Image, tuple[str, ...]]:
    """The volume, each channel normalised over the whole of it, and what a user should know. Raises BadFile."""
    scalings, replaced = [], 0
    for index in range(volume.shape[0]):
        substitute, bad = _substitute(Blocks(volume, index))
        channel = Blocks(volume, index, substitute)
        scalings.append(replace(scaling(channel, spec.input.normalisation), substitute=substitute))
        replaced += bad
    notes = [f"{replaced} NaN or infinite pixels were taken for the lowest finite intensity."] if replaced else []
    return Image(volume, scalings), tuple(notes)


def normalise(pixels: Array, normalisation: Normalisation) -> NDArray[np.float32]:
    """One channel [Z, Y, X] of finite numbers -> float32 [Z, Y, X], within plus and minus `FARTHEST`."""
    return scaling(pixels, normalisation).apply(pixels)


def scaling(channel: Channel, normalisation: Normalisation) -> Scaling:
    """How one channel of finite numbers is normalised."""
    match normalisation:
        case PercentileNormalisation(low=low, high=high, clip=clip):
            at_low, at_high = percentiles(channel, low, high)
            if at_low == at_high:
                # Hardly any pixel differs from the background, and those that do are all that there is to see.
                at_low = float(min(block.min() for block in channel))
                at_high = float(max(block.max() for block in channel))
            return Scaling(at_low, at_high - at_low, *(clip or ()))
        case ZScoreNormalisation():
            return Scaling(*mean_and_deviation(channel))
        case RangeNormalisation(low=low, high=high, clip=clip):
            return Scaling(low, high - low, *(clip or ()))
        case _:
            assert_never(normalisation)


def mean_and_deviation(channel: Channel) -> tuple[float, float]:
    """Mean and standard deviation, like `numpy.mean` and `numpy.std` in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(sum(block.sum(dtype=np.float64) for block in channel) / channel.size)
        squares = (np.square(np.subtract(block, mean, dtype=np.float64)).sum() for block in channel)
        return mean, float(np.sqrt(sum(squares) / channel.size))


def percentiles(channel: Channel, low: float, high: float) -> tuple[float, float]:
    """Two percentiles over all pixels, linearly interpolated like `numpy.percentile`.

    They are exact: up to 16 bits a histogram gives them in one pass; other dtypes are partially sorted where they are
    small, and counted by 16 bits of their order in each further pass where they are not.
    """
    ranks = [share / 100 * (channel.size - 1) for share in (low, high)]
    if channel.dtype.itemsize > 2 and channel.size <= BLOCK_VOXELS:
        a, b = np.percentile(np.concatenate([block.ravel() for block in channel]), (low, high))
        return float(a), float(b)
    wanted = sorted({int(whole) for rank in ranks for whole in (np.floor(rank), np.ceil(rank))})
    found = dict(zip(wanted, _sorted_values(channel, wanted), strict=True))
    a, b = (_between(found[int(np.floor(rank))], found[int(np.ceil(rank))], rank % 1) for rank in ranks)
    return a, b


def _between(below: float, above: float, share: float) -> float:
    """The share that `numpy.percentile` takes of two neighbours; neither may overflow the difference."""
    return below if share == 0 else below * (1 - share) + above * share


def _sorted_values(channel: Channel, ranks: list[int]) -> list[float]:
    """The pixels that would have these ranks, ascending and from 0, if all were sorted."""
    prefixes, rests = [0] * len(ranks), list(ranks)
    bits = 8 * channel.dtype.itemsize
    for shift in range(max(bits - 16, 0), -1, -16):
        counts = _histograms(channel, shift, frozenset(prefixes))
        for index, prefix in enumerate(prefixes):
            value, less = _ranked(counts[prefix], rests[index])
            rests[index] -= less
            prefixes[index] = prefix << 16 | value
    return [_value(key, channel.dtype) for key in prefixes]


def _histograms(channel: Channel, shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
    """By the bits of their keys above the 16 at `shift`: how many pixels have each value there, up to the highest.

    So many values as there are: half of the time for a small volume would go into those that no pixel has.
    """
    total = {prefix: np.zeros(1, np.int64) for prefix in prefixes}
    for block in channel:
        keys = _keys(block.ravel())
        whole = keys.dtype.itemsize * 8 <= shift + 16
        for prefix, counts in total.items():
            mine = keys if whole else keys[keys >> (shift + 16) == prefix]
            total[prefix] = _counted(mine >> shift & 0xFFFF if shift or not whole else mine, counts)
    return total


def _ranked(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """Of what was counted, the value that would have this rank if all were sorted, and how many are less."""
    if stitching.ready:
        return stitching.rank(counts, rank)
    upto = np.cumsum(counts)
    value = int(np.searchsorted(upto, rank, side="right"))
    return value, int(upto[value - 1]) if value else 0


def _counted(values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each value occurs, added to `counts`, which may be changed; as long as the highest value asks for."""
    for here in _in_portions(values):
        counts, fewer = (here, counts) if len(here) > len(counts) else (counts, here)
        counts[: len(fewer)] += fewer
    return counts


def _in_portions(values: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """How often each value occurs in the first of them, the next, and so on."""
    if values.size and stitching.counts(values):
        yield stitching.count(values)
        return
    for start in range(0, values.size, COUNTED_VOXELS):
        yield np.bincount(values[start : start + COUNTED_VOXELS], minlength=1)


def _keys(pixels: Array) -> NDArray[np.unsignedinteger]:
    """Unsigned integers as wide as the pixels, in the order of the pixels."""
    kind, bits = pixels.dtype.kind, 8 * pixels.dtype.itemsize
    keys: NDArray[np.unsignedinteger] = pixels.view(f"u{pixels.dtype.itemsize}")
    sign = keys.dtype.type(1 << (bits - 1))
    if kind == "f":
        # A negative number has all its bits turned, a positive one its sign.
        return keys ^ (pixels.view(f"i{pixels.dtype.itemsize}") >> (bits - 1)).view(keys.dtype) ^ (~keys & sign)
    return keys ^ sign if kind == "i" else keys


def _value(key: int, dtype: np.dtype[Any]) -> float:
    """The inverse of `_keys`."""
    bits = 8 * dtype.itemsize
    sign = 1 << (bits - 1)
    if dtype.kind == "f":
        key ^= sign if key & sign else 2 * sign - 1
    elif dtype.kind == "i":
        key ^= sign
    return float(np.array(key, f"u{dtype.itemsize}").view(dtype))


def _substitute(channel: Channel) -> tuple[float | None, int]:
    """What NaN and infinity are taken for, None where there are none, and how many; BadFile where all are."""
    if channel.dtype.kind != "f" or _all_finite(channel):
        return None, 0
    lowest, bad = np.inf, 0
    for block in channel:
        good = np.isfinite(block)
        bad += block.size - int(np.count_nonzero(good))
        lowest = min(lowest, float(block.min(where=good, initial=np.inf)))
    if bad == channel.size:
        raise BadFile("Every pixel is NaN or infinite. Export the file again, or choose another channel.")
    return (lowest if bad else None), bad


def _all_finite(blocks: Iterable[Array]) -> bool:
    # A sum is NaN or infinite as soon as one pixel is, and reads them once; a sum may also overflow by itself.
    with np.errstate(over="ignore", invalid="ignore"):
        return all(np.isfinite(block.sum(dtype=np.float64)) for block in blocks)
