"""Segmentation of a series with a fake segmenter, which needs no network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core.errors import BadFile, Cancelled, DeviceLost, OutOfMemory
from service.core.quantities import Diameter, TimeInterval
from service.core.types import Options, Segmentation, Volume
from service.inference.series.time_points import MAX_NOTES, TimePointSegmenter, segment_series
from service.inference.types import DiameterEstimate, QualityWarning, Result, Series

INTERVAL = TimeInterval(2, "s")


class FakeSegmenter:
    """Segmenter that records its calls, and raises the given errors by time point."""

    def __init__(self, errors: dict[int, Exception] | None = None, width: float | None = 10.0) -> None:
        self.errors, self.width = errors or {}, width
        self.diameters: list[Any] = []
        self.estimated: list[int] = []
        self.notes: Callable[[int], tuple[str, ...]] = lambda _time: ()
        self.confidences: dict[int, float] = {}

    def segment(self, volume: Volume, options: Options, progress: Any) -> Result:
        time = int(volume.read_all().max()) - 1
        if time in self.errors:
            raise self.errors[time]
        self.diameters.append(options.diameter)
        for done in range(3):
            progress(done, 2)
        # Each gray value is an object.
        result = Result(Segmentation(volume.read_all()[0], "labels", None, 1), {"windows": 1.0}, self.notes(time))
        confidence = self.confidences.get(time)
        doubt = QualityWarning(confidence, "It is odd.", "") if confidence is not None and confidence < 0.4 else None
        return result._replace(confidence=confidence, quality_warning=doubt)

    def estimate(self, volume: Volume, _options: Options) -> DiameterEstimate:
        time = int(volume.read_all().max()) - 1
        self.estimated.append(time)
        width = None if self.width is None else Diameter((self.width + time,), "px")
        return DiameterEstimate(width, matches_model=False, num_objects=9, num_windows=2)


def run(series: Series, segmenter: FakeSegmenter, folder: Path, *, estimating: bool = False, **options: Any) -> Result:
    calls = TimePointSegmenter(segmenter.segment, segmenter.estimate if estimating else None)
    return segment_series(series, Options(), calls, folder, **options)


def make_series(times: range, dtype: Any = np.uint16, **options: Any) -> Series:
    """Return a series in which one voxel has the value time + 1. Time points in `bad` cannot be read."""
    bad = options.pop("bad", ())

    def read(time: int) -> tuple[Volume, Volume | None]:
        if time in bad:
            raise BadFile("It is damaged.")
        pixels = np.zeros((1, 2, 3, 4), dtype)
        pixels[0, 1, 1, 1] = time + 1
        volume = Volume.from_array(pixels)
        return volume, volume

    return Series(times, read, (1, 2, 3, 4), None, INTERVAL, **options)


def test_time_points_are_segmented_in_order(tmp_path: Path) -> None:
    segmenter, seen = FakeSegmenter(), list[Any]()
    progress = {"on_time_point": seen.append, "progress": lambda *done: seen.append(done)}
    result = run(make_series(range(3, 6)), segmenter, tmp_path, **progress)
    assert seen == [0, (0, 6), (1, 6), (2, 6), 1, (2, 6), (3, 6), (4, 6), 2, (4, 6), (5, 6), (6, 6)]
    assert result.segmentation.pixels[:, 1, 1, 1].tolist() == [4, 5, 6]
    assert (result.segmentation.axes, result.segmentation.time_interval) == ("TZYX", INTERVAL)
    assert (result.segmentation.count, result.seconds["windows"]) == (3, 3.0)
    assert result.series is not None
    assert (result.series.num_time_points, result.series.total, result.series.error) == (3, 3, None)
    assert list(tmp_path.iterdir()) == []


def test_objects_are_counted_and_labeled_by_time(tmp_path: Path) -> None:
    for link in (None, "overlap"):
        series = make_series(range(3, 6), link=link)
        result = run(series, FakeSegmenter(), tmp_path)
        assert result.series is not None
        table = result.series.table
        assert table is not None
        assert table["time"].tolist() == [3, 4, 5]
        assert table["intensity_max"].tolist() == [4, 5, 6]
        if link is None:
            assert "track_id" not in table
        else:
            # The first time point has no object with a smaller number.
            assert len(set(table["track_id"].tolist())) == 1
            assert table["label"].tolist() == table["track_id"].tolist()
            assert table["parent"].tolist() == [0, 0, 0]
            assert set(result.segmentation.pixels[:, 1, 1, 1].tolist()) == set(table["label"].tolist())


@pytest.mark.parametrize(
    ("width", "points", "bad", "diameter", "note"),
    [
        (10.0, 9, (), Diameter((13, 13, 13), "px"), "13 px wide (measured in 3 of 3 time points)"),
        (None, 4, {2}, "none", "could not be estimated"),
    ],
)
def test_one_diameter_is_used_for_all_time_points_if_it_can_be_estimated(
    tmp_path, width, points, bad, diameter, note
) -> None:
    segmenter = FakeSegmenter(width=width)
    result = run(make_series(range(points), bad=bad), segmenter, tmp_path, estimating=True)
    assert segmenter.estimated == [0, 3, 6] if width else [0, 1]
    assert segmenter.diameters == [diameter] * (9 if width else 2)
    assert note in result.notes[0]


@pytest.mark.parametrize("errors", [{2: OutOfMemory("Too large.", 10)}, {}])
def test_error_at_a_later_time_point_keeps_the_earlier_ones(tmp_path: Path, errors: dict[int, Exception]) -> None:
    series = make_series(range(5), bad=() if errors else {2})
    result = run(series, FakeSegmenter(errors), tmp_path)
    assert result.series is not None
    assert (result.series.num_time_points, result.series.total) == (2, 5)
    assert str(result.series.error).startswith("Time point 2: ")
    assert "time=0:2" in str(result.series.error)
    assert any("Time point 2: " in note for note in result.notes)
    assert len(result.segmentation.pixels) == 2


def test_error_at_the_first_time_point_and_fatal_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="Time point 3: It is damaged"):
        run(make_series(range(3, 6), bad={3}), FakeSegmenter(), tmp_path)
    for error in (DeviceLost("gone"), Cancelled("cancelled"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            run(make_series(range(3)), FakeSegmenter({1: error}), tmp_path)
    # If the request is cancelled meanwhile, a read error is not attributed to the file.
    answers = iter([False, False, True])
    with pytest.raises(Cancelled):
        run(make_series(range(3), bad={1}), FakeSegmenter(), tmp_path, cancelled=lambda: next(answers))


def test_notes_list_their_time_points(tmp_path: Path) -> None:
    segmenter = FakeSegmenter()
    segmenter.notes = lambda time: ("Always.", *(("Odd.",) if time % 2 else ()), *(("Last.",) if time == 19 else ()))
    result = run(make_series(range(20)), segmenter, tmp_path)
    assert result.notes == ("Always.", "Time points 1, 3, 5, 7, 9, 11, 13, 15 and 2 more: Odd.", "Time point 19: Last.")
    segmenter.notes = lambda time: (f"Number {time}.",)
    result = run(make_series(range(MAX_NOTES + 5)), segmenter, tmp_path)
    assert len(result.notes) == MAX_NOTES + 1
    assert "5 more" in result.notes[-1]


@pytest.mark.parametrize(
    ("confidences", "lowest", "worst"),
    [({0: 0.9, 1: 0.2, 2: 0.3}, 0.2, 1), ({0: 0.0, 1: 0.9}, 0.0, 0), ({1: 1.0}, 1.0, None), ({}, None, None)],
)
def test_series_has_the_lowest_confidence_of_its_time_points(tmp_path, confidences, lowest, worst) -> None:
    segmenter = FakeSegmenter()
    segmenter.confidences = confidences
    result = run(make_series(range(3)), segmenter, tmp_path)
    assert result.confidence == lowest
    detail = None if worst is None else f"Time point {worst}: It is odd."
    assert (result.quality_warning and result.quality_warning.detail) == detail


def test_labels_are_widened_if_one_time_point_needs_it(tmp_path: Path) -> None:
    def read(time: int) -> tuple[Volume, None]:
        dtype = np.uint32 if time > 1 else np.uint16
        return Volume.from_array(np.full((1, 1, 2, 2), 70_000 if time > 1 else time, dtype)), None

    series = Series(range(4), read, (1, 1, 2, 2), None, None)
    result = run(series, FakeSegmenter(), tmp_path)
    assert result.segmentation.pixels.dtype == np.uint32
    assert result.segmentation.pixels[:, 0, 0, 0].tolist() == [0, 1, 70_000, 70_000]
