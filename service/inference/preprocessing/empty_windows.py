"""Empty windows, which are found by their brightest voxel and skipped by the network.

The scores of skipped windows are computed from the brightest of them: the network's scores, averaged over the voxels
that it classifies as background. Voxels in skipped windows therefore get scores of the network, not invented ones. If
the network finds an object in such a window, the limit for empty windows is too high.
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
from service.inference.preprocessing.normalize import VolumeChannel, replace_nonfinite
from service.inference.preprocessing.percentiles import has_one_value
from service.inference.types import Plan, SkippedWindows
from service.inference.windows.blending import Blending, BlendingSetup
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.sliding_window import Image, ScoreWindows, SparseImage, WindowScan, WindowSlot
from service.models.spec import Instances, ModelSpec

# Limit of the background above its most frequent value, in standard deviations of the noise. The maximum of a window of
# noise, the largest of about 10^5 normally distributed numbers, is at 4.5.
NOISE_SIGMAS = 5.0

# Limit of the background as a fraction of the range between these percentiles of the stack.
MAX_BACKGROUND_FRACTION = 0.1
INTENSITY_RANGE_PERCENTILES = (1.0, 99.8)

# Number of voxels in the sample that the background is estimated from.
SAMPLE_VOXELS = 2**20

# Number of histogram bins between the lowest percentile and the median of the sample.
HISTOGRAM_BINS = 32


class IntensitySurvey(NamedTuple):
    """Intensities of a volume, collected in one pass over it.

    brightest  maximum of each window, float64 [C, z, y, x] in the order of the grid's starts; -inf if no voxel is
               finite
    samples    finite voxels of each channel, one-dimensional; empty if `skip_below` is a number
    """

    brightest: NDArray[np.float64]
    samples: tuple[NDArray[Any], ...]


class SkipResult(NamedTuple):
    """Result of skipping empty windows.

    image    the image to segment instead
    skipped  the skipped windows; None if skipping was disabled
    notes    information for the user
    """

    image: Image
    skipped: SkippedWindows | None
    notes: tuple[str, ...] = ()


class EmptyWindowFilter:
    """Finder of windows in which no voxel exceeds a gray value, and of the scores that replace theirs.

    image          normalized, on the grid of the windows
    grid           of the windows
    batch_size     number of windows per call of the network
    score_windows  computes the scores of a few windows
    """

    def __init__(self, image: Image, grid: Grid, batch_size: int, spec: ModelSpec, score_windows: ScoreWindows) -> None:
        self._image, self._grid, self._batch_size, self._spec = image, grid, batch_size, spec
        self._score_windows = score_windows

    def skip(self, volume: Volume, below: float | Literal["auto"], survey: IntensitySurvey | None = None) -> SkipResult:
        """Skip windows whose voxels are at most `below`, a gray value of the volume; auto: use `estimate_background`.

        The image was made from `volume`, and `survey` is the result of `survey_intensities` for it; None: survey it
        now. The image is returned unchanged if skipping would save nothing. Raises the errors of `score_windows`.
        """
        if survey is None:
            survey = survey_intensities(volume, self._grid)
        limits = _choose_limits(survey, below)
        if limits is None:
            skipped = SkippedWindows(0, self._grid.count, ())
            return SkipResult(
                self._image, skipped, ("No window was skipped, because too few pixels have finite values.",)
            )
        excess = (survey.brightest - np.reshape(limits, (-1, 1, 1, 1))).max(0)
        indices = self._choose_windows(excess <= 0)
        skipped = SkippedWindows(0, self._grid.count, limits)
        # Scoring the brightest windows costs one batch.
        if len(indices) <= self._batch_size:
            return SkipResult(self._image, skipped)
        order = np.argsort(-excess[tuple(indices.T)], kind="stable")[: self._batch_size]
        scores, found = mean_background_scores(self._score_windows(self._read_windows(indices[order])), self._spec)
        if scores is None or (found and below == "auto"):
            note = "No window was skipped, because the model finds foreground in dark windows too."
            return SkipResult(self._image, skipped, (note,))
        notes = ("The model finds foreground in skipped windows. Try a lower skip_below=.",) if found else ()
        image = SparseImage(self._image, frozenset(map(self._position, indices)), scores)
        return SkipResult(image, skipped._replace(windows=len(indices)), notes)

    def _choose_windows(self, is_empty: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the indices [N, 3] of the windows to skip, in order.

        At regular intervals an empty window is computed, so that finished scores leave in portions.
        """
        max_skipped = self._grid.max_skipped_rows(len(self._spec.outputs), self._batch_size)
        rows, skipped_rows = is_empty.reshape(-1, is_empty.shape[2]), 0
        for row in rows:
            skipped_rows = skipped_rows + 1 if row.all() else 0
            if skipped_rows > max_skipped:
                row[0], skipped_rows = False, 0
        if rows.all():
            rows[-1, -1] = False
        return np.argwhere(is_empty)

    def _position(self, index: NDArray[np.intp]) -> Size:
        return as_size([starts[int(at)] for starts, at in zip(self._grid.starts, index, strict=True)])

    def _read_windows(self, indices: NDArray[np.intp]) -> Tensor:
        """Read some windows, float32 [N, C, *roi] on the host."""
        windows = torch.zeros((len(indices), self._spec.input.channels, *self._grid.roi))
        scan = WindowScan(self._image, self._grid, BlendingSetup(Blending(), windows.device))
        for window, index in zip(windows, indices, strict=True):
            scan.fill_slot(WindowSlot(window), self._position(index))
        return windows


