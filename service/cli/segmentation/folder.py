"""`stackseg segment FOLDER -o OUT`: segment all stacks of a folder with one table, one report, and resumption."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.cli.models import choose_model
from service.cli.progress import show_progress
from service.cli.segmentation.local_source import local_source
from service.cli.segmentation.parameters import use_option_names
from service.cli.segmentation.stack import LocalRun, check_output
from service.core.config import Settings
from service.core.errors import BadParameter
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.batching.batcher import open_batcher
from service.models.spec import ModelSpec
from service.serving.jobs.folder_records import REPORT
from service.serving.jobs.folder_work import (
    FolderOutcome,
    FolderSegmentation,
    StackCallbacks,
    can_hold_results,
    select_stacks,
)
from service.serving.parameters import Query
from service.serving.reading import Pixels
from service.serving.storage.result_folder import open_results


def run(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    """Segment the unfinished stacks of a folder. Return 1 if any failed.

    Raises BadParameter if the folder contains no stacks, or the output folder contains other files.
    """
    folder, out = options.input, options.result
    _check_folders(folder, out)
    if query.format == "zarr":
        # Fail before any computation if the extra is missing.
        from service.formats.zarr import writer as zarr_writer  # noqa: F401, PLC0415
    stacks = find_stacks(folder, options.glob, out)
    spec = choose_model(options.model, settings)
    with (
        open_results(out) as results,
        tempfile.TemporaryDirectory(prefix="segment-") as scratch,
        open_batcher(settings) as device,
        show_progress() as bar,
    ):
        if not can_hold_results(results) and not options.force:
            raise BadParameter(
                f"{out} already contains other files. Choose another folder, or use it anyway with --force."
            )
        bar.begin_step(f"loading {spec.identifier}")
        runner = ModelRunner(spec, settings)
        check_output(runner.estimator.output_kind(query.options), query, measured=False)
        device.call(runner.warm_up)
        calls = _make_calls(folder, query, LocalRun(runner, device, Path(scratch), bar), settings.limits.decoded_bytes)
        done = FolderSegmentation(results, spec, calls, Path(scratch)).run(stacks, query)
    _print_summary(done, len(stacks), out, spec)
    return 1 if done.failures else 0


def _check_folders(folder: Path, out: Path) -> None:
    """Raise BadParameter if the output folder is the input folder or a file."""
    if out.resolve() == folder.resolve():
        raise BadParameter(f"{out} is the folder of the stacks. Choose another folder for the results.")
    if out.exists() and not out.is_dir():
        raise BadParameter(f"{out} is a file. Choose a folder for the results.")


def _print_summary(done: FolderOutcome, stacks: int, out: Path, spec: ModelSpec) -> None:
    """Print errors and warnings of single stacks, and the number of completed stacks."""
    sys.stderr.writelines(f"stackseg: {fault}\n" for fault in done.failures)
    sys.stderr.writelines(f"stackseg: {doubt.replace(': ', ': warning: ', 1)}\n" for doubt in done.confidence_warnings)
    before = f", {done.skipped} of them previously" if done.skipped else ""
    counted = f"{stacks - len(done.failures)} of {stacks} stacks{before}"
    objects = "" if done.objects is None else f", {done.objects} objects"
    sys.stdout.write(f"{out / REPORT}: {counted}{objects}, {spec.identifier}\n")


def find_stacks(folder: Path, glob: str | None, out: Path) -> list[str]:
    """Return the sorted relative paths of the stacks in a folder. Raises BadParameter if there are none."""
    found = [
        path for path in folder.glob(glob or "*") if path.is_file() and out.resolve() not in path.resolve().parents
    ]
    stacks = select_stacks((str(path.relative_to(folder)) for path in found), glob)
    if not stacks:
        raise BadParameter(
            f"{folder} contains no stacks that match {glob or '*.tif'}. Set --glob to the pattern of the stacks."
        )
    return stacks


def _make_calls(folder: Path, query: Query, run: LocalRun, limit_bytes: int) -> StackCallbacks:
    measured = run.runner.estimator.output_kind(query.options) == "labels"

    @contextmanager
    def open_stack(name: str) -> Iterator[Path]:
        yield folder / name

    def read(path: Path, query: Query, scratch: Path) -> Pixels:
        return local_source(path, query, limit_bytes, scratch, measured=measured).read_pixels()

    def begin(name: str, number: int, count: int) -> None:
        run.bar.begin_step(f"[{number}/{count}] {name}" if number else f"object diameter: {name}")

    estimate = run.estimate_diameter if run.is_estimated(query.options) else None
    return StackCallbacks(open_stack, read, run.segment, estimate, begin=begin, reword=use_option_names)
