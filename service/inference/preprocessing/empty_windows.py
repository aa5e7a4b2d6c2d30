"""Detection of empty windows, for which the network is not run.

A window is empty if its brightest voxel is no brighter than the background. All voxels in skipped windows get the
same scores: the network's scores for the brightest skipped windows, averaged over the voxels that the network
classifies as background. If the network finds an object in one of these windows, the limit for empty windows is too
high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.types import Array, Volume
from service.inference.decoding.decoders import make_decoder
from service.inference.preprocessing.normalize import VolumeChannel
from service.inference.preprocessing.percentiles import find_intensities, has_one_value, replace_missing
from service.inference.types import Plan, SkippedWindows
from service.inference.windows.blending import Blending, BlendingSetup
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.sliding_window import Image, ScoreWindows, SparseImage, WindowScan
from service.inference.windows.slots import WindowSlot
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

# Maximum distance of background voxels from their most frequent value, in standard deviations of the noise. In a window
# of about 10^5 voxels, the maximum of the noise is typically 4.5 standard deviations above the mean.
NOISE_SIGMAS = 5.0

# Maximum background level as a fraction of the range between these percentiles of the stack.
MAX_BACKGROUND_FRACTION = 0.1
INTENSITY_RANGE_PERCENTILES = (1.0, 99.8)

# Approximate number of voxels in the sample from which the background is estimated.
SAMPLE_VOXELS = 2**20

# Number of histogram bins between the lowest percentile and the median of the sample.
HISTOGRAM_BINS = 32


class IntensitySurvey(NamedTuple):
    """Intensities of a volume, collected in one pass over it.

    window_maxima  maximum of each window, float64 [C, z, y, x] in the order of the grid's starts; -inf if no voxel is
                   finite
    samples        finite sampled voxels of each channel, one-dimensional; empty if `skip_below` is a number
    """

    window_maxima: NDArray[np.float64]
    samples: tuple[NDArray[Any], ...]


class SkipResult(NamedTuple):
    """Result of skipping empty windows.

    image    the image to segment
    skipped  the skipped windows; None if skipping was disabled
    notes    information for the user
    """

    image: Image
    skipped: SkippedWindows | None
    notes: tuple[str, ...] = ()


class EmptyWindowFilter:
    """Filter that skips windows in which no voxel exceeds a gray value, and determines the scores of their voxels.

    image          normalized image, on the grid of the windows
    grid           grid of the windows
    batch_size     number of windows per call to the network
    score_windows  computes the scores of a few windows
    """

    def __init__(self, image: Image, grid: Grid, batch_size: int, spec: ModelSpec, score_windows: ScoreWindows) -> None:
        self._image, self._grid, self._batch_size, self._spec = image, grid, batch_size, spec
        self._score_windows = score_windows

    def skip(self, volume: Volume, limit: float | Literal["auto"], survey: IntensitySurvey | None = None) -> SkipResult:
        """Skip windows in which no voxel exceeds `limit`.

        volume  volume from which the image was created
        limit   gray value of the volume; "auto": the background level
        survey  result of `survey_intensities` for the volume; None: survey it now

        The image is returned unchanged if skipping would not save time.

        Propagates errors from `score_windows`.
        """
        if survey is None:
            survey = survey_intensities(volume, self._grid)
        limits = _choose_limits(survey, limit)
        if limits is None:
            skipped = SkippedWindows(0, self._grid.num_windows, ())
            return SkipResult(
                self._image, skipped, ("No window was skipped, because too few pixels have finite values.",)
            )
        excess = (survey.window_maxima - np.reshape(limits, (-1, 1, 1, 1))).max(0)
        indices = self._choose_windows(excess <= 0)
        skipped = SkippedWindows(0, self._grid.num_windows, limits)
        # Scoring the brightest windows costs one batch.
        if len(indices) <= self._batch_size:
            return SkipResult(self._image, skipped)
        order = np.argsort(-excess[tuple(indices.T)], kind="stable")[: self._batch_size]
        scores, has_foreground = average_background_scores(
            self._score_windows(self._read_windows(indices[order])), self._spec
        )
        if scores is None or (has_foreground and limit == "auto"):
            note = "No window was skipped, because the model also finds foreground in dark windows."
            return SkipResult(self._image, skipped, (note,))
        notes = ("The model finds foreground in skipped windows. Try a lower skip_below=.",) if has_foreground else ()
        image = SparseImage(self._image, frozenset(map(self._get_position, indices)), scores)
        return SkipResult(image, skipped._replace(windows=len(indices)), notes)

    def _choose_windows(self, is_empty: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the indices [N, 3] of the windows to skip, in order.

        In long sequences of empty rows, a window is processed at regular intervals, so that finished scores are passed
        on in portions.
        """
        max_skipped = self._grid.compute_max_skipped_rows(len(self._spec.outputs), self._batch_size)
        rows, skipped_rows = is_empty.reshape(-1, is_empty.shape[2]), 0
        for row in rows:
            skipped_rows = skipped_rows + 1 if row.all() else 0
            if skipped_rows > max_skipped:
                row[0], skipped_rows = False, 0
        if rows.all():
            rows[-1, -1] = False
        return np.argwhere(is_empty)

    def _get_position(self, index: NDArray[np.intp]) -> Size:
        return as_size([starts[int(axis_index)] for starts, axis_index in zip(self._grid.starts, index, strict=True)])

    def _read_windows(self, indices: NDArray[np.intp]) -> Tensor:
        """Read windows, float32 [N, C, *roi] on the host."""
        windows = torch.zeros((len(indices), self._spec.input.channels, *self._grid.window_size))
        scan = WindowScan(self._image, self._grid, BlendingSetup(Blending(), windows.device))
        for window, index in zip(windows, indices, strict=True):
            scan.fill_slot(WindowSlot(window), self._get_position(index))
        return windows


