"""Segmentation of a time series. The time points are segmented one after the other, and their results are combined."""

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
from service.core.types import Array, Linking, Options, Volume, choose_label_dtype
from service.inference.measurements import measure_objects
from service.inference.series.diameter import choose_diameter, select_evenly_spaced
from service.inference.series.laptrack_linking import link_by_distance
from service.inference.series.overlap_linking import Tracks, link_by_overlap
from service.inference.types import DiameterEstimate, QualityWarning, Result, Series, SeriesInfo, SkippedWindows, Table

# Maximum number of time points for which the object diameter is estimated. The whole series gets the same diameter.
MAX_SAMPLED_TIME_POINTS = 3
# Maximum number of notes in the result of a series.
MAX_NOTES = 20
# Maximum number of time points that are listed in a note.
MAX_LISTED_TIME_POINTS = 8
# Errors of a single time point. They end the series, but the earlier time points are retained.
_TIME_POINT_ERRORS = (RequestError, OutOfMemory, OutOfStorage, ReaderKilled, NonFiniteScores)

Progress = Callable[[int, int], None]


class TimePointSegmenter(NamedTuple):
    """Functions that process one time point.

    segment            segments a volume; its third argument is called with the number of finished windows and the total
    estimate_diameter  estimates the object diameter in a volume; None if the diameter is specified
    """

    segment: Callable[[Volume, Options, Progress], Result]
    estimate_diameter: Callable[[Volume, Options], DiameterEstimate | None] | None


def segment_series(  # noqa: PLR0913
    series: Series,
    options: Options,
    segmenter: TimePointSegmenter,
    folder: Path | None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    on_time_point: Callable[[int], None] = lambda _number: None,
    progress: Progress = lambda _done, _total: None,
) -> Result:
    """Segment the time points of a series one after the other.

    The labels of a time point do not depend on other time points. The object diameter is estimated once, from some of
    the time points. The pixels of the result are stored in an unnamed file in `folder`. An error at the first time
    point is raised. An error at a later time point ends the series: the result contains the earlier time points, and
    `SeriesInfo` contains the error.

    on_time_point  called with the zero-based index of each time point before it is segmented
    progress       called with the number of finished windows, and the total number of windows of the series

    Raises Cancelled if `cancelled()` returns true. Propagates exceptions from `segmenter` and `series.read`.
    """
    results = _TimePointResults(series, folder)
    options, is_estimated, note = _choose_diameter(series, options, segmenter, results.stages, cancelled)
    error_of_series: StackSegError | None = None
    for index, time_point in enumerate(series.times):
        _raise_if_cancelled(cancelled)
        on_time_point(index)
        try:
            with results.stages.measure("read"):
                volume, volume_to_measure = series.read(time_point)
            result = segmenter.segment(volume, options, partial(_report_progress, progress, index, len(series.times)))
            results.add(result, volume_to_measure)
        except _TIME_POINT_ERRORS as error:
            _raise_if_cancelled(cancelled)
            error.args = (f"Time point {time_point}: {error}",)
            if index == 0:
                raise
            note = f"{note} The result ends before the failed time point. {error}".strip()
            error.args = (f"{error} To use the earlier time points, set time={series.times[0]}:{time_point}.",)
            error_of_series = error
            break
    result, table = results.finish()
    return result._replace(
        notes=tuple(filter(None, (note, *results.list_notes()))),
        is_diameter_estimated=is_estimated,
        series=SeriesInfo(results.num_time_points, len(series.times), table, error_of_series),
    )


