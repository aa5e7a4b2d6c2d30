"""Driver of a block-wise run: which block is next, and which of what was handed on nobody needs any more."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from pathlib import Path
from typing import Any

from service.formats import zarr_writer
from service.inference.blockwise import output
from service.inference.blockwise.run_folder import BlockTask, RunFolder, Step, open_run
from service.inference.blockwise.workers import Workers

Progress = Callable[[str, int, int], None]
"""Called with a step, and how many of how many blocks of it are done."""


class Driver:
    """Has all blocks of a run done that are not done yet, in an order that keeps little on disk."""

    def __init__(
        self, folder: RunFolder, workers: Workers, progress: Progress = lambda _step, _done, _total: None
    ) -> None:
        self._folder, self._workers, self._progress = folder, workers, progress
        self._run = open_run(str(folder.path))
        self._layout = self._run.plan.layout

    def run(self, out: Path, describe: Callable[[], Mapping[str, str]]) -> None:
        """Do everything, and write the result to `out`, which appears once it is complete.

        `describe` returns facts about the result for the store, once all but that is there. Raises what `run_block`
        raises.
        """
        self._do("survey", [0])
        self._score_and_decode()
        if self._run.plan.output == "labels":
            self._do("join", [0])
        if not self._folder.done("labels") or not zarr_writer.partial_path(out).exists():
            self._folder.forget("labels")
            output.create_store(self._run, out, describe())
        for numbers in output.blocks_of_levels(self._run):
            self._do("labels", numbers)
        zarr_writer.finish(out)

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
        total, before = self._layout.count, self._folder.done("tile")
        needs = {tile: set(self._layout.needs(tile)) for tile in range(total) if tile not in before}
        readers = defaultdict[int, set[int]](set)
        for tile, groups in needs.items():
            for group in groups:
                readers[group].add(tile)
        scored = {group for group in self._folder.done("scores") if group in readers and self._has_scores(group)}
        missing = {tile: groups - scored for tile, groups in needs.items()}
        ready = deque(tile for tile, groups in missing.items() if not groups)
        to_score = deque(group for group in sorted(readers) if group not in scored)
        running, done = dict[Future[dict[str, Any]], tuple[Step, int]](), len(before)
        self._progress("tile", done, total)
        while ready or to_score or running:
            # No more than are done soon: a tile that becomes ready comes before further groups.
            while (ready or to_score) and len(running) < 2 * self._workers.count:
                step: Step = "tile" if ready else "scores"
                number = (ready or to_score).popleft()
                running[self._submit(step, number)] = (step, number)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step, number = running.pop(future)
                future.result()
                if step == "scores":
                    for tile in readers[number]:
                        missing[tile].discard(number)
                        ready.extend([tile] * (not missing[tile]))
                    continue
                done += 1
                self._progress("tile", done, total)
                self._drop_scores(number, needs[number], readers)

    def _drop_scores(self, tile: int, groups: Iterable[int], readers: Mapping[int, set[int]]) -> None:
        """Delete the scores of groups that no tile has to read after this one."""
        for group in groups:
            readers[group].discard(tile)
            if not readers[group]:
                (self._folder.path / f"scores/{group}.raw").unlink(missing_ok=True)

    def _has_scores(self, group: int) -> bool:
        """Return whether the scores of a group that is done were not dropped yet."""
        is_there = (self._folder.path / f"scores/{group}.raw").exists()
        return is_there or not self._folder.read_record("scores", group)["windows"]
