"""Counts of intensities in the parts of a volume, boxes of chunks, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import Size
from service.core.types import Array
from service.formats import stack_reader
from service.formats.zarr.reader import ZarrStack
from service.inference.blockwise.layout import Blocks, Box, Layout, lengths, ranges
from service.inference.blockwise.run_folder import OpenRun
from service.inference.preprocessing.empty_windows import IntensitySurvey, sample_step, survey_box
from service.inference.preprocessing.normalize import VolumeChannel, replace_nonfinite
from service.inference.preprocessing.percentiles import SORTED_VOXELS, count_digits, keys_of_pixels
from service.inference.runner.estimator import Estimator
from service.inference.windows.grid import as_size
from service.models.spec import PercentileNormalisation

# Voxels of a part, in those of a group of windows, and bytes of its pixels, where a chunk has not more.
PART_GROUPS, PART_BYTES = 4, 2**28

Wanted = dict[str, Any]
"""Request to count a channel: `shift` and `prefixes` of `count_digits`, and `substitute` of other pixels."""


def cut_parts(stack: ZarrStack, layout: Layout) -> Blocks:
    """Cut a volume into parts of whole chunks: near cubes, enough of them for the workers of a layout."""
    size, chunk = as_size(stack.shape[1:]), as_size(stack.chunk_size)
    edges, group = list(chunk), math.prod(lengths(layout.voxels(layout.group(0))))
    most = min(PART_GROUPS * group, PART_BYTES // (stack.shape[0] * stack.dtype.itemsize))
    while True:
        # The shortest axis grows first, x before z.
        for axis in sorted(range(3), key=lambda axis: (edges[axis], -axis)):
            larger = [n + chunk[at] * (at == axis) for at, n in enumerate(edges)]
            if edges[axis] < size[axis] and math.prod(map(min, zip(larger, size, strict=True))) <= most:
                edges = larger
                break
        else:
            return Blocks(size, as_size(edges))


class Counting:
    """Parts of a run's volume, and the counts that are wanted of each."""

    def __init__(self, run: OpenRun, stack: ZarrStack) -> None:
        self.parts = cut_parts(stack, run.plan.layout)
        self.dtype, self.channels = stack.dtype, stack.shape[0]
        self.skip_below = Estimator(run.spec, run.folder.settings).plan(run.plan.options).skip_below
        by_percentiles = isinstance(run.spec.input.normalisation, PercentileNormalisation)
        is_sorted = self.dtype.itemsize > 2 and math.prod(self.parts.size) <= SORTED_VOXELS
        self._is_counted = by_percentiles and not is_sorted

    @property
    def needed(self) -> bool:
        """Whether anything is to be counted at all."""
        return self._is_counted or self.skip_below is not None or self.dtype.kind == "f"

    @cached_property
    def first(self) -> list[Wanted | None]:
        """Request for each channel in the first round, in which no pixels are replaced yet."""
        top: Wanted = {"shift": max(8 * self.dtype.itemsize - 16, 0), "prefixes": [0], "substitute": None}
        return [top if self._is_counted else None] * self.channels


@contextmanager
def open_counting(run: OpenRun) -> Iterator[tuple[ZarrStack, Counting]]:
    with stack_reader.open_blocks(run.plan.source, run.plan.selection) as stack:
        yield stack, Counting(run, stack)


def count_parts(run: OpenRun) -> int:
    """Return how many parts are to be counted in each round."""
    with open_counting(run) as (_stack, counting):
        return len(counting.parts) if counting.needed else 0


def count_part(run: OpenRun, number: int) -> dict[str, Any]:
    """Count a part, by its number among those of all rounds one after the other, and write what was found."""
    with open_counting(run) as (stack, counting):
        parts = counting.parts
        turn, place = divmod(number, len(parts))
        box = parts.box(place)
        pixels = stack.read_region(ranges(box))
    wanted = run.folder.read_record("survey", turn - 1)["wanted"] if turn else counting.first
    found = {} if turn else _survey_part(run, counting, pixels, box)
    for index, (channel, asked) in enumerate(zip(pixels, wanted, strict=True)):
        if asked is None:
            continue
        # The first round does not know yet what stands for other pixels.
        is_whole = turn or counting.dtype.kind != "f"
        counted = replace_nonfinite(channel, asked["substitute"]) if is_whole else channel[np.isfinite(channel)]
        digits = count_digits([counted], asked["shift"], frozenset(asked["prefixes"]))
        found |= {f"counts-{index}-{asked['shift']}-{prefix}": counts for prefix, counts in digits.items()}
    run.folder.write_arrays(f"survey/{number}.npz", found)
    return {}


