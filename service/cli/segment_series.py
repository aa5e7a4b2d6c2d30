"""Reading and segmenting for `stackseg segment`: one volume, or with `--time all` several time points of a file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from service.cli.progress import ProgressBar
from service.core.quantities import TimeRange
from service.core.types import Options, Volume
from service.formats import stack_reader
from service.formats.zarr.store import Store
from service.inference.batching.batcher import WindowBatcher
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import estimate_diameter
from service.inference.segment import segment as segment_volume
from service.inference.series.time_points import PointSegmenter, Progress, Series, segment_series
from service.inference.types import Result
from service.serving.parameters import Query
from service.serving.results.answers import Pixels


def read(path: Path | Store, query: Query, limit_bytes: int, scratch: Path, *, measured: bool) -> Volume | Series:
    """Read the volume, or describe the time points, that the query asks for.

    Time points come with what objects are measured in, where they are `measured`. Raises what `stack_reader` raises.
    """
    selection = query.selection
    if not isinstance(selection.time, TimeRange):
        return stack_reader.read(path, selection, limit_bytes, scratch)
    description = stack_reader.inspect(path, selection, limit_bytes)

    def read_point(time: int) -> tuple[Volume, Volume | None]:
        volume = stack_reader.read(path, replace(selection, time=time), limit_bytes, scratch)
        if not measured or selection.channel is None:
            return volume, volume if measured else None
        return volume, stack_reader.read(path, replace(selection, time=time, channel=None), limit_bytes, scratch)

    return Series.of(description, read_point, query.link)


def read_pixels(path: Path, query: Query, limit_bytes: int, scratch: Path, *, measured: bool) -> Pixels:
    """Read what is segmented, and where objects are `measured` what they are measured in. Raises as `read` does."""
    segmented = read(path, query, limit_bytes, scratch, measured=measured)
    if not measured or isinstance(segmented, Series):
        return Pixels(segmented, None)
    if query.selection.channel is None:
        return Pixels(segmented, segmented)
    return Pixels(segmented, stack_reader.read(path, replace(query.selection, channel=None), limit_bytes, scratch))


def segment(  # noqa: PLR0913, PLR0917
    series: Volume | Series,
    options: Options,
    runner: ModelRunner,
    device: WindowBatcher,
    scratch: Path,
    bar: ProgressBar,
) -> Result:
    """Segment a volume or a series, and show how far that is. Raises what `segment_series` raises."""
    if isinstance(series, Volume):
        return segment_volume(runner, series, options, callbacks=Callbacks(device.run, progress=bar.show))

    def segment_point(volume: Volume, options: Options, progress: Progress) -> Result:
        return segment_volume(runner, volume, options, callbacks=Callbacks(device.run, progress=progress))

    is_estimated = runner.estimator.plan(options).estimated
    estimate = partial(estimate_diameter, runner, callbacks=Callbacks(device.run))
    return segment_series(
        series,
        options,
        PointSegmenter(segment_point, estimate if is_estimated else None),
        scratch,
        began=lambda number: bar.begin(f"time point {number + 1} of {len(series.times)}"),
        progress=bar.show,
    )
