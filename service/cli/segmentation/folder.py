"""`stackseg segment FOLDER -o OUT`: segment all stacks in a folder, with one table and one report."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

from service.cli.models import choose_model
from service.cli.progress import show_progress
from service.cli.segmentation.local_source import make_local_source
from service.cli.segmentation.parameters import use_option_names
from service.cli.segmentation.stack import LocalRun, check_output
from service.core.config import Settings
from service.core.errors import BadParameter
from service.formats.zarr.store import is_zarr_folder
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.batching.batcher import open_batcher
from service.models.spec import ModelSpec
from service.serving.jobs.folders.find_stacks import select_stacks
from service.serving.jobs.folders.report import REPORT_FILE
from service.serving.jobs.folders.segment_folder import (
    FolderOutcome,
    FolderSegmentation,
    StackCallbacks,
    can_hold_results,
)
from service.serving.parameters import Query
from service.serving.reading import Pixels
from service.serving.storage.result_folder import open_results


def run(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    """Segment the unfinished stacks in a folder. Return 1 if any stack failed, otherwise 0.

    Raises BadParameter if the folder contains no stacks, or if the output folder contains other files.
    """
    folder, out = options.input, options.result
    _check_folders(folder, out)
    if query.format == "zarr":
        # Fail before any computation if the `zarr` extra is missing.
        from service.formats.zarr import writer as zarr_writer  # noqa: F401, PLC0415
    stacks = find_stacks(folder, options.glob, out)
    spec = choose_model(options.model, settings)
    with (
        open_results(out) as results,
        tempfile.TemporaryDirectory(prefix="segment-") as scratch,
        open_batcher(settings) as batcher,
        show_progress() as bar,
    ):
        if not can_hold_results(results) and not options.force:
            raise BadParameter(
                f"{out} already contains other files. Choose another folder, or use --force to write to it anyway."
            )
        bar.begin_step(f"loading {spec.identifier}")
        runner = ModelRunner(spec, settings)
        check_output(runner.estimator.get_output_kind(query.options), query, is_measured=False)
        batcher.call(runner.warm_up)
        callbacks = _make_callbacks(
            folder, query, LocalRun(runner, batcher, Path(scratch), bar), settings.limits.decoded_bytes
        )
        outcome = FolderSegmentation(results, spec, callbacks, Path(scratch)).run(stacks, query)
    _print_summary(outcome, len(stacks), out, spec)
    return 1 if outcome.failures else 0


def _check_folders(folder: Path, out: Path) -> None:
    """Raise BadParameter if the output folder is the input folder or a file."""
    if out.resolve() == folder.resolve():
        raise BadParameter(f"{out} is the folder that contains the stacks. Choose another folder for the results.")
    if out.exists() and not out.is_dir():
        raise BadParameter(f"{out} is a file. Choose a folder for the results.")


def _print_summary(outcome: FolderOutcome, stack_count: int, out: Path, spec: ModelSpec) -> None:
    """Print the errors and warnings of individual stacks, and the number of completed stacks."""
    sys.stderr.writelines(f"stackseg: {failure}\n" for failure in outcome.failures)
    sys.stderr.writelines(
        f"stackseg: {warning.replace(': ', ': warning: ', 1)}\n" for warning in outcome.confidence_warnings
    )
    previous_note = f", {outcome.skipped_count} of them in earlier runs" if outcome.skipped_count else ""
    stack_text = f"{stack_count - len(outcome.failures)} of {stack_count} stacks{previous_note}"
    object_text = "" if outcome.object_count is None else f", {outcome.object_count} objects"
    sys.stdout.write(f"{out / REPORT_FILE}: {stack_text}{object_text}, {spec.identifier}\n")


def find_stacks(folder: Path, glob: str | None, out: Path) -> list[str]:
    """Return the sorted relative paths of the stacks in a folder. Raises BadParameter if there are none."""
    is_zarr = cache(is_zarr_folder)
    # The results folder may also contain the folder of the stacks.
    excluded = {out.resolve()} - {*folder.resolve().parents}

    def is_candidate(path: Path) -> bool:
        # A broken link is listed as well, so that the run reports it.
        if not (path.is_file() or is_zarr(path) or (path.is_symlink() and not path.exists())):
            return False
        return not any(map(is_zarr, _list_parents(path, folder)))

    names = [
        str(path.relative_to(folder))
        for path in filter(is_candidate, folder.glob(glob or "*"))
        # Unlike `Path.resolve`, `realpath` supports loops of links.
        if not excluded & {*Path(os.path.realpath(path)).parents}
    ]
    if stacks := select_stacks(names, glob, partial(_open_stack, folder)):
        return stacks
    selection = "files in a supported format" if glob is None else f"stacks that match {glob}"
    raise BadParameter(f"{folder} contains no {selection}. Set --glob to a pattern that matches the stacks.")


def _list_parents(path: Path, folder: Path) -> Iterable[Path]:
    """Return the folders between a path and a folder that contains it."""
    return takewhile(lambda parent: parent != folder, path.parents)


@contextmanager
def _open_stack(folder: Path, name: str) -> Iterator[Path]:
    yield folder / name


def _make_callbacks(folder: Path, query: Query, local_run: LocalRun, limit_bytes: int) -> StackCallbacks:
    is_measured = local_run.runner.estimator.get_output_kind(query.options) == "labels"

    def read(path: Path, query: Query, scratch: Path) -> Pixels:
        return make_local_source(path, query, limit_bytes, scratch, is_measured=is_measured).read_pixels()

    def begin(name: str, stack_number: int, stack_count: int) -> None:
        local_run.bar.begin_step(
            f"[{stack_number}/{stack_count}] {name}" if stack_number else f"object diameter: {name}"
        )

    estimate = local_run.estimate_diameter if local_run.needs_diameter_estimate(query.options) else None
    return StackCallbacks(
        partial(_open_stack, folder), read, local_run.segment, estimate, begin=begin, reword=use_option_names
    )
