"""Planning of a block-wise run, and its driver, which submits blocks in order and deletes scores that no tile needs."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.quantities import TimeRange
from service.core.types import Options, Selection
from service.formats import stack_reader
from service.formats.zarr import writer as zarr_writer
from service.inference.blockwise import counting, output
from service.inference.blockwise.layout import Layout, choose_windows
from service.inference.blockwise.run_folder import BlockTask, RunFolder, RunPlan, Step, open_run, remove_window_limit
from service.inference.decoding.block_kernel import block_kernel
from service.inference.decoding.postprocessing import apply_postprocessing
from service.inference.preprocessing.resample import working_size
from service.inference.runner.estimator import Estimator
from service.models.spec import Instances, ModelSpec

if TYPE_CHECKING:
    from service.inference.blockwise.workers import Workers

Progress = Callable[[str, int, int], None]
"""Callback with the step, the number of its finished blocks and their total."""


class Driver:
    """Runs all unfinished blocks of a run, in an order that keeps few scores on disk."""

    def __init__(
        self, folder: RunFolder, workers: Workers, progress: Progress = lambda _step, _done, _total: None
    ) -> None:
        self._folder, self._workers, self._progress = folder, workers, progress

    def run(self, out: Path, describe: Callable[[], Mapping[str, str]]) -> None:
        """Run all steps, and write the result to `out`, which appears only when it is complete.

        `describe` is called when only the result is missing, and returns metadata for the store. Raises the exceptions
        of `run_block`.
        """
        self._survey()
        self._run = open_run(str(self._folder.path), surveyed=True)
        self._layout = self._run.plan.layout
        self._score_and_decode()
        if self._run.plan.output == "labels":
            self._run_step("link", range(self._layout.count))
            self._run_step("join", [0])
        if not self._has_partial_result(out):
            self._folder.discard_records("labels")
            output.create_store(self._run, out, describe())
        for numbers in output.list_level_blocks(self._run):
            self._run_step("labels", numbers)
        zarr_writer.finish(out)

    def _has_partial_result(self, out: Path) -> bool:
        """Return whether blocks of the result have been written to `out`, not to another path."""
        exists = bool(self._folder.finished_blocks("labels")) and zarr_writer.partial_path(out).exists()
        return exists and self._folder.levels["out"] == str(out)

    def _survey(self) -> None:
        """Count all parts, in as many rounds as needed."""
        parts = counting.count_parts(open_run(str(self._folder.path)))
        for round_number in itertools.count():
            self._run_step("count", range(round_number * parts, (round_number + 1) * parts))
            self._run_step("survey", [round_number])
            if not self._folder.read_record("survey", round_number)["wanted"]:
                break
        for path in (self._folder.path / "survey").iterdir():
            path.unlink()

    def _run_step(self, step: Step, numbers: Iterable[int]) -> None:
        requested, finished = list(numbers), self._folder.finished_blocks(step)
        remaining = [number for number in requested if number not in finished]
        done = len(requested) - len(remaining)
        self._progress(step, done, len(requested))
        for future in as_completed([self._submit(step, number) for number in remaining]):
            future.result()
            done += 1
            self._progress(step, done, len(requested))

    def _submit(self, step: Step, number: int) -> Future[dict[str, Any]]:
        return self._workers.submit(BlockTask(str(self._folder.path), step, number))

    def _score_and_decode(self) -> None:
        """Score groups of windows in order, decode each tile when its groups are scored, and delete old scores."""
        total, finished, scored = (
            self._layout.count,
            self._folder.finished_blocks("tile"),
            self._folder.finished_blocks("scores"),
        )
        order = _BlockOrder(
            {tile: set(self._layout.required_groups(tile)) for tile in range(total) if tile not in finished},
            lambda group: group in scored and self._has_scores(group),
        )
        running, done = dict[Future[dict[str, Any]], tuple[Step, int]](), len(finished)
        self._progress("tile", done, total)
        while True:
            # Submit only blocks that start soon, so that tiles that become ready run before further groups.
            while len(running) < 2 * self._workers.count and (block := order.take()) is not None:
                running[self._submit(*block)] = block
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step, number = running.pop(future)
                future.result()
                if step == "scores":
                    order.mark_scored(number)
                    continue
                done += 1
                self._progress("tile", done, total)
                self._drop_scores(order.mark_decoded(number))

    def _drop_scores(self, groups: Iterable[int]) -> None:
        for group in groups:
            (self._folder.path / f"scores/{group}.raw").unlink(missing_ok=True)

    def _has_scores(self, group: int) -> bool:
        """Return whether the scores of a finished group still exist."""
        exists = (self._folder.path / f"scores/{group}.raw").exists()
        return exists or not self._folder.read_record("scores", group)["windows"]


class _BlockOrder:
    """Order of the groups to score and the tiles to decode, such that scores can be deleted early.

    needs      required groups of each tile that has not been decoded
    is_scored  whether the scores of a group exist
    """

    def __init__(self, needs: Mapping[int, set[int]], is_scored: Callable[[int], bool]) -> None:
        self._needs = needs
        self._readers = defaultdict[int, set[int]](set)
        for tile, groups in needs.items():
            for group in groups:
                self._readers[group].add(tile)
        self._to_score = deque(group for group in sorted(self._readers) if not is_scored(group))
        missing = set(self._to_score)
        self._missing = {tile: groups & missing for tile, groups in needs.items()}
        self._ready = deque(tile for tile, groups in self._missing.items() if not groups)

    def take(self) -> tuple[Step, int] | None:
        """Return the next block, tiles before groups, or None if none is ready."""
        if self._ready:
            return "tile", self._ready.popleft()
        return ("scores", self._to_score.popleft()) if self._to_score else None

    def mark_scored(self, group: int) -> None:
        """Mark a group as scored. Tiles that needed only this group become ready."""
        for tile in self._readers[group]:
            self._missing[tile].discard(group)
            if not self._missing[tile]:
                self._ready.append(tile)

    def mark_decoded(self, tile: int) -> Iterator[int]:
        """Yield the groups that no tile needs after this one has been decoded."""
        for group in self._needs[tile]:
            self._readers[group].discard(tile)
            if not self._readers[group]:
                yield group


def make_plan(  # noqa: PLR0913
    source: Path,
    selection: Selection,
    spec: ModelSpec,
    options: Options,
    settings: Settings,
    *,
    workers: int,
    measured: bool = False,
) -> RunPlan:
    """Plan a run for this number of workers. `measured` also measures the objects.

    Raises BadParameter for options that block-wise segmentation does not support, and for unsuitable images.
    """
    source = source.resolve()
    _check_request(selection, options, settings)
    with stack_reader.open_blocks(source, selection) as stack:
        description = stack.describe(selection)
    if description.problem:
        raise BadParameter(description.problem, parameter="time", suggested={"time": "0"})
    plan = Estimator(spec, remove_window_limit(settings)).plan_request(description, options).plan
    size = working_size(description, spec, plan.diameter)
    decoding = apply_postprocessing(spec, plan.postprocessing, description, size).decoding
    _check_decoding(decoding, plan.output)
    overlap, roi, (_, z, y, x) = plan.overlap, spec.input.roi_size, description.shape
    margin = 1 + decoding.smoothing if isinstance(decoding, Instances) and plan.output == "labels" else 0
    layout = Layout(size, roi, overlap, choose_windows(size, roi, overlap, workers, (z, y, x)), margin)
    return RunPlan(
        source,
        _stamp(source),
        selection,
        spec.folder.resolve(),
        spec.weights.sha256,
        settings.engine.model_dump_json() + settings.windows.model_dump_json(),
        options,
        plan.output,
        layout,
        description.shape,
        description.voxel_size,
        plan.diameter,
        workers,
        measured,
    )


def _check_request(selection: Selection, options: Options, settings: Settings) -> None:
    if isinstance(selection.time, TimeRange):
        raise BadParameter(
            "time: block-wise segmentation processes one time point. Select one, such as time=0.",
            parameter="time",
            suggested={"time": "0"},
        )
    if settings.windows.inferer != "own":
        raise BadParameter(
            "windows.inferer: MONAI's inferer holds the scores of the whole volume in memory. Remove this setting."
        )
    if options.roi_size is not None:
        raise BadParameter(
            "roi_size: block-wise segmentation uses the window of the model. Omit this parameter.",
            parameter="roi_size",
        )


def _check_decoding(decoding: object, output: str) -> None:
    if output == "probabilities":
        raise BadParameter(
            "output: block-wise segmentation writes labels or classes, not probabilities.", parameter="output"
        )
    if output != "labels" or not isinstance(decoding, Instances):
        return
    if decoding.holes == "fill":
        raise BadParameter(
            "fill_holes: block-wise segmentation does not fill holes. Set fill_holes=false.",
            parameter="fill_holes",
            suggested={"fill_holes": "false"},
        )
    if not block_kernel.ready:
        raise BadParameter(f"Block-wise segmentation of labels is not available: {block_kernel.problem}.")


def _stamp(source: Path) -> str:
    """Return a stamp that changes when the image is written again: the modification times of its metadata files."""
    files = sorted(path for path in source.glob("*") if path.is_file())
    return " ".join(f"{path.name}:{path.stat().st_mtime_ns}" for path in files)
