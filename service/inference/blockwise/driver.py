"""Plan of a block-wise run, and its driver, which hands out blocks in order and drops scores that are read no more."""

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
from service.inference.blockwise.run_folder import BlockTask, RunFolder, RunPlan, Step, lift_limit, open_run
from service.inference.decoding.block_kernel import block_kernel
from service.inference.decoding.steering import steer
from service.inference.preprocessing.resample import working_size
from service.inference.runner.estimator import Estimator
from service.models.spec import Instances, ModelSpec

if TYPE_CHECKING:
    from service.inference.blockwise.workers import Workers

Progress = Callable[[str, int, int], None]
"""Called with a step, and how many of how many blocks of it are done."""


class Driver:
    """Has all blocks of a run done that are not done yet, in an order that keeps little on disk."""

    def __init__(
        self, folder: RunFolder, workers: Workers, progress: Progress = lambda _step, _done, _total: None
    ) -> None:
        self._folder, self._workers, self._progress = folder, workers, progress

    def run(self, out: Path, describe: Callable[[], Mapping[str, str]]) -> None:
        """Do everything, and write the result to `out`, which appears once it is complete.

        `describe` returns facts about the result for the store, once all but that is there. Raises what `run_block`
        raises.
        """
        self._survey()
        self._run = open_run(str(self._folder.path), surveyed=True)
        self._layout = self._run.plan.layout
        self._score_and_decode()
        if self._run.plan.output == "labels":
            self._do("link", range(self._layout.count))
            self._do("join", [0])
        if not self._is_begun(out):
            self._folder.forget("labels")
            output.create_store(self._run, out, describe())
        for numbers in output.blocks_of_levels(self._run):
            self._do("labels", numbers)
        zarr_writer.finish(out)

    def _is_begun(self, out: Path) -> bool:
        """Return whether blocks of the result were written there, and not below another name."""
        is_there = bool(self._folder.done("labels")) and zarr_writer.partial_path(out).exists()
        return is_there and self._folder.levels["out"] == str(out)

    def _survey(self) -> None:
        """Have all parts counted, in as many rounds as it takes."""
        parts = counting.count_parts(open_run(str(self._folder.path)))
        for turn in itertools.count():
            self._do("count", range(turn * parts, (turn + 1) * parts))
            self._do("survey", [turn])
            if not self._folder.read_record("survey", turn)["wanted"]:
                break
        for path in (self._folder.path / "survey").iterdir():
            path.unlink()

    def _do(self, step: Step, numbers: Iterable[int]) -> None:
        wanted, before = list(numbers), self._folder.done(step)
        left = [number for number in wanted if number not in before]
        done = len(wanted) - len(left)
        self._progress(step, done, len(wanted))
        for future in as_completed([self._submit(step, number) for number in left]):
            future.result()
            done += 1
            self._progress(step, done, len(wanted))

    def _submit(self, step: Step, number: int) -> Future[dict[str, Any]]:
        return self._workers.submit(BlockTask(str(self._folder.path), step, number))

    def _score_and_decode(self) -> None:
        """Score groups of windows in order, decode each tile once what it needs is there, and then drop scores."""
        total, before, scored = self._layout.count, self._folder.done("tile"), self._folder.done("scores")
        order = _Order(
            {tile: set(self._layout.needs(tile)) for tile in range(total) if tile not in before},
            lambda group: group in scored and self._has_scores(group),
        )
        running, done = dict[Future[dict[str, Any]], tuple[Step, int]](), len(before)
        self._progress("tile", done, total)
        while True:
            # No more than are done soon: a tile that becomes ready comes before further groups.
            while len(running) < 2 * self._workers.count and (block := order.take()) is not None:
                running[self._submit(*block)] = block
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step, number = running.pop(future)
                future.result()
                if step == "scores":
                    order.note_scored(number)
                    continue
                done += 1
                self._progress("tile", done, total)
                self._drop_scores(order.note_decoded(number))

    def _drop_scores(self, groups: Iterable[int]) -> None:
        for group in groups:
            (self._folder.path / f"scores/{group}.raw").unlink(missing_ok=True)

    def _has_scores(self, group: int) -> bool:
        """Return whether the scores of a group that is done were not dropped yet."""
        is_there = (self._folder.path / f"scores/{group}.raw").exists()
        return is_there or not self._folder.read_record("scores", group)["windows"]


class _Order:
    """Order of groups to score and tiles to decode, by which scores are dropped soon.

    needs      groups of windows that a tile reads, of each tile that is not decoded
    is_scored  whether the scores of a group are there already
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
        """Return the block that is next, None while there is none: tiles come before groups."""
        if self._ready:
            return "tile", self._ready.popleft()
        return ("scores", self._to_score.popleft()) if self._to_score else None

    def note_scored(self, group: int) -> None:
        """Let the tiles that have waited for this group alone be decoded."""
        for tile in self._readers[group]:
            self._missing[tile].discard(group)
            if not self._missing[tile]:
                self._ready.append(tile)

    def note_decoded(self, tile: int) -> Iterator[int]:
        """Yield the groups that no tile has to read after this one."""
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
    """Plan a run for so many workers, in which objects may be `measured`.

    Raises BadParameter for what is not done block by block, and what the header of the image tells already.
    """
    source = source.resolve()
    _check_request(selection, options, settings)
    with stack_reader.open_blocks(source, selection) as stack:
        description = stack.describe(selection)
    if description.problem:
        raise BadParameter(description.problem, parameter="time", suggested={"time": "0"})
    plan = Estimator(spec, lift_limit(settings)).plan_request(description, options).plan
    size = working_size(description, spec, plan.diameter)
    decoding = steer(spec, plan.steering, description, size).decoding
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
            "time: one time point is segmented block by block; say which, as time=0.",
            parameter="time",
            suggested={"time": "0"},
        )
    if settings.windows.inferer != "own":
        raise BadParameter("windows.inferer: MONAI's has the scores of the whole volume in memory; leave it out.")
    if options.roi_size is not None:
        raise BadParameter(
            "roi_size: the model's own window is taken block by block; leave it out.", parameter="roi_size"
        )


def _check_decoding(decoding: object, output: str) -> None:
    if output == "probabilities":
        raise BadParameter(
            "output: labels and classes are written block by block, probabilities are not.", parameter="output"
        )
    if output != "labels" or not isinstance(decoding, Instances):
        return
    if decoding.holes == "fill":
        raise BadParameter(
            "fill_holes: holes of objects are not filled block by block; say fill_holes=false.",
            parameter="fill_holes",
            suggested={"fill_holes": "false"},
        )
    if not block_kernel.ready:
        raise BadParameter(f"Labels are not decoded block by block: {block_kernel.problem}.")


def _stamp(source: Path) -> str:
    """Return what changes when the image is written again: the times of its metadata."""
    files = sorted(path for path in source.glob("*") if path.is_file())
    return " ".join(f"{path.name}:{path.stat().st_mtime_ns}" for path in files)
