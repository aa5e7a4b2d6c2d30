"""Windows in which there is nothing: found by their brightest voxel, and answered without running the network.

What stands for their scores is what the network itself gives to the brightest of them, averaged over the voxels that it
takes for background. So a voxel in a skipped window has an answer that the network gave, and not one that was made up;
and where the network finds something in such a window, the threshold lies too high for it.
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
from service.inference.types import Plan, Skipped
from service.inference.windows.blending import Blending, BlendingSetup
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.sliding_window import Image, ScoreWindows, SparseImage, WindowScan, WindowSlot
from service.models.spec import Instances, ModelSpec

# `auto`: so many times the spread of darker voxels above the background; the brightest voxel of a window of noise, the
# largest of some 10^5 normal numbers, lies 4.5 times above it.
NOISE = 5.0

# `auto`: no more than this share of what the stack holds between its 1st and its 99.8th percentile.
DIMMEST = 0.1
USUAL_RANGE = (1.0, 99.8)

# Voxels by which a stack's background is told, and grey values between its 1st percentile and its median.
SAMPLE, STEPS = 2**20, 32


class IntensitySurvey(NamedTuple):
    """Intensities of a volume, from one pass over it.

    brightest  voxel of each window, float64 [C, z, y, x] in the order of the grid's starts; -inf where none is finite
    samples    finite voxels of each channel, one-dimensional; none where `skip_below` is stated
    """

    brightest: NDArray[np.float64]
    samples: tuple[NDArray[Any], ...]


class Skipping(NamedTuple):
    """The image to run instead, the windows of it that are skipped, and notes for the user.

    skipped  None where every window was to be computed
    """

    image: Image
    skipped: Skipped | None
    notes: tuple[str, ...] = ()


class EmptyWindowFilter:
    """Finds windows of an image in which no voxel exceeds a grey value, and the scores that stand for theirs.

    image       normalised, on the grid that the windows lie on
    grid        where they lie
    batch_size  windows per call of the network
    score_windows  computes the scores of a few windows
    """

    def __init__(self, image: Image, grid: Grid, batch_size: int, spec: ModelSpec, score_windows: ScoreWindows) -> None:
        self._image, self._grid, self._batch_size, self._spec = image, grid, batch_size, spec
        self._score_windows = score_windows

    def skip(self, volume: Volume, below: float | Literal["auto"], survey: IntensitySurvey | None = None) -> Skipping:
        """Skip windows of voxels up to `below`, in grey values of the volume; auto: `estimate_background`.

        `volume` is that from which the image was made, `survey` what `survey_intensities` finds in it. Where nothing
        would be saved, the image comes back as it is. Raises what `score_windows` raises.
        """
        if survey is None:
            survey = survey_intensities(volume, self._grid)
        limits = _choose_limits(survey, below)
        if limits is None:
            none = Skipped(0, self._grid.count, ())
            return Skipping(self._image, none, ("No window was skipped: hardly a voxel has a finite value.",))
        above = (survey.brightest - np.reshape(limits, (-1, 1, 1, 1))).max(0)
        chosen = self._choose_windows(above <= 0)
        none = Skipped(0, self._grid.count, limits)
        # The network is asked for one batch of them.
        if len(chosen) <= self._batch_size:
            return Skipping(self._image, none)
        order = np.argsort(-above[tuple(chosen.T)], kind="stable")[: self._batch_size]
        scores, found = usual_scores(self._score_windows(self._cut(chosen[order])), self._spec)
        if scores is None or (found and below == "auto"):
            note = "No window was skipped: the network finds something in dark ones too."
            return Skipping(self._image, none, (note,))
        notes = ("The network finds something in windows that skip_below leaves out; lower it.",) if found else ()
        image = SparseImage(self._image, frozenset(map(self._place, chosen)), scores)
        return Skipping(image, none._replace(windows=len(chosen)), notes)

    def _choose_windows(self, empty: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Choose the empty windows to skip: indices [N, 3] along each axis, in order.

        Now and then one is computed all the same, so that finished scores leave in portions.
        """
        most = self._grid.max_skipped_rows(len(self._spec.outputs), self._batch_size)
        rows, since = empty.reshape(-1, empty.shape[2]), 0
        for row in rows:
            since = since + 1 if row.all() else 0
            if since > most:
                row[0], since = False, 0
        if rows.all():
            rows[-1, -1] = False
        return np.argwhere(empty)

    def _place(self, index: NDArray[np.intp]) -> Size:
        return as_size([starts[int(at)] for starts, at in zip(self._grid.starts, index, strict=True)])

    def _cut(self, indices: NDArray[np.intp]) -> Tensor:
        """Cut some windows, float32 [N, C, *roi] on the host."""
        windows = torch.zeros((len(indices), self._spec.input.channels, *self._grid.roi))
        scan = WindowScan(self._image, self._grid, BlendingSetup(Blending(), windows.device))
        for window, index in zip(windows, indices, strict=True):
            scan.fill_slot(WindowSlot(window), self._place(index))
        return windows


def _choose_limits(survey: IntensitySurvey, below: float | Literal["auto"]) -> tuple[float, ...] | None:
    """Return the grey value of each channel up to which windows are empty; None where no voxels tell it."""
    if below != "auto":
        return (below,) * len(survey.brightest)
    if not all(sample.size for sample in survey.samples):
        return None
    return tuple(map(estimate_background, survey.samples))


