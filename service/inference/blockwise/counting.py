"""Intensity statistics of the parts of a volume, and of the whole volume. A part is a box of whole chunks."""

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
from service.formats.zarr.reader import ChunkIndex, ZarrStack
from service.inference.blockwise.layout import Blocks, Box, Layout, get_lengths, to_ranges
from service.inference.blockwise.run_folder import OpenRun
from service.inference.preprocessing.empty_windows import IntensitySurvey, compute_sample_step, survey_box
from service.inference.preprocessing.normalize import VolumeChannel
from service.inference.preprocessing.percentiles import (
    MAX_SORTED_VOXELS,
    count_digits,
    find_intensities,
    make_sortable_keys,
    replace_missing,
)
from service.inference.runner.estimator import Estimator
from service.inference.windows.grid import as_size
from service.models.spec_parts import PercentileNormalization

# Maximum size of a part, as a multiple of the size of a window group, and in bytes of pixels. A part contains at least
# one chunk.
MAX_PART_GROUPS = 4
MAX_PART_BYTES = 2**28

CountRequest = dict[str, Any]
"""Request for intensity histograms of a channel. It contains `shift` and `prefixes` for `count_digits`, and the
`substitute` for non-finite pixels."""


def divide_into_parts(stack: ZarrStack, layout: Layout) -> Blocks:
    """Divide a volume into nearly cubic parts of whole chunks. The part size is based on the groups of the layout."""
    size, chunk_size = as_size(stack.shape[1:]), as_size(stack.chunk_size)
    part_size, group_voxels = list(chunk_size), math.prod(get_lengths(layout.get_voxels(layout.get_group(0))))
    max_voxels = min(MAX_PART_GROUPS * group_voxels, MAX_PART_BYTES // (stack.shape[0] * stack.dtype.itemsize))
    while True:
        # Extend the shortest axis first. If axes are equally short, extend x before y, and y before z.
        for axis in sorted(range(3), key=lambda axis: (part_size[axis], -axis)):
            extended_size = [n + chunk_size[index] * (index == axis) for index, n in enumerate(part_size)]
            if (
                part_size[axis] < size[axis]
                and math.prod(map(min, zip(extended_size, size, strict=True))) <= max_voxels
            ):
                part_size = extended_size
                break
        else:
            return Blocks(size, as_size(part_size))


class CountingPlan:
    """Parts of a run's volume, and the statistics that are needed for each part."""

    def __init__(self, run: OpenRun, stack: ZarrStack) -> None:
        self.parts = divide_into_parts(stack, run.plan.layout)
        self.dtype, self.num_channels = stack.dtype, stack.shape[0]
        self.skip_below = Estimator(run.spec, run.folder.settings).plan(run.plan.options).skip_below
        uses_percentiles = any(
            isinstance(run.spec.input.get_normalization(index), PercentileNormalization)
            for index in range(self.num_channels)
        )
        can_sort = self.dtype.itemsize > 2 and math.prod(self.parts.size) <= MAX_SORTED_VOXELS
        self._needs_digit_counts = uses_percentiles and not can_sort

    @cached_property
    def first_requests(self) -> list[CountRequest | None]:
        """Requests for the channels in the first round, before non-finite pixels are replaced."""
        request: CountRequest = {"shift": max(8 * self.dtype.itemsize - 16, 0), "prefixes": [0], "substitute": None}
        return [request if self._needs_digit_counts else None] * self.num_channels


@contextmanager
def open_for_counting(run: OpenRun) -> Iterator[tuple[ZarrStack, CountingPlan]]:
    """Open the stack of a run, and plan which statistics of its parts are computed."""
    with stack_reader.open_blocks(run.plan.source, run.plan.selection) as stack:
        yield stack, CountingPlan(run, stack)


def get_part_count(run: OpenRun) -> int:
    """Return the number of parts to process in each round."""
    with open_for_counting(run) as (_stack, counting_plan):
        return len(counting_plan.parts)


def count_part(run: OpenRun, part_number: int) -> dict[str, Any]:
    """Compute and write the intensity statistics of a part. Parts are numbered consecutively across all rounds."""
    with open_for_counting(run) as (stack, counting_plan):
        parts = counting_plan.parts
        round_number, index_in_round = divmod(part_number, len(parts))
        box = parts.get_box(index_in_round)
        pixels = stack.read_region(to_ranges(box))
    requests = (
        run.folder.read_record("survey", round_number - 1)["requests"] if round_number else counting_plan.first_requests
    )
    results = {} if round_number else _survey_part(run, counting_plan, pixels, box)
    results["missing_chunks"] = np.array(sorted(stack.missing_chunks), np.int64)
    for index, (channel, request) in enumerate(zip(pixels, requests, strict=True)):
        if request is None:
            continue
        # In the first round, the substitute for non-finite pixels is not known yet.
        is_substitute_known = round_number or counting_plan.dtype.kind != "f"
        finite_pixels = (
            replace_missing(channel, request["substitute"])
            if is_substitute_known
            else channel[find_intensities(channel)]
        )
        digit_counts = count_digits([finite_pixels], request["shift"], frozenset(request["prefixes"]))
        results |= {f"counts-{index}-{request['shift']}-{prefix}": counts for prefix, counts in digit_counts.items()}
    run.folder.write_arrays(f"survey/{part_number}.npz", results)
    return {}


def _survey_part(run: OpenRun, counting_plan: CountingPlan, pixels: Array, box: Box) -> dict[str, Array]:
    """Return the results of the first round for a part, excluding the digit counts."""
    results = _count_nonfinite(pixels) if counting_plan.dtype.kind == "f" else {}
    if counting_plan.dtype.itemsize > 2 or counting_plan.dtype.kind == "f":
        results |= _find_extremes(pixels)
    if counting_plan.skip_below is not None:
        size = counting_plan.parts.size
        first_window, results["window_maxima"] = survey_box(pixels, box, run.plan.layout.grid, size)
        results["first"] = np.array(first_window)
        if counting_plan.skip_below == "auto":
            results["sample"] = pixels[:, *_get_sample_slices(box, size)[0]]
    return results


def _count_nonfinite(pixels: Array) -> dict[str, Array]:
    """Return the number of missing pixels of each channel."""
    is_intensity = find_intensities(pixels)
    return {"nonfinite_counts": np.array([channel.size - np.count_nonzero(channel) for channel in is_intensity])}


def _find_extremes(pixels: Array) -> dict[str, Array]:
    """Return the lowest and the highest intensity of each channel; NaN if all pixels of a channel are missing."""
    intensities = replace_missing(pixels, np.nan if pixels.dtype.kind == "f" else None)
    return {
        "minima": np.fmin.reduce(intensities, (1, 2, 3)).astype(np.float64),
        "maxima": np.fmax.reduce(intensities, (1, 2, 3)).astype(np.float64),
    }


def _get_sample_slices(box: Box, size: Size) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the indices of the sampled voxels of a box: within the box, and within the sample of the volume."""
    step = compute_sample_step(math.prod(size))
    box_slices = (slice(None), *(slice(-first % step, None, step) for first, _ in box[1:]))
    sample_slices = (slice(*box[0]), *(slice(-(-first // step), -(-end // step)) for first, end in box[1:]))
    return box_slices, sample_slices


class Counts:
    """Statistics of the whole volume, merged from the statistics of its parts.

    digit_counts      results of `count_digits`, keyed by channel, shift and prefix
    nonfinite_counts  number of non-finite pixels of each channel
    minima, maxima    lowest and highest intensity of each channel; NaN if unknown, for integers of up to 16 bits
    missing_chunks    indices of the chunks that are not stored
    window_maxima     maximum of each channel in each window, [C, z, y, x]
    """

    def __init__(self, run: OpenRun, counting_plan: CountingPlan, round_count: int) -> None:
        self.digit_counts = dict[tuple[int, int, int], NDArray[np.int64]]()
        self.nonfinite_counts = np.zeros(counting_plan.num_channels, np.int64)
        self.minima, self.maxima = np.full((2, counting_plan.num_channels), np.nan)
        self.missing_chunks = set[ChunkIndex]()
        size, grid = counting_plan.parts.size, run.plan.layout.grid
        self.window_maxima = np.full((counting_plan.num_channels, *map(len, grid.starts)), -np.inf)
        step = compute_sample_step(math.prod(size))
        sample_shape = (counting_plan.num_channels, size[0], *(-(-n // step) for n in size[1:]))
        self._samples = np.zeros(sample_shape if counting_plan.skip_below == "auto" else (0,), counting_plan.dtype)
        for part_number in range(round_count * len(counting_plan.parts)):
            with run.folder.read_arrays(f"survey/{part_number}.npz") as results:
                self._add_results(counting_plan.parts.get_box(part_number % len(counting_plan.parts)), size, results)

    def _add_results(self, box: Box, size: Size, results: Any) -> None:
        for name in results:
            if name.startswith("counts-"):
                index, shift, prefix = map(int, name.split("-")[1:])
                self._add_digit_counts((index, shift, prefix), results[name])
        if "nonfinite_counts" in results:
            self.nonfinite_counts += results["nonfinite_counts"]
        if "minima" in results:
            self.minima = np.fmin(self.minima, results["minima"])
            self.maxima = np.fmax(self.maxima, results["maxima"])
        self.missing_chunks |= set(map(tuple, results["missing_chunks"].tolist()))
        if "window_maxima" in results:
            window_maxima = results["window_maxima"]
            z, y, x = (
                slice(start, start + n) for start, n in zip(results["first"], window_maxima.shape[1:], strict=True)
            )
            region = self.window_maxima[:, z, y, x]
            np.maximum(region, window_maxima, out=region)
        if "sample" in results:
            self._samples[:, *_get_sample_slices(box, size)[1]] = results["sample"]

    def _add_digit_counts(self, key: tuple[int, int, int], digit_counts: NDArray[np.int64]) -> None:
        sums, addends = digit_counts, self.digit_counts.get(key, digit_counts[:0])
        if len(addends) > len(sums):
            sums, addends = addends, sums
        sums[: len(addends)] += addends
        self.digit_counts[key] = sums

    def add_substituted_pixels(self, index: int, substitute: float, dtype: np.dtype[Any]) -> None:
        """Add the non-finite pixels of a channel as `substitute`, which was not yet known in the first round."""
        sort_key = int(make_sortable_keys(np.array([substitute], dtype))[0])
        shift = max(8 * dtype.itemsize - 16, 0)
        if (index, shift, 0) in self.digit_counts:
            self.digit_counts[index, shift, 0][sort_key >> shift] += self.nonfinite_counts[index]

    def get_intensity_survey(self) -> IntensitySurvey:
        """Return the intensity survey that is used to find empty windows."""
        return IntensitySurvey(self.window_maxima, tuple(sample[find_intensities(sample)] for sample in self._samples))


class MissingCounts(Exception):
    """Raised if a channel needs histograms that do not exist yet. `request` is the request for these histograms."""

    def __init__(self, request: CountRequest) -> None:
        super().__init__()
        self.request = request


@dataclass(frozen=True)
class CountedChannel(VolumeChannel):
    """Channel of a volume whose intensity histograms have been computed part by part.

    `count_digits` raises MissingCounts if a histogram is missing.
    """

    counts: Counts = field(kw_only=True)

    def count_digits(self, shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        counts_by_prefix = {
            prefix: self.counts.digit_counts.get((self.index, shift, prefix)) for prefix in sorted(prefixes)
        }
        missing_prefixes = [prefix for prefix, counts in counts_by_prefix.items() if counts is None]
        if missing_prefixes:
            raise MissingCounts({"shift": shift, "prefixes": missing_prefixes, "substitute": self.substitute})
        return {prefix: counts for prefix, counts in counts_by_prefix.items() if counts is not None}
