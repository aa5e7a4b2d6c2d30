"""First pass over a volume: intensities that all of it decides on, and windows without anything in them.

Parts of the volume, boxes of chunks, are counted by whichever worker is free, and one task merges what was counted.
Percentiles of pixels of more than 16 bits take a further round of that for every further 16 bits. What no counts tell,
as mean and standard deviation, the merging task reads by planes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.buffers import make_allocator, release_pages
from service.core.quantities import Size
from service.core.types import Array, Volume
from service.formats import stack_reader
from service.formats.tiff.pixels import run_in_threads
from service.formats.zarr.reader import ZarrStack
from service.inference.blockwise.layout import Blocks, Box, Layout, lengths, ranges
from service.inference.blockwise.run_folder import OpenRun, Survey
from service.inference.decoding.steering import steer
from service.inference.diameter.places import strongest_windows
from service.inference.preprocessing.empty_windows import (
    IntensitySurvey,
    Skipping,
    make_filter,
    sample_step,
    survey_box,
)
from service.inference.preprocessing.normalize import (
    IntensityScaling,
    NormalisedImage,
    VolumeChannel,
    choose_substitute,
    fit_scaling,
    note_replaced,
    replace_nonfinite,
)
from service.inference.preprocessing.percentiles import SORTED_VOXELS, count_digits, keys_of_pixels
from service.inference.preprocessing.resample import describe_resampling, resample_image
from service.inference.runner.estimator import Estimator
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import ALONE, estimate_diameter
from service.inference.types import Plan
from service.inference.windows import grid
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import SparseImage
from service.models.spec import PercentileNormalisation

# Edge of the boxes of planes that are read at a time, so that chunks are decoded once.
READ_EDGE = 512
# Voxels of a part, in those of a group of windows, and bytes of its pixels, where a chunk has not more.
PART_GROUPS, PART_BYTES = 4, 2**28
# Layers of chunks under small boxes that are kept, and voxels of the largest one.
LAYERS, LAYER_VOXELS = 8, 2**23

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


class _Counting:
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
def _open(run: OpenRun) -> Iterator[tuple[ZarrStack, _Counting]]:
    with stack_reader.open_blocks(run.plan.source, run.plan.selection) as stack:
        yield stack, _Counting(run, stack)


def count_parts(run: OpenRun) -> int:
    """Return how many parts are to be counted in each round."""
    with _open(run) as (_stack, counting):
        return len(counting.parts) if counting.needed else 0


def count_part(run: OpenRun, number: int) -> None:
    """Count a part, by its number among those of all rounds one after the other, and write what was found."""
    with _open(run) as (stack, counting):
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


def _survey_part(run: OpenRun, counting: _Counting, pixels: Array, box: Box) -> dict[str, Array]:
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


class _Counts:
    """Sums of the counts of all parts.

    digits     by channel, shift and prefix
    nonfinite  pixels of each channel, and `lowest` of the others
    """

    def __init__(self, run: OpenRun, counting: _Counting, rounds: int) -> None:
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


class _NotCounted(Exception):
    """Counts are missing, which are `wanted`."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        self.wanted = wanted


@dataclass(frozen=True)
class _CountedChannel(VolumeChannel):
    """One channel of a volume whose parts were counted; raises _NotCounted for what was not counted yet."""

    counts: _Counts | None = None

    def count_digits(self, shift: int, prefixes: frozenset[int]) -> dict[int, NDArray[np.int64]]:
        assert self.counts is not None  # noqa: S101 - what is made without has no use
        found = {prefix: self.counts.digits.get((self.index, shift, prefix)) for prefix in sorted(prefixes)}
        missing = [prefix for prefix, digits in found.items() if digits is None]
        if missing:
            raise _NotCounted({"shift": shift, "prefixes": missing, "substitute": self.substitute})
        return {prefix: digits for prefix, digits in found.items() if digits is not None}


