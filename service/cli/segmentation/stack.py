"""`stackseg segment` for a single stack, which is read, segmented and written in this process."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from service.cli.progress import ProgressBar, show_progress
from service.cli.segmentation.local_source import make_local_source
from service.cli.segmentation.parameters import use_option_names
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.quantities import TimeRange
from service.core.telemetry import Stages
from service.core.types import Options, OutputKind, Volume
from service.formats import stack_reader, writers
from service.formats.zarr.store import find_labeled_image
from service.inference.measurements import write_csv
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.estimator import Estimator
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import estimate_diameter, segment
from service.inference.series.time_points import Progress, TimePointSegmenter, segment_series
from service.inference.types import DiameterEstimate, Result, Series
from service.inference.windows.batching.batcher import WindowBatcher, open_batcher
from service.models.spec import ModelSpec
from service.serving.parameters import Query
from service.serving.results.answers import measure_objects
from service.serving.results.provenance import describe_provenance, hash_file


def run(options: argparse.Namespace, query: Query, spec: ModelSpec, settings: Settings) -> int:
    """Segment one file, or an open remote store."""
    stages, limit_bytes = Stages(), settings.limits.decoded_bytes
    with (
        tempfile.TemporaryDirectory(prefix="segment-") as scratch,
        open_batcher(settings) as batcher,
        show_progress() as bar,
    ):
        bar.begin_step("reading")
        with stages.measure("read"):
            is_measured = options.measurements is not None
            _check_header(options, query, Estimator(spec, settings), limit_bytes)
            source = make_local_source(options.input, query, limit_bytes, Path(scratch), is_measured=is_measured)
            pixels = source.read_pixels()
        bar.begin_step(f"loading {spec.identifier}")
        with stages.measure("load"):
            runner = ModelRunner(spec, settings)
            batcher.call(runner.warm_up)
        bar.begin_step("windows")
        result = LocalRun(runner, batcher, Path(scratch), bar).segment(pixels.segmentation_input, query.options)
        stages.update(result.seconds)
        bar.begin_step("writing")
        with stages.measure("write"):
            digest = hash_file(options.input) if isinstance(options.input, Path) else None
            provenance = describe_provenance(query, result, options.input.name, digest)
            writers.write(result.segmentation, options.result, provenance)
        if options.measurements is not None:
            with stages.measure("measure"):
                table = measure_objects(result, pixels.measurement_input)
                assert table is not None  # noqa: S101 - `_check_header` rejects other outputs
                write_csv(table, options.measurements)
    return print_result(_summarize(str(options.result), spec, result, stages), result)


class LocalRun(NamedTuple):
    """A model that runs in this process.

    batcher  batcher that runs the model on windows
    scratch  folder for the labels of a time series
    bar      progress bar
    """

    runner: ModelRunner
    batcher: WindowBatcher
    scratch: Path
    bar: ProgressBar

    def segment(self, pixels: Volume | Series, options: Options) -> Result:
        """Segment a volume or a time series and show the progress. Raises the same errors as `segment_series`."""
        if isinstance(pixels, Volume):
            return self._segment_volume(pixels, options, self.bar.show_windows)
        return segment_series(
            pixels,
            options,
            TimePointSegmenter(
                self._segment_volume, self.estimate_diameter if self.needs_diameter_estimate(options) else None
            ),
            self.scratch,
            on_time_point=lambda index: self.bar.begin_step(f"time point {index + 1} of {len(pixels.times)}"),
            progress=self.bar.show_windows,
        )

    def _segment_volume(self, volume: Volume, options: Options, progress: Progress) -> Result:
        return segment(self.runner, volume, options, callbacks=Callbacks(self.batcher.run, progress=progress))

    def needs_diameter_estimate(self, options: Options) -> bool:
        """Return whether the object diameter is estimated."""
        return self.runner.estimator.plan(options).needs_diameter_estimate

    def estimate_diameter(self, volume: Volume, options: Options) -> DiameterEstimate | None:
        """Estimate the object diameter of a volume with `service.inference.segment.estimate_diameter`."""
        return estimate_diameter(self.runner, volume, options, Callbacks(self.batcher.run))


def _check_header(options: argparse.Namespace, query: Query, estimator: Estimator, limit_bytes: int) -> None:
    """Raise the errors that are evident from the options and the file header, before pixels and weights are loaded."""
    kind = estimator.get_output_kind(query.options)
    check_output(kind, query, is_measured=options.measurements is not None)
    _check_format(kind, query, options.result)
    description = stack_reader.inspect(options.input, query.selection, limit_bytes)
    if not description.problem:
        estimator.plan_request(description, query.options)


def check_output(kind: OutputKind, query: Query, *, is_measured: bool) -> None:
    """Raise BadParameter if measurements or links are requested for a result without objects."""
    if kind != "labels" and is_measured:
        raise BadParameter(f"--measurements requires labels, but the result is {kind}.")
    if kind != "labels" and query.link is not None:
        raise BadParameter(f"--link requires labels, but the result is {kind}.")


def _check_format(kind: OutputKind, query: Query, path: Path) -> None:
    """Raise BadParameter if the format of the result does not support the segmentation."""
    if kind == "probabilities" and find_labeled_image(path) is not None:
        raise BadParameter(
            f"{path}: the labels of an OME-Zarr image must be integers, not probabilities. Write them to a separate"
            " store, such as probabilities.zarr."
        )
    if writers.is_tiff(path) or writers.is_zarr(path):
        return
    if kind == "probabilities" or isinstance(query.selection.time, TimeRange):
        raise BadParameter(
            f"{path}: only TIFF and OME-Zarr support probabilities and time series. Use the suffix .tif or .zarr."
        )


def _summarize(path: str, spec: ModelSpec, result: Result, stages: Stages) -> str:
    """Return one line with the number of objects and the seconds of each stage."""
    object_count = result.segmentation.count
    object_text = "" if object_count is None else f"{object_count} objects, "
    if result.series is not None:
        object_text += f"{result.series.num_time_points} of {result.series.total} time points, "
    stage_text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages.seconds.items())
    return f"{path}: {object_text}{spec.identifier} ({stage_text})"


def print_result(summary: str, result: Result) -> int:
    """Print a summary and notes to standard output, and warnings to standard error. Return the exit status."""
    sys.stdout.write(f"{summary}\n")
    if result.skipped is not None:
        sys.stdout.write(f"skipped: {result.skipped}\n")
    if result.confidence is not None:
        sys.stdout.write(f"confidence: {result.confidence:.2f}\n")
    sys.stdout.writelines(f"note: {use_option_names(note)}\n" for note in result.notes)
    if result.quality_warning is not None:
        sys.stderr.write(f"stackseg: warning: {use_option_names(result.quality_warning.detail)}\n")
    if result.series is None or result.series.error is None:
        return 0
    sys.stderr.write(f"stackseg: {use_option_names(result.series.error)}\n")
    return 1
