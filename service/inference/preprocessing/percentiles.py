"""Exact percentiles of one channel that is read in blocks, without sorting all of its pixels.

Pixels without an intensity, such as NaN, are found and replaced first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from service.core.errors import BadFile
from service.core.types import Array

# Maximum number of voxels of a channel of more than 16 bits that is partially sorted. In larger channels, values are
# counted.
MAX_SORTED_VOXELS = 2**22

# Number of values per call to `numpy.bincount`, which converts them to 64 bits. Chunks of this size stay in the cache,
# and the temporary arrays do not fragment the memory.
COUNT_CHUNK_VOXELS = 2**16
# Floats from this magnitude on are not intensities, but values for missing data: the largest float32, 9.97e36 (netCDF).
NO_DATA_MAGNITUDE = 1e36


class Channel(Protocol):
    """All pixels of one channel in blocks that can be iterated over several times. A 3D array yields its planes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of every block."""

    @property
    def size(self) -> int:
        """Number of voxels."""

    def __iter__(self) -> Iterator[Array]:
        """Yield blocks of any shape that together contain every voxel once."""


@runtime_checkable
class CountedChannel(Protocol):
    """A channel whose voxels are counted on another device or in other processes."""

    def count_digits(self, shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        """Return the result of the function `count_digits` for all blocks."""


def compute_percentiles(channel: Channel, low: float, high: float) -> tuple[float, float]:
    """Return two exact percentiles of all pixels, linearly interpolated like `numpy.percentile`.

    For dtypes of up to 16 bits, one pass creates a histogram. Small channels of wider dtypes are partially sorted. For
    larger channels, each pass counts 16 more bits of order-preserving integer keys (radix selection).
    """
    ranks = [percent / 100 * (channel.size - 1) for percent in (low, high)]
    if channel.dtype.itemsize > 2 and channel.size <= MAX_SORTED_VOXELS:
        low_value, high_value = np.percentile(np.concatenate([block.ravel() for block in channel]), (low, high))
        return float(low_value), float(high_value)
    integer_ranks = sorted({int(integer_rank) for rank in ranks for integer_rank in (np.floor(rank), np.ceil(rank))})
    values = dict(zip(integer_ranks, _find_order_statistics(channel, integer_ranks), strict=True))
    low_value, high_value = (
        _interpolate(values[int(np.floor(rank))], values[int(np.ceil(rank))], rank % 1) for rank in ranks
    )
    return low_value, high_value


def _interpolate(lower: float, upper: float, fraction: float) -> float:
    """Interpolate like `numpy.percentile`, but without computing the difference of the values, which could overflow."""
    return lower if fraction == 0 else lower * (1 - fraction) + upper * fraction


def _find_order_statistics(channel: Channel, ranks: list[int]) -> list[float]:
    """Return the pixels at these ranks of the sorted channel. The ranks are zero-based and in ascending order."""
    prefixes, remaining_ranks = [0] * len(ranks), list(ranks)
    bits = 8 * channel.dtype.itemsize
    for shift in range(max(bits - 16, 0), -1, -16):
        if isinstance(channel, CountedChannel):
            histograms = channel.count_digits(shift, frozenset(prefixes))
        else:
            histograms = count_digits(channel, shift, frozenset(prefixes))
        for index, prefix in enumerate(prefixes):
            digit, num_smaller = _find_value_at_rank(histograms[prefix], remaining_ranks[index])
            remaining_ranks[index] -= num_smaller
            prefixes[index] = prefix << 16 | digit
    return [_convert_key_to_pixel(key, channel.dtype) for key in prefixes]


def count_digits(blocks: Iterable[Array], shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
    """Return a histogram of the 16 bits at `shift` for each prefix, that is, for each value of the bits above them.

    The bits are those of order-preserving keys; a key of up to 16 bits has a single digit. A histogram ends at the
    highest value that occurs. Bins for higher values would account for half of the run time for a small volume.
    """
    histograms = {prefix: np.zeros(1, np.int64) for prefix in prefixes}
    for block in blocks:
        keys = make_sortable_keys(block.ravel())
        has_no_prefix = keys.dtype.itemsize * 8 <= shift + 16
        for prefix, counts in histograms.items():
            selected_keys = keys if has_no_prefix else keys[keys >> (shift + 16) == prefix]
            digits = selected_keys >> shift & 0xFFFF if shift or not has_no_prefix else selected_keys
            histograms[prefix] = _add_counts(digits, counts)
    return histograms


def _find_value_at_rank(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """Return the value at `rank` of a histogram's sorted values, and the number of smaller values."""
    cumulative_counts = np.cumsum(counts)
    value = int(np.searchsorted(cumulative_counts, rank, side="right"))
    return value, int(cumulative_counts[value - 1]) if value else 0