def make_filter(image: Image, spec: ModelSpec, plan: Plan, score_windows: ScoreWindows) -> EmptyWindowFilter:
    """Return the filter for the windows of a request; `spec` as it decodes the request."""
    grid = Grid.cover(as_size(image.shape[2:]), spec.input.roi_size, plan.overlap)
    return EmptyWindowFilter(image, grid, plan.sw_batch_size, spec, score_windows)


def survey_intensities(volume: Volume, grid: Grid) -> IntensitySurvey:
    """Survey a volume in one pass, whose windows lie as `grid` says on a grid of any size.

    Of a resampled volume a window has all voxels that one of its own was interpolated from.
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
            _raise(cells, block, z, spans)
            z += len(block)
        samples.append(np.concatenate(sample))
    return IntensitySurvey(brightest, tuple(samples))


def sample_step(voxels: int) -> int:
    """Return of how many voxels along y and x one is in the sample of a volume."""
    return max(math.isqrt(voxels // SAMPLE), 1)


def survey_box(
    pixels: Array, box: Sequence[tuple[int, int]], grid: Grid, shape: Sequence[int]
) -> tuple[Size, NDArray[np.float64]]:
    """Return the brightest voxel in `box` of each window that has one there, and the first of these windows.

    pixels  [C, z, y, x] of that box, first and end along each axis, in a volume of a shape (z, y, x)
    Both are as of `survey_intensities`: the windows by their numbers along each axis.
    """
    firsts, inside = list[int](), list[list[slice]]()
    for axis, ((low, high), length) in enumerate(zip(box, shape, strict=True)):
        spans = _spans(grid, axis, length)
        touched = [number for number, span in enumerate(spans) if span.start < high and span.stop > low]
        firsts.append(touched[0] if touched else 0)
        inside.append([slice(max(spans[at].start - low, 0), min(spans[at].stop, high) - low) for at in touched])
    brightest = np.full((len(pixels), *map(len, inside)), -np.inf)
    if brightest.size:
        for cells, block in zip(brightest, pixels, strict=True):
            _raise(cells, block, 0, inside)
    return as_size(firsts), brightest


def _raise(cells: NDArray[np.float64], block: NDArray[Any], z: int, spans: Sequence[Sequence[slice]]) -> None:
    """Let `cells`, [z, y, x] windows, be at least as bright as their part of a block of planes from `z` on."""
    planes, rows, columns = spans
    block = replace_nonfinite(block, -math.inf if block.dtype.kind == "f" else None)
    if has_one_value(block):
        narrow = np.broadcast_to(block[:, :1, :1], (len(block), len(rows), len(columns)))
    else:
        narrow = np.stack([block[:, :, span].max(2) for span in columns], 2)
        narrow = np.stack([narrow[:, span].max(1) for span in rows], 1)
    for cell, span in zip(cells, planes, strict=True):
        here = narrow[max(span.start - z, 0) : max(span.stop - z, 0)]
        if len(here):
            np.maximum(cell, here.max(0), out=cell)


def _spans(grid: Grid, axis: int, length: int) -> list[slice]:
    """Return for each window along an axis the voxels of a volume with `length` of them there."""
    scaled, before, edge = grid.size[axis], grid.pad_before[axis], grid.roi[axis]
    factor, spans = length / scaled, list[slice]()
    for start in grid.starts[axis]:
        first, last = max(start - before, 0), min(start - before + edge, scaled) - 1
        low, high = ((place + 0.5) * factor - 0.5 for place in (first, last))
        spans.append(slice(max(math.floor(low), 0), min(math.floor(high) + (length != scaled), length - 1) + 1))
    return spans


def estimate_background(sample: NDArray[Any]) -> float:
    """Estimate the grey value up to which voxels hold nothing, from some of them.

    The most frequent value is taken for that of the background, and the spread of the values below it for its noise:
    `NOISE` times that above it, but within `DIMMEST` of the range that the stack makes use of.
    """
    low, middle, high = (float(value) for value in np.percentile(sample, (USUAL_RANGE[0], 50.0, USUAL_RANGE[1])))
    step = (middle - low) / STEPS
    if sample.dtype.kind != "f":
        step = max(round(step), 1)
    values: NDArray[np.float64] = sample.astype(np.float64)
    if step > 0:
        bins, counts = np.unique(np.floor(values / step), return_counts=True)
        usual = float((bins[np.argmax(counts)] + (0.5 if sample.dtype.kind == "f" else 0)) * step)
    else:
        usual = low
    darker = values[values <= usual]
    spread = math.sqrt(float(np.mean(np.square(darker - usual)))) if len(darker) else 0.0
    return min(usual + NOISE * spread, low + DIMMEST * (high - low))


def usual_scores(scores: Tensor, spec: ModelSpec) -> tuple[Tensor | None, bool]:
    """Return the mean scores [K] of the voxels that are background to the model in windows of scores [N, K, *roi].

    None where there is no such voxel; and whether there is anything else, as large as an object at least.
    """
    least = max(spec.decoding.minimum_size, 1) if isinstance(spec.decoding, Instances) else 1
    sums, voxels, found = torch.zeros(scores.shape[1], dtype=torch.float64, device=scores.device), 0, False
    for window in scores:
        decoder = make_decoder(spec, as_size(scores.shape[2:]), "classes", None)
        decoder.add(0, 0, window[None])
        outside = torch.from_numpy(decoder.finish().pixels == 0).to(scores.device)
        here = int(outside.sum())
        sums += window[:, outside].sum(1, dtype=torch.float64)
        voxels += here
        found = found or outside.numel() - here >= least
    return (sums / voxels).float() if voxels else None, found