def _choose_limits(survey: IntensitySurvey, limit: float | Literal["auto"]) -> tuple[float, ...] | None:
    """Return the gray value up to which windows are empty, per channel; None if a channel has no finite sample."""
    if limit != "auto":
        return (limit,) * len(survey.window_maxima)
    if not all(sample.size for sample in survey.samples):
        return None
    return tuple(map(estimate_background, survey.samples))


def make_empty_window_filter(
    image: Image, spec: ModelSpec, plan: Plan, score_windows: ScoreWindows
) -> EmptyWindowFilter:
    """Return the filter for the windows of a request. `spec` includes the post-processing options of the request."""
    grid = Grid.cover(as_size(image.shape[2:]), spec.input.roi_size, plan.overlap, spec.tiling)
    return EmptyWindowFilter(image, grid, plan.sw_batch_size, spec, score_windows)


def survey_intensities(volume: Volume, grid: Grid) -> IntensitySurvey:
    """Survey the intensities of a volume in one pass. The grid of the windows may differ in size from the volume.

    If the volume is resampled, a window includes all voxels of the volume from which its voxels are interpolated.
    """
    spans = [_find_spans(grid, axis, length) for axis, length in enumerate(volume.shape[1:])]
    all_maxima = np.full((volume.shape[0], *map(len, spans)), -np.inf)
    step = compute_sample_step(volume.voxel_count)
    samples = []
    for index, window_maxima in enumerate(all_maxima):
        sample, z = list[NDArray[Any]](), 0
        for block in VolumeChannel(volume, index):
            sampled_pixels = block[:, ::step, ::step].ravel()
            sample.append(sampled_pixels[find_intensities(sampled_pixels)])
            _update_window_maxima(window_maxima, block, z, spans)
            z += len(block)
        samples.append(np.concatenate(sample))
    return IntensitySurvey(all_maxima, tuple(samples))