def _raise_if_cancelled(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("The segmentation was canceled between two time points.")


def _report_progress(progress: Progress, index: int, num_time_points: int, done: int, total: int) -> None:
    """Report that `done` of the `total` windows of the time point `index` of a series are finished."""
    progress(index * total + done, num_time_points * total)


def _choose_diameter(
    series: Series, options: Options, segmenter: TimePointSegmenter, stages: Stages, cancelled: Callable[[], bool]
) -> tuple[Options, bool, str]:
    """Return the options with one diameter for all time points, whether the diameter was estimated, and a note."""
    options = replace(options, may_correct_diameter=False)
    if segmenter.estimate_diameter is None:
        return options, False, ""
    estimates = list[tuple[DiameterEstimate, VoxelSize | None]]()
    sampled_time_points = select_evenly_spaced(series.times, MAX_SAMPLED_TIME_POINTS)
    for time_point in sampled_time_points:
        _raise_if_cancelled(cancelled)
        with stages.measure("size"), suppress(*_TIME_POINT_ERRORS):
            volume, _ = series.read(time_point)
            if (estimate := segmenter.estimate_diameter(volume, options)) is not None:
                estimates.append((estimate, volume.voxel_size))
    setting, note = choose_diameter(estimates, f"{len(sampled_time_points)} time points")
    is_estimated = setting != "none" and any(estimate.is_estimated for estimate, _ in estimates)
    return replace(options, diameter=parse_diameter(setting)), is_estimated, note


class _TimePointResults:
    """Results of the time points that have been segmented so far. Their pixels are in a memory-mapped file."""

    def __init__(self, series: Series, folder: Path | None) -> None:
        self._series, self._folder = series, folder
        self._pixels: Array | None = None
        self._object_count: int | None = None
        self._notes = dict[str, list[int]]()
        self._tables = list[Table]()
        self.stages = Stages()
        self.num_time_points = self.num_fallbacks = 0
        self.is_recomputed = False
        self.skipped: SkippedWindows | None = None
        # Confidence and warning of the time point with the lowest confidence.
        self.confidence: float | None = None
        self._worst_warning: QualityWarning | None = None
        self.last_result: Result

    def add(self, result: Result, volume_to_measure: Volume | None) -> None:
        """Add the next time point, and measure its objects if there is a `volume_to_measure`."""
        segmentation, time = result.segmentation, self._series.times[self.num_time_points]
        self._write_pixels(segmentation.pixels)
        if volume_to_measure is not None:
            with self.stages.measure("measure"):
                self._tables.append(measure_objects(segmentation, volume_to_measure))
        self.num_time_points += 1
        if segmentation.count is not None:
            self._object_count = segmentation.count + (self._object_count or 0)
        for note in result.notes:
            self._notes.setdefault(note, []).append(time)
        self._update_confidence(result, time)
        self.stages.update(result.seconds)
        self.num_fallbacks += result.num_fallbacks
        self.is_recomputed |= result.is_recomputed
        self.skipped = _add_skipped(self.skipped, result.skipped)
        # The pixels are in the file, so they need not stay in memory.
        self.last_result = result._replace(segmentation=replace(segmentation, pixels=segmentation.pixels[:0].copy()))

    def _update_confidence(self, result: Result, time: int) -> None:
        """Store the confidence and the warning of this time point if its confidence is the lowest."""
        warning = result.quality_warning and result.quality_warning._replace(
            detail=f"Time point {time}: {result.quality_warning.detail}"
        )
        if result.confidence is not None and (self.confidence is None or result.confidence < self.confidence):
            self.confidence, self._worst_warning = result.confidence, warning
        elif self.confidence is None:
            self._worst_warning = self._worst_warning or warning

    @property
    def quality_warning(self) -> QualityWarning | None:
        """Warning of the time point with the lowest confidence.

        A warning that no objects were found is ignored if any time point has objects.
        """
        return (
            None
            if self._worst_warning and self._worst_warning.confidence is None and self._object_count
            else self._worst_warning
        )

    @property
    def _written_pixels(self) -> Array:
        """Pixels of the time points that have been added. Raises RuntimeError if there are none."""
        if self._pixels is None:
            raise RuntimeError("No time point has been added yet.")
        return self._pixels[: self.num_time_points]

    def _write_pixels(self, pixels: Array) -> None:
        """Write the pixels of the next time point. If they need a wider dtype, convert the earlier pixels."""
        if self._pixels is None or not np.can_cast(pixels.dtype, self._pixels.dtype):
            previous_pixels = self._pixels
            self._pixels = allocate_on_disk((len(self._series.times), *pixels.shape), pixels.dtype, self._folder)
            for time_index in range(self.num_time_points):
                self._pixels[time_index] = previous_pixels[time_index] if previous_pixels is not None else 0
        self._pixels[self.num_time_points] = pixels
        release_pages(self._pixels)

    def finish(self) -> tuple[Result, Table | None]:
        """Return the combined result and the table of the added time points. Objects are linked if requested."""
        pixels, count, tracks = self._written_pixels, self._object_count, None
        if self._series.link is not None:
            with self.stages.measure("link"):
                tracks = self._link(pixels, self._series.link)
                pixels, count = self._renumber(tracks), tracks.count
        last_segmentation, interval = self.last_result.segmentation, self._series.interval
        segmentation = replace(last_segmentation, pixels=pixels, count=count, objects=None, time_interval=interval)
        table = self._make_table(tracks)
        result = self.last_result._replace(
            segmentation=segmentation,
            seconds=self.stages.seconds,
            num_fallbacks=self.num_fallbacks,
            is_recomputed=self.is_recomputed,
            skipped=self.skipped,
            confidence=self.confidence,
            quality_warning=self.quality_warning,
        )
        return result, table

    def _link(self, pixels: Array, method: Linking) -> Tracks:
        if method == "overlap":
            return link_by_overlap(pixels)
        return link_by_distance(pixels, self.last_result.segmentation.voxel_size)

    def _renumber(self, tracks: Tracks) -> Array:
        """Replace the label of each object with the number of its track."""
        written_pixels = self._written_pixels
        pixels, dtype = written_pixels, choose_label_dtype(tracks.count)
        if not np.can_cast(dtype, pixels.dtype):
            pixels = allocate_on_disk(pixels.shape, dtype, self._folder)
        for time_index, track_of_label in enumerate(tracks.tracks):
            for z, plane in enumerate(written_pixels[time_index]):
                pixels[time_index, z] = track_of_label[plane]
            release_pages(pixels)
        return pixels

    def _make_table(self, tracks: Tracks | None) -> Table | None:
        """Return one table of all objects with their time points and, if they are linked, their tracks."""
        if not self._tables:
            return None
        tables = list[Table]()
        for time_index, table in enumerate(self._tables):
            labels = table["label"]
            leading_columns: Table = {"label": labels, "time": np.full(len(labels), self._series.times[time_index])}
            if tracks is not None:
                track_ids = tracks.tracks[time_index][labels]
                leading_columns |= {"label": track_ids, "track_id": track_ids, "parent": tracks.parents[track_ids]}
            order = leading_columns["label"].argsort()
            tables.append(
                {name: column[order] for name, column in (leading_columns | {**table, **leading_columns}).items()}
            )
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    def list_notes(self) -> list[str]:
        """Return the notes of all time points. Notes that do not apply to all time points list their time points."""
        notes = [
            note
            if len(times) == self.num_time_points
            else f"Time point{'s' * (len(times) > 1)} {_format_time_points(times)}: {note}"
            for note, times in self._notes.items()
        ]
        num_omitted = len(notes) - MAX_NOTES
        return (
            notes
            if num_omitted <= 0
            else [*notes[:MAX_NOTES], f"There are {num_omitted} more notes about individual time points."]
        )


def _format_time_points(times: Sequence[int]) -> str:
    listed_times = ", ".join(map(str, times[:MAX_LISTED_TIME_POINTS]))
    return (
        listed_times
        if len(times) <= MAX_LISTED_TIME_POINTS
        else f"{listed_times} and {len(times) - MAX_LISTED_TIME_POINTS} more"
    )


def _add_skipped(total_skipped: SkippedWindows | None, skipped: SkippedWindows | None) -> SkippedWindows | None:
    if total_skipped is None or skipped is None:
        return skipped or total_skipped
    limits = tuple(map(max, total_skipped.limits, skipped.limits))
    return SkippedWindows(total_skipped.windows + skipped.windows, total_skipped.total + skipped.total, limits)