def _choose_limits(survey: IntensitySurvey, below: float | Literal["auto"]) -> tuple[float, ...] | None:
    """Return the gray value of each channel up to which windows are empty; None if a channel has no finite sample."""
    if below != "auto":
        return (below,) * len(survey.brightest)
    if not all(sample.size for sample in survey.samples):
        return None
    return tuple(map(estimate_background, survey.samples))


def make_filter(image: Image, spec: ModelSpec, plan: Plan, score_windows: ScoreWindows) -> EmptyWindowFilter:
    """Return the filter for the windows of a request. `spec` includes the post-processing options of the request."""
    grid = Grid.cover(as_size(image.shape[2:]), spec.input.roi_size, plan.overlap)
    return EmptyWindowFilter(image, grid, plan.sw_batch_size, spec, score_windows)


def survey_intensities(volume: Volume, grid: Grid) -> IntensitySurvey:
    """Survey a volume in one pass. The grid of the windows may have another size than the volume.

    If the volume is resampled, a window includes all voxels that its own voxels are interpolated from.
    """
    spans = [_spans(grid, axis, length) for axis, length in enumerate(volume.shape[1:])]
    brightest = np.full((volume.shape[0], *map(len, spans)), -np.inf)
    step = sample_step(volume.voxels)
    samples = []
    for index, cells in enumerate(brightest):
        sample, z = list[NDArray[Any]](), 0
        for block in VolumeChannel(volume, index):
            part = block[:, ::step, ::step].ravel()
            sample.append(part[np.isfinite(part)])
            _update_brightest(cells, block, z, spans)
            z += len(block)
        samples.append(np.concatenate(sample))
    return IntensitySurvey(brightest, tuple(samples))


