"""First pass over a volume, which collects intensity statistics of the whole volume and finds empty windows.

Workers compute intensity histograms of the parts of the volume, which are boxes of whole chunks, and one task merges
them. Percentiles of pixels with more than 16 bits require an additional round for each further 16 bits. Other
statistics, such as the mean and standard deviation, are computed plane by plane in the merging task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.buffers import make_allocator, release_pages
from service.core.hardware.host import run_in_threads
from service.core.types import Array, Volume
from service.formats import stack_reader
from service.formats.zarr.reader import ZarrStack
from service.inference.blockwise.counting import CountedChannel, CountRequest, Counts, MissingCounts, open_for_counting
from service.inference.blockwise.run_folder import OpenRun, Survey
from service.inference.decoding.postprocessing import apply_postprocessing
from service.inference.diameter.window_selection import select_high_contrast_windows
from service.inference.preprocessing.empty_windows import IntensitySurvey, SkipResult, make_empty_window_filter
from service.inference.preprocessing.normalize import (
    IntensityScaling,
    NormalizedImage,
    describe_limited_pixels,
    fit_scaling,
)
from service.inference.preprocessing.percentiles import choose_substitute, describe_replaced_pixels
from service.inference.preprocessing.resample import describe_resampling, resample_image
from service.inference.segment import DEFAULT_CALLBACKS, estimate_diameter
from service.inference.types import Plan
from service.inference.windows import grid
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import Image, SparseImage

if TYPE_CHECKING:
    from service.inference.runner.model_runner import ModelRunner

# Edge length in voxels of the boxes in which planes are read. It exceeds common chunk sizes, so that most chunks are
# decoded only once.
READ_EDGE_VOXELS = 512
# Maximum number of layers of chunks that are cached for small boxes, and maximum number of voxels in a cached layer.
MAX_CACHED_LAYERS = 8
MAX_CACHED_LAYER_VOXELS = 2**23


class _RegionImage(NormalizedImage):
    """Normalized volume that reads only the requested box, extended to complete layers of chunks.

    For small boxes, the most recently read layers are cached, because windows are read plane by plane.
    """

    def __init__(self, stack: ZarrStack, volume: Volume, scalings: tuple[IntensityScaling, ...]) -> None:
        super().__init__(volume, scalings)
        self._stack, self._read_layer = stack, lru_cache(MAX_CACHED_LAYERS)(self._read_region)

    def _read_region(self, z: range, y: range, x: range) -> Array:
        return self._stack.read_region((z, y, x))

    def _read(self, box: grid.Box) -> list[Array]:
        z, y, x = (range(*axis.indices(length)) for axis, length in zip(box[2:], self.shape[2:], strict=True))
        depth = self._stack.chunk_size[0]
        layer = range(z.start // depth * depth, min(-(-z.stop // depth) * depth, self.shape[2]))
        if len(layer) * len(y) * len(x) > MAX_CACHED_LAYER_VOXELS:
            return list(self._read_region(z, y, x)[box[1]])
        return list(self._read_layer(layer, y, x)[box[1], z.start - layer.start : z.stop - layer.start])


def merge_counts(run: OpenRun, runner: ModelRunner, round_number: int) -> dict[str, Any]:
    """Merge the statistics of all rounds so far. Write the survey, or return the `requests` for the next round.

    Raises BadFile if a channel has no finite pixels. Exceptions raised while reading the stack are propagated.
    """
    with open_for_counting(run) as (stack, counting_plan):
        counts, volume = Counts(run, counting_plan, round_number + 1), make_lazy_volume(stack, run)
        stack.missing_chunks.update(counts.missing_chunks)
        scalings_or_requests = [
            _fit_scaling(volume, index, counts, runner) for index in range(counting_plan.num_channels)
        ]
        requests = [None if isinstance(item, IntensityScaling) else item for item in scalings_or_requests]
        if any(requests):
            return {"requests": requests}
        scalings = tuple(item for item in scalings_or_requests if isinstance(item, IntensityScaling))
        image, plan = _RegionImage(stack, volume, scalings), run.plan
        diameter_estimate = estimate_diameter(runner, volume, plan.options, image=image)
        intensities: IntensitySurvey | None = counts.get_intensity_survey()
        if diameter_estimate is not None and diameter_estimate.resampling_diameter not in {None, plan.diameter}:
            plan = plan.with_diameter(diameter_estimate.resampling_diameter, runner.spec)
            # The maxima were computed for the windows of a different grid.
            intensities = None
        plan_with_diameter = runner.estimator.plan(plan.options)._replace(diameter=plan.diameter)
        skip_result = skip_empty_windows(runner, image, volume, plan_with_diameter, intensities)
        notes = (
            *describe_replaced_pixels(int(counts.nonfinite_counts.sum())),
            *_describe_limited_pixels(counts, scalings),
            *(plan_with_diameter.diameter_notes if diameter_estimate is None else (diameter_estimate.note,)),
            *describe_resampling(volume, plan.layout.size, runner.spec, plan.diameter),
            *skip_result.notes,
            *stack.list_notes(plan.selection),
        )
    positions, scores = _list_skipped(skip_result.image)
    survey = Survey(scalings, notes, skip_result.skipped, scores, runner.describe_engine(), diameter_estimate)
    run.folder.write_survey(survey, positions)
    return {"requests": None}


def _describe_limited_pixels(counts: Counts, scalings: tuple[IntensityScaling, ...]) -> Iterator[str]:
    for minimum, maximum, scaling in zip(counts.minima, counts.maxima, scalings, strict=True):
        yield from describe_limited_pixels((float(minimum), float(maximum)), scaling)


def _list_skipped(image: Image) -> tuple[NDArray[np.int64], tuple[float, ...]]:
    """Return the first voxels of the skipped windows of an image, [N, 3], and their scores."""
    if not isinstance(image, SparseImage):
        return np.zeros((0, 3), np.int64), ()
    return np.array(sorted(image.skipped_positions), np.int64).reshape(-1, 3), tuple(image.scores.tolist())


def skip_empty_windows(
    runner: ModelRunner, image: NormalizedImage, volume: Volume, plan: Plan, survey: IntensitySurvey | None
) -> SkipResult:
    """Find the windows of a volume that `segment` would skip.

    survey  intensities in the windows at the plan's diameter; if None, they are read from the volume
    """
    resampled_image, _notes = resample_image(image, volume, runner.spec, plan.diameter)
    if plan.skip_below is None:
        return SkipResult(resampled_image, None)
    spec = apply_postprocessing(runner.spec, plan.postprocessing, volume, as_size(resampled_image.shape[2:]))
    with torch.inference_mode():
        window_filter = make_empty_window_filter(
            resampled_image, spec, plan, runner.make_window_scorer(plan, DEFAULT_CALLBACKS.probe)
        )
        return window_filter.skip(volume, plan.skip_below, survey)


def read_high_contrast_windows(run: OpenRun) -> list[Tensor]:
    """Return the highest-contrast windows of a surveyed volume, each [C, z, y, x], at the original resolution."""
    with stack_reader.open_blocks(run.plan.source, run.plan.selection) as stack:
        image = _RegionImage(stack, make_lazy_volume(stack, run), run.folder.survey.scalings)
        return select_high_contrast_windows(image, run.spec.input.roi_size)


def _fit_scaling(volume: Volume, index: int, counts: Counts, runner: ModelRunner) -> IntensityScaling | CountRequest:
    """Return the intensity scaling of a channel, or the request for the histograms that it depends on."""
    substitute = choose_substitute(float(counts.minima[index]), int(counts.nonfinite_counts[index]), volume.voxel_count)
    if substitute is not None:
        counts.add_substituted_pixels(index, substitute, volume.dtype)
    channel = CountedChannel(volume, index, substitute, counts=counts)
    try:
        scaling = fit_scaling(channel, runner.spec.input.get_normalization(index))
    except MissingCounts as error:
        return error.request
    return replace(scaling, substitute=substitute)


def make_lazy_volume(stack: ZarrStack, run: OpenRun) -> Volume:
    """Return a volume that is read one layer of chunks at a time. Large layers are stored in the folder of the run."""
    _, depth, height, width = stack.shape
    layer_reader = LayerReader(stack, run.folder.path)
    return Volume(
        (stack.shape[0], depth, height, width),
        stack.dtype,
        layer_reader.read,
        *stack.get_volume_metadata(run.plan.selection),
    )


class LayerReader:
    """Reads planes of an image. The decoded planes of the most recently read layer of chunks are cached."""

    def __init__(self, stack: ZarrStack, scratch_folder: Path) -> None:
        self._stack, self._allocate = stack, make_allocator(scratch_folder)
        self._depth = stack.chunk_size[0]
        self._cached_layer: tuple[int, Array] | None = None

    def read(self, first: int, end: int) -> Array:
        """Return the planes from `first` up to, but not including, `end`, [C, z, Y, X]."""
        channels, _, height, width = self._stack.shape
        planes: Array = np.empty((channels, end - first, height, width), self._stack.dtype)
        for layer_number in range(first // self._depth, -(-end // self._depth)):
            start, stop = max(first, layer_number * self._depth), min(end, (layer_number + 1) * self._depth)
            layer = self._get_layer(layer_number)
            planes[:, start - first : stop - first] = layer[
                :, start - layer_number * self._depth : stop - layer_number * self._depth
            ]
            release_pages(layer)
        return planes

    def _get_layer(self, layer_number: int) -> Array:
        if self._cached_layer is None or self._cached_layer[0] != layer_number:
            self._cached_layer = None
            self._cached_layer = layer_number, self._decode_layer(layer_number)
        return self._cached_layer[1]

    def _decode_layer(self, layer_number: int) -> Array:
        channels, depth, height, width = self._stack.shape
        first, end = layer_number * self._depth, min((layer_number + 1) * self._depth, depth)
        layer = self._allocate((channels, end - first, height, width), self._stack.dtype)

        def decode(corner: tuple[int, int]) -> None:
            rows, columns = (
                range(start, min(start + READ_EDGE_VOXELS, n)) for start, n in zip(corner, (height, width), strict=True)
            )
            pixels = self._stack.read_region((range(first, end), rows, columns))
            layer[:, :, rows.start : rows.stop, columns.start : columns.stop] = pixels

        positions = [(y, x) for y in range(0, height, READ_EDGE_VOXELS) for x in range(0, width, READ_EDGE_VOXELS)]
        run_in_threads(decode, positions, math.prod(layer.shape) * layer.dtype.itemsize)
        return layer