def _survey_part(run: OpenRun, counting: Counting, pixels: Array, box: Box) -> dict[str, Array]:
    """Return what the first round finds in a part beside counts."""
    found = _count_nonfinite(pixels) if counting.dtype.kind == "f" else {}
    if counting.skip_below is not None:
        size = counting.parts.size
        first, found["brightest"] = survey_box(pixels, box, run.plan.layout.grid, size)
        found["first"] = np.array(first)
        if counting.skip_below == "auto":
            found["sample"] = pixels[:, *_sampled(box, size)[0]]
    return found


def _count_nonfinite(pixels: Array) -> dict[str, Array]:
    """Return the number of pixels of each channel that are not finite, and the least of the others."""
    finite = np.isfinite(pixels)
    return {
        "nonfinite": np.array([channel.size - np.count_nonzero(channel) for channel in finite]),
        "lowest": pixels.min((1, 2, 3), where=finite, initial=np.inf),
    }


def _sampled(box: Box, size: Size) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return which voxels of a box belong to the sample of a volume, and which of the sample they are."""
    step = sample_step(math.prod(size))
    inside = (slice(None), *(slice(-low % step, None, step) for low, _ in box[1:]))
    there = (slice(*box[0]), *(slice(-(-low // step), -(-high // step)) for low, high in box[1:]))
    return inside, there


class Counts:
    """Sums of the counts of all parts.

    digits     by channel, shift and prefix
    nonfinite  pixels of each channel, and `lowest` of the others
    """

    def __init__(self, run: OpenRun, counting: Counting, rounds: int) -> None:
        self.digits = dict[tuple[int, int, int], NDArray[np.int64]]()
        self.nonfinite, self.lowest = np.zeros(counting.channels, np.int64), np.full(counting.channels, np.inf)
        size, grid = counting.parts.size, run.plan.layout.grid
        self.brightest = np.full((counting.channels, *map(len, grid.starts)), -np.inf)
        step = sample_step(math.prod(size))
        sample = (counting.channels, size[0], *(-(-n // step) for n in size[1:]))
        self._samples = np.zeros(sample if counting.skip_below == "auto" else (0,), counting.dtype)
        for number in range(rounds * len(counting.parts) if counting.needed else 0):
            with run.folder.read_arrays(f"survey/{number}.npz") as found:
                self._add(counting.parts.box(number % len(counting.parts)), size, found)

    def _add(self, box: Box, size: Size, found: Any) -> None:
        for name in found:
            if name.startswith("counts-"):
                index, shift, prefix = map(int, name.split("-")[1:])
                self._add_digits((index, shift, prefix), found[name])
        if "nonfinite" in found:
            self.nonfinite += found["nonfinite"]
            self.lowest = np.minimum(self.lowest, found["lowest"])
        if "brightest" in found:
            brightest = found["brightest"]
            z, y, x = (slice(at, at + n) for at, n in zip(found["first"], brightest.shape[1:], strict=True))
            here = self.brightest[:, z, y, x]
            np.maximum(here, brightest, out=here)
        if "sample" in found:
            self._samples[:, *_sampled(box, size)[1]] = found["sample"]

    def _add_digits(self, key: tuple[int, int, int], digits: NDArray[np.int64]) -> None:
        longer, shorter = digits, self.digits.get(key, digits[:0])
        if len(shorter) > len(longer):
            longer, shorter = shorter, longer
        longer[: len(shorter)] += shorter
        self.digits[key] = longer

    def count_replaced(self, index: int, substitute: float, dtype: np.dtype[Any]) -> None:
        """Count the pixels of a channel that are not finite as `substitute`, which the first round did not know."""
        key = int(keys_of_pixels(np.array([substitute], dtype))[0])
        shift = max(8 * dtype.itemsize - 16, 0)
        if (index, shift, 0) in self.digits:
            self.digits[index, shift, 0][key >> shift] += self.nonfinite[index]

    def intensities(self) -> IntensitySurvey:
        """Return the survey by which empty windows are found."""
        return IntensitySurvey(self.brightest, tuple(sample[np.isfinite(sample)] for sample in self._samples))


class NotCounted(Exception):
    """Counts are missing, which are `wanted`."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        self.wanted = wanted


@dataclass(frozen=True)
class CountedChannel(VolumeChannel):
    """One channel of a volume whose parts were counted; raises NotCounted for what was not counted yet."""

    counts: Counts = field(kw_only=True)

    def count_digits(self, shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        found = {prefix: self.counts.digits.get((self.index, shift, prefix)) for prefix in sorted(prefixes)}
        missing = [prefix for prefix, digits in found.items() if digits is None]
        if missing:
            raise NotCounted({"shift": shift, "prefixes": missing, "substitute": self.substitute})
        return {prefix: digits for prefix, digits in found.items() if digits is not None}