def sample_step(voxels: int) -> int:
    """Return the step along y and x between the sampled voxels of a volume."""
    return max(math.isqrt(voxels // SAMPLE_VOXELS), 1)


def survey_box(
    pixels: Array, box: Sequence[tuple[int, int]], grid: Grid, shape: Sequence[int]
) -> tuple[Size, NDArray[np.float64]]:
    """Return the first window that overlaps `box`, and the maxima within the box of all windows that overlap it.

    pixels  [C, z, y, x] of the box
    box     first and end along each axis
    shape   (z, y, x) of the volume

    Windows are indexed along each axis, as in `survey_intensities`.
    """
    firsts, inside = list[int](), list[list[slice]]()
    for axis, ((low, high), length) in enumerate(zip(box, shape, strict=True)):
        spans = _spans(grid, axis, length)
        overlapping = [number for number, span in enumerate(spans) if span.start < high and span.stop > low]
        firsts.append(overlapping[0] if overlapping else 0)
        inside.append([slice(max(spans[at].start - low, 0), min(spans[at].stop, high) - low) for at in overlapping])
    brightest = np.full((len(pixels), *map(len, inside)), -np.inf)
    if brightest.size:
        for cells, block in zip(brightest, pixels, strict=True):
            _update_brightest(cells, block, 0, inside)
    return as_size(firsts), brightest


def _update_brightest(
    cells: NDArray[np.float64], block: NDArray[Any], z: int, spans: Sequence[Sequence[slice]]
) -> None:
    """Update the maxima of the windows, `cells` [z, y, x], with a block of planes that begins at `z`."""
    planes, rows, columns = spans
    block = replace_nonfinite(block, -math.inf if block.dtype.kind == "f" else None)
    if has_one_value(block):
        maxima = np.broadcast_to(block[:, :1, :1], (len(block), len(rows), len(columns)))
    else:
        maxima = np.stack([block[:, :, span].max(2) for span in columns], 2)
        maxima = np.stack([maxima[:, span].max(1) for span in rows], 1)
    for cell, span in zip(cells, planes, strict=True):
        window_part = maxima[max(span.start - z, 0) : max(span.stop - z, 0)]
        if len(window_part):
            np.maximum(cell, window_part.max(0), out=cell)


def _spans(grid: Grid, axis: int, length: int) -> list[slice]:
    """Return for each window along an axis its voxels in a volume of this length."""
    scaled, before, edge = grid.size[axis], grid.pad_before[axis], grid.roi[axis]
    factor, spans = length / scaled, list[slice]()
    for start in grid.starts[axis]:
        first, last = max(start - before, 0), min(start - before + edge, scaled) - 1
        low, high = ((voxel + 0.5) * factor - 0.5 for voxel in (first, last))
        spans.append(slice(max(math.floor(low), 0), min(math.floor(high) + (length != scaled), length - 1) + 1))
    return spans


def estimate_background(sample: NDArray[Any]) -> float:
    """Estimate the gray value up to which voxels are background, from a sample.

    The mode of the sample is the typical background, and the spread of the values below it is the noise. The limit is
    `NOISE_SIGMAS` times the noise above the mode, but at most `MAX_BACKGROUND_FRACTION` of the intensity range.
    """
    low, middle, high = (
        float(value)
        for value in np.percentile(sample, (INTENSITY_RANGE_PERCENTILES[0], 50.0, INTENSITY_RANGE_PERCENTILES[1]))
    )
    step = (middle - low) / HISTOGRAM_BINS
    if sample.dtype.kind != "f":
        step = max(round(step), 1)
    values: NDArray[np.float64] = sample.astype(np.float64)
    if step > 0:
        bins, counts = np.unique(np.floor(values / step), return_counts=True)
        mode = float((bins[np.argmax(counts)] + (0.5 if sample.dtype.kind == "f" else 0)) * step)
    else:
        mode = low
    darker = values[values <= mode]
    spread = math.sqrt(float(np.mean(np.square(darker - mode)))) if len(darker) else 0.0
    return min(mode + NOISE_SIGMAS * spread, low + MAX_BACKGROUND_FRACTION * (high - low))


def mean_background_scores(scores: Tensor, spec: ModelSpec) -> tuple[Tensor | None, bool]:
    """Return the mean scores [K] of background voxels in windows, and whether objects were found.

    scores  of the windows, [N, K, *roi]

    The mean is None if there is no background voxel. Foreground smaller than the minimum object size is not an object.
    """
    min_voxels = max(spec.decoding.minimum_size, 1) if isinstance(spec.decoding, Instances) else 1
    sums, voxels, found = torch.zeros(scores.shape[1], dtype=torch.float64, device=scores.device), 0, False
    for window in scores:
        decoder = make_decoder(spec, as_size(scores.shape[2:]), "classes", None)
        decoder.add(0, 0, window[None])
        background = torch.from_numpy(decoder.finish().pixels == 0).to(scores.device)
        background_voxels = int(background.sum())
        sums += window[:, background].sum(1, dtype=torch.float64)
        voxels += background_voxels
        found = found or background.numel() - background_voxels >= min_voxels
    return (sums / voxels).float() if voxels else None, found