def compute_sample_step(num_voxels: int) -> int:
    """Return the step along y and x between the sampled voxels of a volume of this size."""
    return max(math.isqrt(num_voxels // SAMPLE_VOXELS), 1)


def survey_box(
    pixels: Array, box: Sequence[tuple[int, int]], grid: Grid, shape: Sequence[int]
) -> tuple[Size, NDArray[np.float64]]:
    """Return the first window that overlaps `box`, and the maxima, within the box, of all windows that overlap it.

    pixels  [C, z, y, x] of the box
    box     first and end voxel along each axis
    shape   (z, y, x) of the volume

    Windows are indexed along each axis, as in `survey_intensities`.
    """
    first_windows, windows_in_box = list[int](), list[list[slice]]()
    for axis, ((low, high), length) in enumerate(zip(box, shape, strict=True)):
        spans = _find_spans(grid, axis, length)
        overlapping_windows = [index for index, span in enumerate(spans) if span.start < high and span.stop > low]
        first_windows.append(overlapping_windows[0] if overlapping_windows else 0)
        windows_in_box.append(
            [
                slice(max(spans[index].start - low, 0), min(spans[index].stop, high) - low)
                for index in overlapping_windows
            ]
        )
    all_maxima = np.full((len(pixels), *map(len, windows_in_box)), -np.inf)
    if all_maxima.size:
        for window_maxima, block in zip(all_maxima, pixels, strict=True):
            _update_window_maxima(window_maxima, block, 0, windows_in_box)
    return as_size(first_windows), all_maxima


def _update_window_maxima(
    window_maxima: NDArray[np.float64], block: NDArray[Any], z: int, spans: Sequence[Sequence[slice]]
) -> None:
    """Update the maxima of the windows, `window_maxima` [z, y, x], with a block of planes that begins at `z`."""
    planes, rows, columns = spans
    block = replace_missing(block, -math.inf if block.dtype.kind == "f" else None)
    if has_one_value(block):
        plane_maxima = np.broadcast_to(block[:, :1, :1], (len(block), len(rows), len(columns)))
    else:
        plane_maxima = np.stack([block[:, :, span].max(2) for span in columns], 2)
        plane_maxima = np.stack([plane_maxima[:, span].max(1) for span in rows], 1)
    for window_maximum, span in zip(window_maxima, planes, strict=True):
        maxima_in_window = plane_maxima[max(span.start - z, 0) : max(span.stop - z, 0)]
        if len(maxima_in_window):
            np.maximum(window_maximum, maxima_in_window.max(0), out=window_maximum)


def _find_spans(grid: Grid, axis: int, length: int) -> list[slice]:
    """Return, for each window along an axis, the range of its voxels in a volume of this length."""
    grid_length, pad_before, window_length = grid.size[axis], grid.pad_before[axis], grid.window_size[axis]
    factor, spans = length / grid_length, list[slice]()
    for start in grid.starts[axis]:
        first, last = max(start - pad_before, 0), min(start - pad_before + window_length, grid_length) - 1
        low, high = ((voxel + 0.5) * factor - 0.5 for voxel in (first, last))
        spans.append(slice(max(math.floor(low), 0), min(math.floor(high) + (length != grid_length), length - 1) + 1))
    return spans


def estimate_background(sample: NDArray[Any]) -> float:
    """Estimate the gray value up to which voxels are background, from a sample of the voxels.

    The mode of the sample is the typical background, and the spread of the values below it is the noise. The result
    is the mode plus `NOISE_SIGMAS` times the noise, but at most the low end of the intensity range plus
    `MAX_BACKGROUND_FRACTION` of its width.
    """
    low, median, high = (
        float(value)
        for value in np.percentile(sample, (INTENSITY_RANGE_PERCENTILES[0], 50.0, INTENSITY_RANGE_PERCENTILES[1]))
    )
    step = (median - low) / HISTOGRAM_BINS
    if sample.dtype.kind != "f":
        step = max(round(step), 1)
    values: NDArray[np.float64] = sample.astype(np.float64)
    if step > 0:
        bins, counts = np.unique(np.floor(values / step), return_counts=True)
        mode = float((bins[np.argmax(counts)] + (0.5 if sample.dtype.kind == "f" else 0)) * step)
    else:
        mode = low
    darker_values = values[values <= mode]
    spread = math.sqrt(float(np.mean(np.square(darker_values - mode)))) if len(darker_values) else 0.0
    return min(mode + NOISE_SIGMAS * spread, low + MAX_BACKGROUND_FRACTION * (high - low))


def average_background_scores(scores: Tensor, spec: ModelSpec) -> tuple[Tensor | None, bool]:
    """Return the mean scores [K] of background voxels in windows, and whether objects were found.

    scores  scores of the windows, [N, K, *roi]

    The mean is None if there is no background voxel. Foreground smaller than the minimum object size does not count.
    """
    min_voxels = max(spec.decoding.minimum_size, 1) if isinstance(spec.decoding, Instances) else 1
    sums, num_background, has_objects = (
        torch.zeros(scores.shape[1], dtype=torch.float64, device=scores.device),
        0,
        False,
    )
    for window in scores:
        decoder = make_decoder(spec, as_size(scores.shape[2:]), "classes", None)
        decoder.add(0, 0, window[None])
        is_background = torch.from_numpy(decoder.finish().pixels == 0).to(scores.device)
        num_background_in_window = int(is_background.sum())
        sums += window[:, is_background].sum(1, dtype=torch.float64)
        num_background += num_background_in_window
        has_objects = has_objects or is_background.numel() - num_background_in_window >= min_voxels
    return (sums / num_background).float() if num_background else None, has_objects
