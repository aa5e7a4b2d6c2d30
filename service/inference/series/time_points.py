"""Segmentation of a series of time points, one after the other, into one result with a time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from service.core.buffers import allocate_on_disk, release_pages
from service.core.errors import (
    Cancelled,
    NonFiniteScores,
    OutOfMemory,
    OutOfStorage,
    ReaderKilled,
    RequestError,
    StackSegError,
)
from service.core.quantities import VoxelSize, parse_diameter
from service.core.telemetry import Stages
from service.core.types import Array, Linking, Options, Volume, label_dtype
from service.inference.measurements import measure
from service.inference.series.diameter import choose_diameter, sample
from service.inference.series.laptrack_linking import link_by_distance
from service.inference.series.overlap_linking import Tracks, link_by_overlap
from service.inference.types import DiameterEstimate, QualityWarning, Result, Series, SeriesInfo, SkippedWindows, Table

# Number of time points whose object diameter is estimated for the whole series.
SAMPLED_POINTS = 3
# Maximum number of notes in the result of a series.
MAX_NOTES = 20
# Maximum number of time points that are listed in a note.
MAX_TIMES = 8
# Errors of a single time point. They end the series, but the earlier time points are kept.
_POINT_ERRORS = (RequestError, OutOfMemory, OutOfStorage, ReaderKilled, NonFiniteScores)

Progress = Callable[[int, int], None]


class PointSegmenter(NamedTuple):
    """Functions for one time point.

    segment            segments it; the third argument is called with the number of finished windows and their total
    estimate_diameter  estimates the object diameter; None if the diameter is specified
    """

    segment: Callable[[Volume, Options, Progress], Result]
    estimate_diameter: Callable[[Volume, Options], DiameterEstimate | None] | None


def segment_series(  # noqa: PLR0913
    series: Series,
    options: Options,
    segmenter: PointSegmenter,
    folder: Path | None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    on_time_point: Callable[[int], None] = lambda _number: None,
    progress: Progress = lambda _done, _total: None,
) -> Result:
    """Segment the time points of a series one after the other. Each gets the labels that it would have on its own.

    The object diameter is estimated once, from some of the time points. The pixels of the result are in an unnamed file
    in `folder`. An error at the first time point is raised. An error at a later one ends the series: the result has the
    time points before it, and `SeriesInfo` has the error.

    on_time_point  called with the number of each time point in the series, from 0
    progress       called with the number of finished windows, and the total of the whole series

    Raises the exceptions of `segmenter` and `series.read`, and Cancelled.
    """
    points = _Points(series, folder)
    options, estimated, note = _choose_diameter(series, options, segmenter, points.stages, cancelled)
    fault: StackSegError | None = None
    for number, time in enumerate(series.times):
        _raise_if_cancelled(cancelled)
        on_time_point(number)
        try:
            with points.stages.measure("read"):
                volume, measured = series.read(time)
            result = segmenter.segment(volume, options, partial(_report_progress, progress, number, len(series.times)))
            points.add(result, measured)
        except _POINT_ERRORS as error:
            _raise_if_cancelled(cancelled)
            error.args = (f"Time point {time}: {error}",)
            if number == 0:
                raise
            note = f"{note} The result ends before the failed time point. {error}".strip()
            error.args = (f"{error} To use the time points before it, set time={series.times[0]}:{time}.",)
            fault = error
            break
    result, table = points.finish()
    return result._replace(
        notes=tuple(filter(None, (note, *points.list_notes()))),
        is_diameter_estimated=estimated,
        series=SeriesInfo(points.done, len(series.times), table, fault),
    )


def _raise_if_cancelled(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("Cancelled between two time points.")


def _report_progress(progress: Progress, number: int, points: int, done: int, total: int) -> None:
    """Report progress in a series of `points` time points. `done` of `total` windows of point `number` are finished."""
    progress(number * total + done, points * total)


def _choose_diameter(
    series: Series, options: Options, segmenter: PointSegmenter, stages: Stages, cancelled: Callable[[], bool]
) -> tuple[Options, bool, str]:
    """Return the options with one diameter for all time points, whether it was estimated, and a note."""
    if segmenter.estimate_diameter is None:
        return options, False, ""
    estimates = list[tuple[DiameterEstimate, VoxelSize | None]]()
    sampled = sample(series.times, SAMPLED_POINTS)
    for time in sampled:
        _raise_if_cancelled(cancelled)
        with stages.measure("size"), suppress(*_POINT_ERRORS):
            volume, _ = series.read(time)
            if (sizing := segmenter.estimate_diameter(volume, options)) is not None:
                estimates.append((sizing, volume.voxel_size))
    text, note = choose_diameter(estimates, f"{len(sampled)} time points")
    return replace(options, diameter=parse_diameter(text)), text != "none", note


class _Points:
    """Results of the time points so far. Their pixels are in a mapped file."""

    def __init__(self, series: Series, folder: Path | None) -> None:
        self._series, self._folder = series, folder
        self._pixels: Array | None = None
        self._count: int | None = None
        self._notes = dict[str, list[int]]()
        self._tables = list[Table]()
        self.stages = Stages()
        self.done = self.fallbacks = 0
        self.recomputed = False
        self.skipped: SkippedWindows | None = None
        # Confidence and warning of the time point with the lowest confidence.
        self.confidence: float | None = None
        self._doubt: QualityWarning | None = None
        self.last: Result

    def add(self, result: Result, measured: Volume | None) -> None:
        """Add the next time point, and measure its objects if `measured` is a volume."""
        segmentation, time = result.segmentation, self._series.times[self.done]
        self._write_pixels(segmentation.pixels)
        if measured is not None:
            with self.stages.measure("measure"):
                self._tables.append(measure(segmentation, measured))
        self.done += 1
        if segmentation.count is not None:
            self._count = segmentation.count + (self._count or 0)
        for note in result.notes:
            self._notes.setdefault(note, []).append(time)
        self._keep_lowest_confidence(result, time)
        self.stages.update(result.seconds)
        self.fallbacks += result.fallbacks
        self.recomputed |= result.recomputed
        self.skipped = _add_skipped(self.skipped, result.skipped)
        # The pixels are in the file, so they need not stay in memory.
        self.last = result._replace(segmentation=replace(segmentation, pixels=segmentation.pixels[:0].copy()))

    def _keep_lowest_confidence(self, result: Result, time: int) -> None:
        """Keep the confidence and the warning of the time point with the lowest confidence."""
        doubt = result.quality_warning and result.quality_warning._replace(
            detail=f"Time point {time}: {result.quality_warning.detail}"
        )
        if result.confidence is not None and (self.confidence is None or result.confidence < self.confidence):
            self.confidence, self._doubt = result.confidence, doubt
        elif self.confidence is None:
            self._doubt = self._doubt or doubt

    @property
    def quality_warning(self) -> QualityWarning | None:
        """Warning of the worst time point. A warning about missing objects counts only if no time point has objects."""
        return None if self._doubt and self._doubt.confidence is None and self._count else self._doubt

    @property
    def _written(self) -> Array:
        """Pixels of the time points so far. Raises RuntimeError before the first one."""
        if self._pixels is None:
            raise RuntimeError("No time point was added yet.")
        return self._pixels[: self.done]

    def _write_pixels(self, pixels: Array) -> None:
        """Write the pixels of the next time point. If they need a wider dtype, convert the earlier ones."""
        if self._pixels is None or not np.can_cast(pixels.dtype, self._pixels.dtype):
            previous = self._pixels
            self._pixels = allocate_on_disk((len(self._series.times), *pixels.shape), pixels.dtype, self._folder)
            for number in range(self.done):
                self._pixels[number] = previous[number] if previous is not None else 0
        self._pixels[self.done] = pixels
        release_pages(self._pixels)

    def finish(self) -> tuple[Result, Table | None]:
        """Return the result for the time points so far, with linked objects if requested, and their table."""
        pixels, count, tracks = self._written, self._count, None
        if self._series.link is not None:
            with self.stages.measure("link"):
                tracks = self._link(pixels, self._series.link)
                pixels, count = self._renumber(tracks), tracks.count
        last, interval = self.last.segmentation, self._series.interval
        segmentation = replace(last, pixels=pixels, count=count, objects=None, time_interval=interval)
        table = self._make_table(tracks)
        result = self.last._replace(
            segmentation=segmentation,
            seconds=self.stages.seconds,
            fallbacks=self.fallbacks,
            recomputed=self.recomputed,
            skipped=self.skipped,
            confidence=self.confidence,
            quality_warning=self.quality_warning,
        )
        return result, table

    def _link(self, pixels: Array, method: Linking) -> Tracks:
        if method == "overlap":
            return link_by_overlap(pixels)
        return link_by_distance(pixels, self.last.segmentation.voxel_size)

    def _renumber(self, tracks: Tracks) -> Array:
        """Replace the number of each object by the number of its track."""
        written = self._written
        pixels, dtype = written, label_dtype(tracks.count)
        if not np.can_cast(dtype, pixels.dtype):
            pixels = allocate_on_disk(pixels.shape, dtype, self._folder)
        for number, lookup in enumerate(tracks.tracks):
            for z, plane in enumerate(written[number]):
                pixels[number, z] = lookup[plane]
            release_pages(pixels)
        return pixels

    def _make_table(self, tracks: Tracks | None) -> Table | None:
        """Return one table of all objects with their time points, and with their tracks if they are linked."""
        if not self._tables:
            return None
        tables = list[Table]()
        for number, table in enumerate(self._tables):
            label = table["label"]
            facts: Table = {"label": label, "time": np.full(len(label), self._series.times[number])}
            if tracks is not None:
                track = tracks.tracks[number][label]
                facts |= {"label": track, "track_id": track, "parent": tracks.parents[track]}
            order = facts["label"].argsort()
            tables.append({name: column[order] for name, column in (facts | {**table, **facts}).items()})
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    def list_notes(self) -> list[str]:
        """Return the notes of all time points. A note that does not apply to all of them lists its time points."""
        notes = [
            note if len(times) == self.done else f"Time point{'s' * (len(times) > 1)} {_list_times(times)}: {note}"
            for note, times in self._notes.items()
        ]
        remaining = len(notes) - MAX_NOTES
        return (
            notes
            if remaining <= 0
            else [*notes[:MAX_NOTES], f"There are {remaining} more notes about single time points."]
        )


def _list_times(times: Sequence[int]) -> str:
    listed = ", ".join(map(str, times[:MAX_TIMES]))
    return listed if len(times) <= MAX_TIMES else f"{listed} and {len(times) - MAX_TIMES} more"


def _add_skipped(total_skipped: SkippedWindows | None, skipped: SkippedWindows | None) -> SkippedWindows | None:
    if total_skipped is None or skipped is None:
        return skipped or total_skipped
    limits = tuple(map(max, total_skipped.limits, skipped.limits))
    return SkippedWindows(total_skipped.windows + skipped.windows, total_skipped.total + skipped.total, limits)