class _RegionImage(NormalisedImage):
    """A normalised volume of which no more is read than what is asked for, and the layer of chunks around that.

    Of small boxes the latest layers are kept, as windows are cut plane by plane.
    """

    def __init__(self, stack: ZarrStack, volume: Volume, scalings: tuple[IntensityScaling, ...]) -> None:
        super().__init__(volume, scalings)
        self._stack, self._read_layer = stack, lru_cache(LAYERS)(self._read_region)

    def _read_region(self, z: range, y: range, x: range) -> Array:
        return self._stack.read_region((z, y, x))

    def _read(self, box: grid.Box) -> list[Array]:
        z, y, x = (range(*axis.indices(length)) for axis, length in zip(box[2:], self.shape[2:], strict=True))
        depth = self._stack.chunk_size[0]
        layer = range(z.start // depth * depth, min(-(-z.stop // depth) * depth, self.shape[2]))
        if len(layer) * len(y) * len(x) > LAYER_VOXELS:
            return list(self._read_region(z, y, x)[box[1]])
        return list(self._read_layer(layer, y, x)[box[1], z.start - layer.start : z.stop - layer.start])


def merge_counts(run: OpenRun, runner: ModelRunner, turn: int) -> dict[str, Any]:
    """Merge what was counted up to a round, and write the survey, unless something is `wanted` in a further round.

    Raises BadFile for a channel without finite pixels, and what reading raises.
    """
    with _open(run) as (stack, counting):
        counts, volume = _Counts(run, counting, turn + 1), lazy_volume(stack, run)
        fitted = [_fit(volume, index, counts, runner) for index in range(counting.channels)]
        wanted = [None if isinstance(each, IntensityScaling) else each for each in fitted]
        if any(wanted):
            return {"wanted": wanted}
        scalings = tuple(each for each in fitted if isinstance(each, IntensityScaling))
        image, plan = _RegionImage(stack, volume, scalings), run.plan
        sizing = estimate_diameter(runner, volume, plan.options, image=image)
        intensities: IntensitySurvey | None = counts.intensities()
        if sizing is not None and sizing.resampled_by is not None:
            plan = plan.with_diameter(sizing.resampled_by, runner.spec)
            # Windows lie elsewhere than those whose brightest voxels were found.
            intensities = None
        done = runner.estimator.plan(plan.options)._replace(diameter=plan.diameter)
        skipping = skip_empty_windows(runner, image, volume, done, intensities)
        notes = (
            *note_replaced(int(counts.nonfinite.sum())),
            *(() if sizing is None else (sizing.note,)),
            *describe_resampling(plan.size, plan.layout.size, runner.spec, plan.diameter),
            *skipping.notes,
            *volume.notes,
        )
    places, scores = np.zeros((0, 3), np.int64), tuple[float, ...]()
    if isinstance(skipping.image, SparseImage):
        places = np.array(sorted(skipping.image.skipped), np.int64).reshape(-1, 3)
        scores = tuple(skipping.image.scores.tolist())
    survey = Survey(scalings, notes, skipping.skipped, scores, runner.describe_engine(), sizing)
    run.folder.write_survey(survey, places)
    return {"wanted": None}


def skip_empty_windows(
    runner: ModelRunner, image: NormalisedImage, volume: Volume, plan: Plan, survey: IntensitySurvey | None
) -> Skipping:
    """Find the windows that `segment` would leave out of a volume.

    `survey` has the windows that there are with the plan's diameter; None: the volume is read.
    """
    resampled, _notes = resample_image(image, volume, runner.spec, plan.diameter)
    if plan.skip_below is None:
        return Skipping(resampled, None)
    spec = steer(runner.spec, plan.steering, volume, as_size(resampled.shape[2:]))
    with torch.inference_mode():
        windows = make_filter(resampled, spec, plan, runner.score_windows(plan, ALONE.probe))
        return windows.skip(volume, plan.skip_below, survey)


def look_again(run: OpenRun) -> list[Tensor]:
    """Return windows [C, z, y, x] of a surveyed volume, as it is sampled, where most is to be seen."""
    with stack_reader.open_blocks(run.plan.source, run.plan.selection) as stack:
        image = _RegionImage(stack, lazy_volume(stack, run), run.folder.survey.scalings)
        return strongest_windows(image, run.spec.input.roi_size)


def _fit(volume: Volume, index: int, counts: _Counts, runner: ModelRunner) -> IntensityScaling | Wanted:
    """Return the scaling of a channel, or what is still to be counted for it."""
    substitute = choose_substitute(float(counts.lowest[index]), int(counts.nonfinite[index]), volume.voxels)
    if substitute is not None:
        counts.count_replaced(index, substitute, volume.dtype)
    channel = _CountedChannel(volume, index, substitute, counts)
    try:
        scaling = fit_scaling(channel, runner.spec.input.normalisation)
    except _NotCounted as missing:
        return missing.wanted
    return replace(scaling, substitute=substitute)


def lazy_volume(stack: ZarrStack, run: OpenRun) -> Volume:
    """Return a volume that is read a layer of chunks at a time, into the run's folder where that is large."""
    _, depth, height, width = stack.shape
    layer = LayerReader(stack, run.folder.path)
    return Volume((stack.shape[0], depth, height, width), stack.dtype, layer.read, *stack.facts(run.plan.selection))


class LayerReader:
    """Planes of an image, of which those in the latest layer of chunks are kept decoded."""

    def __init__(self, stack: ZarrStack, scratch: Path) -> None:
        self._stack, self._allocate = stack, make_allocator(scratch)
        self._depth = stack.chunk_size[0]
        self._kept: tuple[int, Array] | None = None

    def read(self, first: int, end: int) -> Array:
        """Return planes [C, z, Y, X]."""
        channels, _, height, width = self._stack.shape
        planes: Array = np.empty((channels, end - first, height, width), self._stack.dtype)
        for number in range(first // self._depth, -(-end // self._depth)):
            low, high = max(first, number * self._depth), min(end, (number + 1) * self._depth)
            layer = self._layer(number)
            planes[:, low - first : high - first] = layer[:, low - number * self._depth : high - number * self._depth]
            release_pages(layer)
        return planes

    def _layer(self, number: int) -> Array:
        if self._kept is None or self._kept[0] != number:
            self._kept = None
            self._kept = number, self._decode(number)
        return self._kept[1]

    def _decode(self, number: int) -> Array:
        channels, depth, height, width = self._stack.shape
        low, high = number * self._depth, min((number + 1) * self._depth, depth)
        layer = self._allocate((channels, high - low, height, width), self._stack.dtype)

        def decode(place: tuple[int, int]) -> None:
            rows, columns = (range(at, min(at + READ_EDGE, n)) for at, n in zip(place, (height, width), strict=True))
            pixels = self._stack.read_region((range(low, high), rows, columns))
            layer[:, :, rows.start : rows.stop, columns.start : columns.stop] = pixels

        places = [(y, x) for y in range(0, height, READ_EDGE) for x in range(0, width, READ_EDGE)]
        run_in_threads(decode, places, math.prod(layer.shape) * layer.dtype.itemsize)
        return layer
