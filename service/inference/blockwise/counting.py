"""Counts of intensities in the parts of a volume, which are boxes of chunks, and the sums of the counts."""

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
from service.inference.preprocessing.percentiles import MAX_SORTED_VOXELS, count_digits, sortable_keys
from service.inference.runner.estimator import Estimator
from service.inference.windows.grid import as_size
from service.models.spec import PercentileNormalisation

# Maximum size of a part, unless a single chunk is larger: in groups of windows, and in bytes of pixels.
PART_GROUPS = 4
PART_BYTES = 2**28

CountRequest = dict[str, Any]
"""Counts that a channel needs: `shift` and `prefixes` of `count_digits`, and the `substitute` of non-finite pixels."""


def cut_parts(stack: ZarrStack, layout: Layout) -> Blocks:
    """Divide a volume into parts of whole chunks that are nearly cubic and suit the workers of the layout."""
    size, chunk = as_size(stack.shape[1:]), as_size(stack.chunk_size)
    edges, group = list(chunk), math.prod(lengths(layout.voxels(layout.group(0))))
    max_voxels = min(PART_GROUPS * group, PART_BYTES // (stack.shape[0] * stack.dtype.itemsize))
    while True:
        # Extend the shortest axis first, and of equal axes x before y before z.
        for axis in sorted(range(3), key=lambda axis: (edges[axis], -axis)):
            larger = [n + chunk[index] * (index == axis) for index, n in enumerate(edges)]
            if edges[axis] < size[axis] and math.prod(map(min, zip(larger, size, strict=True))) <= max_voxels:
                edges = larger
                break
        else:
            return Blocks(size, as_size(edges))


class CountingPlan:
    """Parts of a run's volume, and the counts that each of them needs."""

    def __init__(self, run: OpenRun, stack: ZarrStack) -> None:
        self.parts = cut_parts(stack, run.plan.layout)
        self.dtype, self.channels = stack.dtype, stack.shape[0]
        self.skip_below = Estimator(run.spec, run.folder.settings).plan(run.plan.options).skip_below
        by_percentiles = isinstance(run.spec.input.normalisation, PercentileNormalisation)
        is_sorted = self.dtype.itemsize > 2 and math.prod(self.parts.size) <= MAX_SORTED_VOXELS
        self._is_counted = by_percentiles and not is_sorted

    @property
    def needed(self) -> bool:
        """Whether the run needs any counts."""
        return self._is_counted or self.skip_below is not None or self.dtype.kind == "f"

    @cached_property
    def first(self) -> list[CountRequest | None]:
        """Request for each channel in the first round, before non-finite pixels are replaced."""
        top: CountRequest = {"shift": max(8 * self.dtype.itemsize - 16, 0), "prefixes": [0], "substitute": None}
        return [top if self._is_counted else None] * self.channels


@contextmanager
def open_counting(run: OpenRun) -> Iterator[tuple[ZarrStack, CountingPlan]]:
    with stack_reader.open_blocks(run.plan.source, run.plan.selection) as stack:
        yield stack, CountingPlan(run, stack)


def count_parts(run: OpenRun) -> int:
    """Return the number of parts to count in each round; 0 if the run needs no counts."""
    with open_counting(run) as (_stack, counting):
        return len(counting.parts) if counting.needed else 0


def count_part(run: OpenRun, number: int) -> dict[str, Any]:
    """Count a part, and write the counts. Parts are numbered through all rounds."""
    with open_counting(run) as (stack, counting):
        parts = counting.parts
        round_number, index_in_round = divmod(number, len(parts))
        box = parts.box(index_in_round)
        pixels = stack.read_region(ranges(box))
    wanted = run.folder.read_record("survey", round_number - 1)["wanted"] if round_number else counting.first
    results = {} if round_number else _survey_part(run, counting, pixels, box)
    for index, (channel, request) in enumerate(zip(pixels, wanted, strict=True)):
        if request is None:
            continue
        # In the first round, the substitute for non-finite pixels is not known.
        is_whole = round_number or counting.dtype.kind != "f"
        counted = replace_nonfinite(channel, request["substitute"]) if is_whole else channel[np.isfinite(channel)]
        digits = count_digits([counted], request["shift"], frozenset(request["prefixes"]))
        results |= {f"counts-{index}-{request['shift']}-{prefix}": counts for prefix, counts in digits.items()}
    run.folder.write_arrays(f"survey/{number}.npz", results)
    return {}


def _survey_part(run: OpenRun, counting: CountingPlan, pixels: Array, box: Box) -> dict[str, Array]:
    """Return the results of the first round for a part, other than counts."""
    results = _count_nonfinite(pixels) if counting.dtype.kind == "f" else {}
    if counting.skip_below is not None:
        size = counting.parts.size
        first, results["brightest"] = survey_box(pixels, box, run.plan.layout.grid, size)
        results["first"] = np.array(first)
        if counting.skip_below == "auto":
            results["sample"] = pixels[:, *_sample_slices(box, size)[0]]
    return results


def _count_nonfinite(pixels: Array) -> dict[str, Array]:
    """Return the number of non-finite pixels of each channel, and the minimum of the finite ones."""
    finite = np.isfinite(pixels)
    return {
        "nonfinite": np.array([channel.size - np.count_nonzero(channel) for channel in finite]),
        "lowest": pixels.min((1, 2, 3), where=finite, initial=np.inf),
    }


def _sample_slices(box: Box, size: Size) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return which voxels of a box belong to the sample of a volume, and their indices in the sample."""
    step = sample_step(math.prod(size))
    inside = (slice(None), *(slice(-low % step, None, step) for low, _ in box[1:]))
    in_sample = (slice(*box[0]), *(slice(-(-low // step), -(-high // step)) for low, high in box[1:]))
    return inside, in_sample


class Counts:
    """Sums of the counts of all parts.

    digits     counts by channel, shift and prefix
    nonfinite  number of non-finite pixels of each channel
    lowest     minimum of the finite pixels of each channel
    """

    def __init__(self, run: OpenRun, counting: CountingPlan, rounds: int) -> None:
        self.digits = dict[tuple[int, int, int], NDArray[np.int64]]()
        self.nonfinite, self.lowest = np.zeros(counting.channels, np.int64), np.full(counting.channels, np.inf)
        size, grid = counting.parts.size, run.plan.layout.grid
        self.brightest = np.full((counting.channels, *map(len, grid.starts)), -np.inf)
        step = sample_step(math.prod(size))
        sample = (counting.channels, size[0], *(-(-n // step) for n in size[1:]))
        self._samples = np.zeros(sample if counting.skip_below == "auto" else (0,), counting.dtype)
        for number in range(rounds * len(counting.parts) if counting.needed else 0):
            with run.folder.read_arrays(f"survey/{number}.npz") as results:
                self._add(counting.parts.box(number % len(counting.parts)), size, results)

    def _add(self, box: Box, size: Size, results: Any) -> None:
        for name in results:
            if name.startswith("counts-"):
                index, shift, prefix = map(int, name.split("-")[1:])
                self._add_digits((index, shift, prefix), results[name])
        if "nonfinite" in results:
            self.nonfinite += results["nonfinite"]
            self.lowest = np.minimum(self.lowest, results["lowest"])
        if "brightest" in results:
            brightest = results["brightest"]
            z, y, x = (slice(start, start + n) for start, n in zip(results["first"], brightest.shape[1:], strict=True))
            region = self.brightest[:, z, y, x]
            np.maximum(region, brightest, out=region)
        if "sample" in results:
            self._samples[:, *_sample_slices(box, size)[1]] = results["sample"]

    def _add_digits(self, key: tuple[int, int, int], digits: NDArray[np.int64]) -> None:
        longer, shorter = digits, self.digits.get(key, digits[:0])
        if len(shorter) > len(longer):
            longer, shorter = shorter, longer
        longer[: len(shorter)] += shorter
        self.digits[key] = longer

    def count_replaced(self, index: int, substitute: float, dtype: np.dtype[Any]) -> None:
        """Count the non-finite pixels of a channel as `substitute`, which was not known in the first round."""
        key = int(sortable_keys(np.array([substitute], dtype))[0])
        shift = max(8 * dtype.itemsize - 16, 0)
        if (index, shift, 0) in self.digits:
            self.digits[index, shift, 0][key >> shift] += self.nonfinite[index]

    def intensities(self) -> IntensitySurvey:
        """Return the survey from which empty windows are found."""
        return IntensitySurvey(self.brightest, tuple(sample[np.isfinite(sample)] for sample in self._samples))


class CountsMissing(Exception):
    """Raised if counts are missing; `wanted` is the request for them."""

    def __init__(self, wanted: CountRequest) -> None:
        super().__init__()
        self.wanted = wanted


@dataclass(frozen=True)
class CountedChannel(VolumeChannel):
    """One channel of a volume whose parts have been counted. Raises CountsMissing for counts that do not exist yet."""

    counts: Counts = field(kw_only=True)

    def count_digits(self, shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        results = {prefix: self.counts.digits.get((self.index, shift, prefix)) for prefix in sorted(prefixes)}
        missing = [prefix for prefix, digits in results.items() if digits is None]
        if missing:
            raise CountsMissing({"shift": shift, "prefixes": missing, "substitute": self.substitute})
        return {prefix: digits for prefix, digits in results.items() if digits is not None}
