"""First pass over a volume: intensities that all of it decides on, and windows without anything in them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from service.core.buffers import make_allocator, release_pages
from service.core.errors import BadParameter
from service.core.volume import Array, Volume
from service.formats import stack_reader
from service.formats.pixels import run_in_threads
from service.formats.zarr_reader import ZarrStack
from service.inference.blockwise.run_folder import OpenRun, Survey
from service.inference.normalize import normalise_volume
from service.inference.segmenter import Segmenter
from service.inference.windows.sliding_window import SparseImage

# Edge of the boxes of planes that are read at a time, so that chunks are decoded once.
READ_EDGE = 512


def survey_volume(run: OpenRun, segmenter: Segmenter) -> Survey:
    """Survey the volume of a run, and write what was found into its folder.

    Raises BadParameter where objects have another width than the model wants, and what reading raises.
    """
    plan = run.plan
    with stack_reader.open_blocks(plan.source, plan.selection) as stack:
        volume = lazy_volume(stack, run)
        done = segmenter.estimator.plan(plan.options)
        image, notes = normalise_volume(volume, segmenter.spec)
        if done.estimated:
            notes = (*notes, check_width(segmenter, volume, run))
        skipping = segmenter.skip_empty_windows(image, volume, done)
    places, scores = np.zeros((0, 3), np.int64), tuple[float, ...]()
    if isinstance(skipping.image, SparseImage):
        places = np.array(sorted(skipping.image.skipped), np.int64).reshape(-1, 3)
        scores = tuple(skipping.image.scores.tolist())
    survey = Survey(
        image.scalings, (*volume.notes, *notes, *skipping.notes), skipping.skipped, scores, segmenter.engine
    )
    run.folder.write_survey(survey, places)
    return survey


def check_width(segmenter: Segmenter, volume: Volume, run: OpenRun) -> str:
    """Return what to tell of the width of the objects. Raises BadParameter where the volume would be resampled."""
    sizing = segmenter.estimate_diameter(volume, run.plan.options)
    assert sizing is not None  # noqa: S101 - it is asked for where an estimate is wanted
    if sizing.diameter is None or sizing.fits:
        return sizing.note
    raise BadParameter(
        f"Objects seem to be {sizing.diameter} wide, {segmenter.spec.name} wants {segmenter.spec.input.diameter:g}"
        " voxels, and a volume is not resampled block by block. Write it at another resolution, or take it as it is"
        " with diameter=none."
    )


def lazy_volume(stack: ZarrStack, run: OpenRun) -> Volume:
    """Return a volume that is read a layer of chunks at a time, into the run's folder where that is large."""
    _, depth, height, width = stack.shape
    layer = LayerReader(stack, run.folder.path)
    return Volume((stack.shape[0], depth, height, width), stack.dtype, layer.read, *stack.facts(run.plan.selection))


class LayerReader:
    """Planes of an image, of which those in the latest layer of chunks are kept decoded."""

    def __init__(self, stack: ZarrStack, scratch: Path) -> None:
        self._stack, self._allocate = stack, make_allocator(scratch)
        self._depth = stack.chunk_depth
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