def _add_counts(values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the histogram of `values` plus `counts`, up to the highest value. `counts` may be modified."""
    for start in range(0, values.size, COUNT_CHUNK_VOXELS):
        chunk = values[start : start + COUNT_CHUNK_VOXELS]
        # Large volumes are mostly empty, so most chunks have one value.
        chunk_counts = (
            np.append(np.zeros(chunk[0], np.int64), chunk.size) if has_one_value(chunk) else np.bincount(chunk)
        )
        counts, shorter = (chunk_counts, counts) if len(chunk_counts) > len(counts) else (counts, chunk_counts)
        counts[: len(shorter)] += shorter
    return counts


def has_one_value(pixels: Array) -> bool:
    """Return whether all pixels are equal. There must be at least one pixel."""
    first = pixels.flat[0]
    return bool(first == pixels.flat[-1]) and bool((pixels == first).all())


def make_sortable_keys(pixels: Array) -> NDArray[np.unsignedinteger]:
    """Map pixels to unsigned integers of the same width that sort in the same order."""
    kind, bits = pixels.dtype.kind, 8 * pixels.dtype.itemsize
    keys: NDArray[np.unsignedinteger] = pixels.view(f"u{pixels.dtype.itemsize}")
    sign = keys.dtype.type(1 << (bits - 1))
    if kind == "f":
        # All bits of negative numbers are inverted, but only the sign bit of positive numbers.
        return keys ^ (pixels.view(f"i{pixels.dtype.itemsize}") >> (bits - 1)).view(keys.dtype) ^ (~keys & sign)
    return keys ^ sign if kind == "i" else keys


def _convert_key_to_pixel(key: int, dtype: np.dtype[Any]) -> float:
    """Return the pixel that `make_sortable_keys` maps to this key."""
    bits = 8 * dtype.itemsize
    sign = 1 << (bits - 1)
    if dtype.kind == "f":
        key ^= sign if key & sign else 2 * sign - 1
    elif dtype.kind == "i":
        key ^= sign
    return float(np.array(key, f"u{dtype.itemsize}").view(dtype))


def find_intensities(pixels: Array) -> NDArray[np.bool_]:
    """Return which pixels are intensities, instead of NaN, infinite or a value for missing data."""
    can_have_values_for_missing_data = pixels.dtype.kind == "f" and pixels.dtype.itemsize > 2
    return np.abs(pixels) < NO_DATA_MAGNITUDE if can_have_values_for_missing_data else np.isfinite(pixels)


def replace_missing(pixels: Array, substitute: float | None) -> Array:
    """Return the pixels with all that are not intensities replaced with `substitute`, or unchanged if that is None."""
    return pixels if substitute is None else np.where(find_intensities(pixels), pixels, pixels.dtype.type(substitute))


def describe_replaced_pixels(count: int) -> tuple[str, ...]:
    """Return a note for the user about the number of replaced pixels; empty if no pixels were replaced."""
    if not count:
        return ()
    return (
        f"{count} pixels that are NaN or infinite, or have a value for missing data such as 3.4e+38, were replaced with"
        " the lowest finite intensity.",
    )


def find_substitute(channel: Channel) -> tuple[float | None, int]:
    """Return the lowest intensity and the number of missing pixels; None and 0 if all pixels are intensities.

    Raises BadFile if no pixel is an intensity.
    """
    if channel.dtype.kind != "f" or _has_small_sums(channel):
        return None, 0
    minimum, num_missing = np.inf, 0
    for block in channel:
        is_intensity = find_intensities(block)
        num_missing += block.size - int(np.count_nonzero(is_intensity))
        minimum = min(minimum, float(block.min(where=is_intensity, initial=np.inf)))
    return choose_substitute(minimum, num_missing, channel.size), num_missing


def choose_substitute(minimum: float, num_missing: int, num_pixels: int) -> float | None:
    """Return the replacement for missing pixels, the lowest intensity `minimum`; None if all pixels are intensities.

    Raises BadFile if all of the `num_pixels` pixels of the channel are missing.
    """
    if num_missing == num_pixels:
        raise BadFile(
            "All pixels are NaN or infinite, or have a value for missing data. Export the file again, or select another"
            " channel."
        )
    return minimum if num_missing else None


def _has_small_sums(blocks: Iterable[Array]) -> bool:
    """Return whether the sums of all blocks are small enough for all pixels to be intensities.

    A single NaN or infinity makes the sum nonfinite, and a value for missing data makes it large. The sum of many
    intensities may be large as well.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return all(abs(block.sum(dtype=np.float64)) < NO_DATA_MAGNITUDE for block in blocks)
