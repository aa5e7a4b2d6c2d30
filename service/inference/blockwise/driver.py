"""Plan and driver of a block-wise run. The driver submits blocks, and deletes scores that are no longer needed."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.files.bundled import get_software_version
from service.core.quantities import TimeRange
from service.core.types import Options, Selection
from service.formats import stack_reader
from service.formats.zarr import writer as zarr_writer
from service.inference.blockwise import counting, output
from service.inference.blockwise.layout import Layout, choose_group_shape
from service.inference.blockwise.objects.labels import fills_holes
from service.inference.blockwise.run_folder import BlockTask, RunFolder, RunPlan, Step, open_run, remove_window_limit
from service.inference.decoding.postprocessing import apply_postprocessing
from service.inference.decoding.watershed_kernel import watershed_kernel
from service.inference.preprocessing.resample import compute_working_size
from service.inference.runner.estimator import Estimator
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries, Flows, Instances, StarConvex

if TYPE_CHECKING:
    from service.inference.blockwise.workers import Workers

Progress = Callable[[str, int, int], None]
"""Callback that receives a step, the number of finished blocks in this step, and the total number of its blocks."""


class Driver:
    """Runs all unfinished blocks of a run, in an order that keeps the number of scores on disk small."""

    def __init__(
        self, folder: RunFolder, workers: Workers, progress: Progress = lambda _step, _done, _total: None
    ) -> None:
        self._folder, self._workers, self._progress = folder, workers, progress

    def run(self, out: Path, describe: Callable[[], Mapping[str, str]]) -> None:
        """Run all steps, and write the result to `out`, which appears only when it is complete.

        `describe` returns metadata for the result, and is called just before the result is written. Raises the
        same exceptions as `run_block`.
        """
        self._run_survey()
        self._run = open_run(str(self._folder.path), has_survey=True)
        self._layout = self._run.plan.layout
        self._score_and_decode()
        if self._run.plan.output == "labels":
            self._run_step("region", range(self._layout.num_regions))
            self._run_step("join", [0])
            if fills_holes(self._run):
                self._run_step("holes", range(self._layout.total_groups))
            self._run_step("objects", [0])
        if not self._has_partial_result(out):
            self._folder.discard_records("labels")
            output.create_store(self._run, out, describe())
        for block_numbers in output.list_level_blocks(self._run):
            self._run_step("labels", block_numbers)
        zarr_writer.finish(out)

    def _has_partial_result(self, out: Path) -> bool:
        """Return whether blocks of the result have already been written to `out` rather than to a different path."""
        has_blocks = bool(self._folder.find_finished_blocks("labels")) and zarr_writer.get_partial_path(out).exists()
        return has_blocks and self._folder.levels["out"] == str(out)

    def _run_survey(self) -> None:
        """Compute the intensity histograms of all parts of the image, in as many rounds as needed."""
        part_count = counting.get_part_count(open_run(str(self._folder.path)))
        for round_number in itertools.count():
            self._run_step("count", range(round_number * part_count, (round_number + 1) * part_count))
            self._run_step("survey", [round_number])
            if not self._folder.read_record("survey", round_number)["requests"]:
                break
        for path in (self._folder.path / "survey").iterdir():
            path.unlink()

    def _run_step(self, step: Step, block_numbers: Iterable[int]) -> None:
        requested_blocks, finished_blocks = list(block_numbers), self._folder.find_finished_blocks(step)
        remaining_blocks = [number for number in requested_blocks if number not in finished_blocks]
        num_finished = len(requested_blocks) - len(remaining_blocks)
        self._progress(step, num_finished, len(requested_blocks))
        for future in as_completed([self._submit(step, number) for number in remaining_blocks]):
            future.result()
            num_finished += 1
            self._progress(step, num_finished, len(requested_blocks))

    def _submit(self, step: Step, number: int) -> Future[dict[str, Any]]:
        return self._workers.submit(BlockTask(str(self._folder.path), step, number))

    def _score_and_decode(self) -> None:
        """Score groups of windows in order, decode each tile once its groups are scored, and delete unneeded scores."""
        tile_count, finished_tiles, scored_groups = (
            self._layout.total_groups,
            self._folder.find_finished_blocks("tile"),
            self._folder.find_finished_blocks("scores"),
        )
        order = _BlockOrder(
            {
                tile: set(self._layout.find_required_groups(tile))
                for tile in range(tile_count)
                if tile not in finished_tiles
            },
            lambda group: group in scored_groups and self._has_scores(group),
        )
        running_blocks, num_finished = dict[Future[dict[str, Any]], tuple[Step, int]](), len(finished_tiles)
        self._progress("tile", num_finished, tile_count)
        while True:
            # Submit only blocks that will start soon, so that tiles that become ready run before the next groups.
            while len(running_blocks) < 2 * self._workers.count and (block := order.take_next_block()) is not None:
                running_blocks[self._submit(*block)] = block
            if not running_blocks:
                return
            for future in wait(running_blocks, return_when=FIRST_COMPLETED).done:
                step, number = running_blocks.pop(future)
                future.result()
                if step == "scores":
                    order.mark_scored(number)
                    continue
                num_finished += 1
                self._progress("tile", num_finished, tile_count)
                self._delete_scores(order.mark_decoded(number))

    def _delete_scores(self, groups: Iterable[int]) -> None:
        for group in groups:
            (self._folder.path / f"scores/{group}.raw").unlink(missing_ok=True)

    def _has_scores(self, group: int) -> bool:
        """Return whether the scores of a finished group still exist."""
        has_file = (self._folder.path / f"scores/{group}.raw").exists()
        return has_file or not self._folder.read_record("scores", group)["windows"]


class _BlockOrder:
    """Order in which groups are scored and tiles are decoded, so that scores can be deleted early.

    groups_by_tile  groups that each tile needs, for all tiles that have not been decoded
    is_scored       returns whether the scores of a group exist
    """

    def __init__(self, groups_by_tile: Mapping[int, set[int]], is_scored: Callable[[int], bool]) -> None:
        self._groups_by_tile = groups_by_tile
        self._tiles_by_group = defaultdict[int, set[int]](set)
        for tile, groups in groups_by_tile.items():
            for group in groups:
                self._tiles_by_group[group].add(tile)
        self._groups_to_score = deque(group for group in sorted(self._tiles_by_group) if not is_scored(group))
        unscored_groups = set(self._groups_to_score)
        self._missing_groups = {tile: groups & unscored_groups for tile, groups in groups_by_tile.items()}
        self._ready_tiles = deque(tile for tile, groups in self._missing_groups.items() if not groups)

    def take_next_block(self) -> tuple[Step, int] | None:
        """Return the next block, or None if no block is ready. Tiles come before groups."""
        if self._ready_tiles:
            return "tile", self._ready_tiles.popleft()
        return ("scores", self._groups_to_score.popleft()) if self._groups_to_score else None

    def mark_scored(self, group: int) -> None:
        """Mark a group as scored. Tiles that were waiting only for this group become ready."""
        for tile in self._tiles_by_group[group]:
            self._missing_groups[tile].discard(group)
            if not self._missing_groups[tile]:
                self._ready_tiles.append(tile)

    def mark_decoded(self, tile: int) -> Iterator[int]:
        """Mark a tile as decoded, and yield the groups that no other tile needs."""
        for group in self._groups_by_tile[tile]:
            self._tiles_by_group[group].discard(tile)
            if not self._tiles_by_group[group]:
                yield group


def make_plan(  # noqa: PLR0913
    source: Path,
    selection: Selection,
    spec: ModelSpec,
    options: Options,
    settings: Settings,
    *,
    workers: int,
    measure_objects: bool = False,
) -> RunPlan:
    """Plan a run for the given number of workers. If `measure_objects` is true, the run also measures the objects.

    Raises BadParameter for options and images that block-wise segmentation does not support.
    """
    source = source.resolve()
    _check_request(selection, options, settings)
    with stack_reader.open_blocks(source, selection) as stack:
        description = stack.describe(selection)
    if description.problem:
        raise BadParameter(description.problem, parameter="time", suggested={"time": "0"})
    plan = Estimator(spec, remove_window_limit(settings)).plan_request(description, options).plan
    size = compute_working_size(description, spec, plan.diameter)
    decoding = apply_postprocessing(spec, plan.postprocessing, description, size).decoding
    _check_model(spec, decoding, plan.output, is_resampled=size != description.shape[1:])
    overlap, roi, (_, z, y, x) = plan.overlap, spec.input.roi_size, description.shape
    margin = 1 + decoding.smoothing if isinstance(decoding, Instances) and plan.output == "labels" else 0
    layout = Layout(size, roi, overlap, choose_group_shape(size, roi, overlap, workers, (z, y, x)), margin, spec.tiling)
    return RunPlan(
        source,
        _make_stamp(source),
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
        measure_objects,
        get_software_version(),
    )


def _check_request(selection: Selection, options: Options, settings: Settings) -> None:
    if isinstance(selection.time, TimeRange):
        raise BadParameter(
            "time: block-wise segmentation processes only one time point. Select one, for example time=0.",
            parameter="time",
            suggested={"time": "0"},
        )
    if settings.windows.inferer != "own":
        raise BadParameter(
            "windows.inferer: block-wise segmentation does not support MONAI's inferer, which holds the scores of the"
            " whole volume in memory. Remove this setting."
        )
    if options.roi_size is not None:
        raise BadParameter(
            "roi_size: block-wise segmentation always uses the model's default window size. Omit this parameter.",
            parameter="roi_size",
        )


def _check_model(spec: ModelSpec, decoding: object, output: str, *, is_resampled: bool) -> None:
    _check_decoding(decoding, output)
    if is_resampled and spec.input.resampling == "nnunet":
        raise BadParameter(
            f"voxel_size: {spec.name} resamples scores as nnU-Net does, which block-wise segmentation does not support."
            " Resample the stack to the voxel size of the model first.",
            parameter="voxel_size",
        )


def _check_decoding(decoding: object, output: str) -> None:
    if output == "probabilities":
        raise BadParameter(
            "output: block-wise segmentation cannot write probabilities. Use output=labels or output=classes.",
            parameter="output",
        )
    if isinstance(decoding, StarConvex):
        raise BadParameter(
            "model: block-wise segmentation does not support star-convex polyhedra, because non-maximum suppression"
            " compares the polyhedra of the whole volume. Omit --workers, or use a different model.",
            parameter="model",
        )
    if isinstance(decoding, Flows):
        raise BadParameter(
            "model: block-wise segmentation does not support models with `decoding.kind: flows`, because their network"
            " is applied to planes of the whole stack. Omit --workers, or use a different model.",
            parameter="model",
        )
    if output == "labels" and isinstance(decoding, Boundaries):
        raise BadParameter(
            "output: block-wise segmentation cannot write labels of a model with `decoding.kind: boundaries`, because"
            " the merging of supervoxels depends on the whole stack. Use output=classes, or segment a crop.",
            parameter="output",
            suggested={"output": "classes"},
        )
    if output == "labels" and isinstance(decoding, Instances) and not watershed_kernel.is_available:
        raise BadParameter(f"Block-wise segmentation with output=labels is not available: {watershed_kernel.problem}.")


def _make_stamp(source: Path) -> str:
    """Return a stamp that changes if the image is overwritten: the modification times of its metadata files."""
    files = sorted(path for path in source.glob("*") if path.is_file())
    return " ".join(f"{path.name}:{path.stat().st_mtime_ns}" for path in files)
